"""A view keeps all promises of a transport, among its members, whatever their numbers below."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.transport.view import View
from tests.support.thorough import cases
from tests.support.worlds import ProcessWorld
from tests.transport.contract.helpers import EMPTY, PATIENCE_S, Simulated, others, same
from tests.transport.contract.test_in_order import run_in_order


class Timed(View):
    """One of a simulated network, whose time passes."""

    def compute(self, seconds: float) -> None:
        below: Any = self.below
        below.compute(seconds)


def as_member(net: Any, fn: Callable[..., Any], *args: Any) -> Any:
    """Calls `fn` on a view of all ranks but 1, in another order; rank 1 is no member."""
    members = tuple(rank for rank in reversed(range(net.world_size)) if rank != 1)
    kind = Timed if hasattr(net, "compute") else View
    return fn(kind(net, members, number=3), *args) if net.rank != 1 else None


@cases("world_size", now=[1, 3], later=[2, 4])
def test_a_view_keeps_the_contract(world_size):
    Simulated().run(world_size + 1, as_member, run_in_order)


@pytest.mark.exhaustive
def test_a_view_of_processes_keeps_the_contract():
    ProcessWorld(PATIENCE_S, PATIENCE_S).run(4, as_member, run_in_order)


def talk_in_two_views(net: Any) -> None:
    """The message of the older view is there first, and is not taken."""
    old, new = View(net, range(net.world_size), 1), View(net, range(net.world_size), 2)
    for dst in others(net):
        old.send(torch.ones(1), dst)
        new.send(torch.full((1,), 2.0), dst)
    for src in others(net):
        same(new.recv(EMPTY, src).wait(), torch.full((1,), 2.0))
    for src in others(net):
        same(old.recv(EMPTY, src).wait(), torch.ones(1))


def test_no_view_takes_a_message_of_another():
    SimulatedWorld(3).run(talk_in_two_views)
