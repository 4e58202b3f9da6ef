"""A view keeps all promises of a transport, among its members, whatever their numbers below."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.transport.view import View, is_old
from tests.support.thorough import cases
from tests.transport.contract.helpers import EMPTY, Simulated, others, same
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


def test_what_an_older_view_has_sent_is_told_by_its_number():
    for number in (0, 77, 40_000):  # of which few bits travel
        view = object.__new__(View)
        view.number = number
        numbered = [view._numbered(channel) for channel in (-(1 << 63), -5, 0, (1 << 63) - 1)]
        for n, expected in ((-1, False), (0, False), (1, True), (9_000, True)):
            assert [is_old(number + n, each) for each in numbered] == [expected] * 4
