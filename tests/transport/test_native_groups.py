"""Sums and broadcasts in groups by batched sends and receives, over gloo and an emulated NCCL."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_dsgd.algorithms.wagma import WAGMA
from lightning_dsgd.primitives import quantised
from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.transport import PeerLost, native_groups
from lightning_dsgd.transport.native import NativeCollective
from lightning_dsgd.transport.native_groups import InShards, total
from lightning_dsgd.transport.processes import CPU
from lightning_dsgd.transport.view import View
from tests.support.fake_device import FakeDevice
from tests.support.rank import Rank
from tests.support.thorough import cases
from tests.support.worlds import NativeWorld, ProcessWorld
from tests.transport.contract.helpers import noise
from tests.transport.helpers import died
from tests.transport.test_native_device import FakeNCCLWorld

WORLD = NativeWorld(heartbeat_timeout_s=60.0)
SIZES = 0, 1, 3, 1001
DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8
P = 6
PIECE = 400
"""So many elements are sent at a time, and not all at once."""


def groups_of(rank: int) -> list[list[int]]:
    """Groups of 2 to P ranks that this one is in; they overlap, and are in any order."""
    pairs, halves = [rank & ~1, rank | 1], [*range(rank % 2, P, 2)]
    most = [4, 2, 0, 1, 5] if rank != 3 else []
    four = [[5, 0, 3, 2]] if rank in (0, 2, 3, 5) else []
    backwards = [*reversed(range(P))]
    return [group for group in (pairs, halves, most, *four, backwards) if group]


def sum_in_groups(net: Any, device: torch.device = CPU, dtypes: Any = DTYPES) -> list[Tensor]:
    """What each group's sums and broadcasts make, all under way at once."""
    works: list[Any] = []
    me = net.rank
    is_native = net.sum_engine != ""
    for dtype in dtypes:
        for n in SIZES:
            for group in groups_of(me):
                x, y, z = (noise(n, dtype, seed=me).to(device) for _ in range(3))
                works.append(net.all_reduce(x, group))
                works.append(net.broadcast(y, group[n % len(group)], group))
                into = torch.zeros(n * len(group), dtype=dtype).to(device)
                works.append(net.gather_into(into, z, [n] * len(group), group))
                assert isinstance(works[-2], InShards) == is_native
                assert isinstance(works[-1], NativeCollective) == is_native
    return [work.wait().clone().cpu() for work in works]


def whole_and_in_pieces(net: Any) -> tuple[list[Tensor], list[Tensor]]:
    whole = sum_in_groups(net.sub("whole"))
    with mock.patch.object(native_groups, "PIECE", PIECE):
        return whole, sum_in_groups(net.sub("pieces"))


def test_the_bits_are_those_of_messages() -> None:
    by_messages, by_torch = ProcessWorld().run(P, sum_in_groups), WORLD.run(P, whole_and_in_pieces)
    for mine, (whole, pieces) in zip(by_messages, by_torch, strict=True):
        assert len(mine) == len(whole)
        for a, b, c in zip(mine, whole, pieces, strict=True):
            assert a.equal(b)
            assert a.equal(c)


def rooms_of_a_sum_of_two(net: Any) -> int:
    """How many tensors a sum in three pieces makes for what comes to this rank."""
    if net.rank == 2:
        return 0
    with (
        mock.patch.object(native_groups, "PIECE", PIECE),
        mock.patch.object(torch, "empty_like", wraps=torch.empty_like) as made,
    ):
        net.all_reduce(noise(1001, seed=net.rank), [0, 1]).wait()
    return made.call_count


def test_all_pieces_of_a_sum_come_to_the_same_place() -> None:
    assert WORLD.run(3, rooms_of_a_sum_of_two) == [2, 2, 0]


def sum_by_messages(net: Any, dtype: torch.dtype) -> Tensor:
    return net.all_reduce(noise(50, dtype, seed=net.rank)).wait()  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", DTYPES)
def test_shares_are_added_as_messages_add_them_in_groups_of_any_size(dtype: torch.dtype) -> None:
    for size in (*range(2, 10), 13, 16):
        [expected, *_] = SimulatedWorld(size).run(sum_by_messages, dtype)
        shares = [noise(50, dtype, seed=rank) for rank in range(size)]
        assert total(shares).to(dtype).equal(expected), size


def on_device(net: Any, fake: FakeDevice) -> list[Tensor]:
    return sum_in_groups(net, fake.device, FEW)


def on_host(net: Any) -> list[Tensor]:
    return sum_in_groups(net, dtypes=FEW)


FEW = torch.float32, torch.bfloat16


def test_on_a_device_the_sums_run_behind_what_makes_their_arguments() -> None:
    """And the emulated NCCL, which runs all in one order, comes to an end."""
    for mine, theirs in zip(
        ProcessWorld().run(P, on_host), FakeNCCLWorld().run(P, on_device), strict=True
    ):
        assert all(a.equal(b) for a, b in zip(mine, theirs, strict=True))


# ---- algorithms ----
N = 4000


def train(net: Any, options: dict[str, Any], num_steps: int) -> tuple[Tensor, int, int]:
    """A rank's own weights; and the bytes that left this rank by each way meanwhile."""
    x = noise(N, seed=net.rank)
    rank = Rank(net.sub("wagma"), WAGMA(grace_s=math.inf, **options), x)
    net.barrier().wait()
    before = {name: traffic.bytes for name, traffic in net.counters.sent.items()}
    for step in range(num_steps):
        rank.descend(x - noise(N, seed=step), 0.1)
    own = rank.settle()
    after = {name: traffic.bytes for name, traffic in net.counters.sent.items()}
    rank.finish()
    over_tcp, by_engine = (after.get(name, 0) - before.get(name, 0) for name in ("TCP", "gloo"))
    return own, over_tcp, by_engine


@cases(
    "world_size, options",
    now=[(11, {"group_size": 2})],
    later=[
        (24, {}),
        (13, {"group_size": 3}),
        (24, {"group_size": 4, "node_size": 2}),
    ],
)
def test_no_weights_of_wagma_travel_over_tcp_at_any_number_of_ranks(
    world_size: int, options: dict[str, Any]
) -> None:
    """At these, a rank is in more than eight different groups."""
    steps = 12
    for _, over_tcp, by_engine in WORLD.run(world_size, train, options, steps):
        assert over_tcp < N * 4 / 2, "as many bytes as in one sum of two ranks"
        assert by_engine >= steps * N * 4 / 2


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (5, {"group_size": 3, "sync_period": 1000}),
        (4, {"group_size": 2, "node_size": 2, "sync_period": 1, "wire_dtype": "int8"}),
    ],
)
def test_the_weights_are_those_of_messages(world_size: int, options: dict[str, Any]) -> None:
    worlds = ProcessWorld(), WORLD
    by_messages, by_torch = (w.run(world_size, train, options, 6) for w in worlds)
    for mine, theirs in zip(by_messages, by_torch, strict=True):
        assert mine[0].equal(theirs[0])
        in_sums = mine[1] - theirs[1]
        assert abs(in_sums - theirs[2]) < 1000, "but for activations, as many bytes as in messages"


def average_in_columns(net: Any, sums_in_lanes: bool) -> list[tuple[str, set[str]]]:
    """Averages rounded values over some of the ranks, in two threads.

    Returns, for each thread, what the network says of its sums, and what has carried them.
    """
    columns = View.one_of(net.sub("columns"), [[0, 2], [1, 3]], sums_in_lanes=sums_in_lanes)
    found = []

    def average(column: Any) -> None:
        before = {name: traffic.bytes for name, traffic in net.counters.sent.items()}
        x = noise(1000, seed=net.rank)
        quantised.average(column, x, quantised.residual_of(column, x, "int8"), "int8")
        after = {name: traffic.bytes for name, traffic in net.counters.sent.items()}
        used = {name for name, sent in after.items() if sent > before.get(name, 0)}
        found.append((column.sum_engine, used))

    average(columns)
    columns.spawn_lane(average).join()
    net.barrier().wait()
    return found


def test_rounded_sums_of_some_ranks_travel_as_their_network_says() -> None:
    by_engine, by_messages = ("gloo", {"gloo"}), ("", {"TCP"})
    for sums_in_lanes, in_lane in [(True, by_engine), (False, by_messages)]:
        assert WORLD.run(4, average_in_columns, sums_in_lanes) == [[by_engine, in_lane]] * 4


# ---- what ends a wait ----
def die_in_a_group(net: Any) -> list[str]:
    errors, group = [], [2, 0, 1]
    net.all_reduce(torch.ones(9), group).wait()
    works = []
    if net.rank != 1:
        works = [net.all_reduce(torch.ones(9), group), net.broadcast(torch.ones(9), 0, group)]
        net.send(torch.empty(0), 1)
    else:
        for other in (0, 2):
            net.recv(torch.empty(0), other).wait()
        died(1)
    for work in works:
        with pytest.raises(PeerLost) as info:
            work.wait()
        errors.append(str(info.value))
    net.fail("has nothing left to do")
    return errors


def test_a_lost_rank_ends_the_wait_for_its_group() -> None:
    outcomes = WORLD.outcomes(3, die_in_a_group)
    for rank in (0, 2):
        sum_, broadcast = outcomes[rank].result
        assert sum_.startswith("rank 1 died")
        assert sum_.endswith("noticed in: all_reduce number 1 of ranks 2, 0, 1")
        assert broadcast.endswith("noticed in: broadcast number 2 of ranks 2, 0, 1")
