"""Ranks on nodes of their own: network namespaces, as the lab emulates them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from lightning_dsgd.lab.jobs import network
from tests.support.worlds import ProcessWorld

shaped = pytest.mark.skipif(bool(network.why_not()), reason=network.why_not() or "possible here")


@dataclass
class NodeWorld(ProcessWorld):
    """P processes, each on the node of its rank; `fn(net, nodes, *args)` may cut links of these."""

    nodes: network.Network | None = None

    def _join(self, rank: int, world_size: int, store: str) -> None:
        assert self.nodes is not None
        with open(f"/run/netns/{self.nodes.namespace(rank)}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
        os.environ["GLOO_SOCKET_IFNAME"] = network.INTERFACE
        super()._join(rank, world_size, store)

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return super()._call(fn, (self.nodes, *args))
