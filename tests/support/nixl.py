"""Runs a function on every rank of a world whose messages are read by NIXL, however small they are.

`NIXLWorld`, `NIXLNodeWorld` and `NIXLFitWorld` are what `ProcessWorld`, `NodeWorld` and `FitWorld`
are, over NIXL.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from lightning_dsgd import doctor
from lightning_dsgd.transport import nixl, nixl_reads
from lightning_dsgd.transport.nixl import NIXLTransport
from lightning_dsgd.transport.nixl_agent import installed
from tests.support.worlds import FitWorld, NodeWorld, ProcessWorld

_KNOWN = "TESTS_WHY_NO_NIXL"
"""The variable in which the process that collects the tests tells the ranks what it has found."""


def why_not() -> str:
    """Why NIXL cannot be tested here; empty if it can."""
    if not installed():
        return "needs NIXL (the extra `nixl`): run by make test-nixl"
    if _KNOWN not in os.environ:
        [finding] = doctor.nixl()
        reason = f"NIXL reads no memory here: {finding.found}; {finding.advice}"
        os.environ[_KNOWN] = "" if finding.works else reason
    return os.environ[_KNOWN]


has_nixl = pytest.mark.skipif(bool(why_not()), reason=why_not() or "possible here")


def read_all() -> None:
    """Has this process offer every message, and read in parts what another one would at once."""
    nixl._SMALLEST_BYTES = 1  # type: ignore[misc]
    nixl_reads._PART_BYTES = 4096  # type: ignore[misc]


@dataclass
class NIXLWorld(ProcessWorld):
    """P processes, each with a `NIXLTransport`."""

    def _open(self) -> NIXLTransport:
        read_all()
        return NIXLTransport(self.timeout_s, self.heartbeat_timeout_s)


@dataclass
class NIXLNodeWorld(NodeWorld):
    """The same with every rank on a node of its own, a network namespace."""

    def _open(self) -> NIXLTransport:
        read_all()
        return NIXLTransport(self.timeout_s, self.heartbeat_timeout_s)


@dataclass
class NIXLFitWorld(FitWorld):
    """P processes that a Trainer takes for those of torchrun: `Trainer(devices=P, ...)`."""

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        read_all()
        return super()._call(fn, args)
