"""The promises of `lightning_dsgd.transport`, on every transport that keeps them.

One function per promise, `fn(net)`, called on every rank.  All that leave the network in order run
one after another in the same world, as starting processes is what takes the time.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dsgd.transport import (
    ANY,
    LaneStopped,
    PeerLost,
    Timeout,
    Transport,
    TransportError,
)
from lightning_dsgd.transport.endpoint import Endpoint
from lightning_dsgd.transport.simulated import SimulatedWorld
from tests.mpi import PYTHONS, MPIWorld
from tests.worlds import Outcome, ProcessWorld

EMPTY = torch.empty(0)
PATIENCE_S = 20.0
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
)


class Simulated:
    """A simulated world with the face of a `ProcessWorld`; messages left over are errors."""

    def outcomes(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Outcome]:
        outcomes = SimulatedWorld(world_size, 1e-4, 1e9).outcomes(fn, *args)
        return [
            Outcome(error=f"{type(outcome).__name__}: {outcome}")
            if isinstance(outcome, BaseException)
            else Outcome(outcome)
            for outcome in outcomes
        ]

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return SimulatedWorld(world_size, 1e-4, 1e9).run(fn, *args)


@pytest.fixture(params=["simulated", "process_group", *PYTHONS])
def world(request: pytest.FixtureRequest) -> Simulated | ProcessWorld:
    if request.param == "simulated":
        return Simulated()
    limits = {"timeout_s": PATIENCE_S, "heartbeat_timeout_s": PATIENCE_S}
    if request.param == "process_group":
        return ProcessWorld(**limits)
    return MPIWorld(**limits, job=request.getfixturevalue("mpi_jobs")(request.param))


def pause(net: Any, seconds: float) -> None:
    """Lets time pass, real or virtual."""
    if hasattr(net, "compute"):
        net.compute(seconds)
    else:
        time.sleep(seconds)


def others(net: Transport) -> list[int]:
    return [rank for rank in range(net.world_size) if rank != net.rank]


def same(what: object, expected: object) -> None:
    """Asserts with values also where pytest does not rewrite assertions, in other processes."""
    if isinstance(what, Tensor) and isinstance(expected, Tensor):
        equal = what.dtype == expected.dtype and torch.equal(what, expected)
    else:
        equal = what == expected
    assert equal, f"expected {expected}, got {what}"


def noise(n: int, dtype: torch.dtype = torch.float32, *, seed: int) -> Tensor:
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype) if dtype.is_floating_point else (x * 50 + 128).to(dtype)


# Messages


def messages_of_a_pair_and_tag_stay_in_order(net: Transport) -> None:
    for i in range(20):
        for dst in others(net):
            for tag in (3, 4):
                net.send(torch.tensor([net.rank, tag, i]), dst, tag)
    for tag in (4, 3):
        for src in reversed(others(net)):
            for i in range(20):
                receipt = net.recv(torch.empty(0, dtype=torch.int64), src, tag)
                same(receipt.wait().tolist(), [src, tag, i])
                same(receipt.source, src)


def receives_are_served_in_the_order_in_which_they_began(net: Transport) -> None:
    receipts = {src: [net.recv(EMPTY, src) for _ in range(3)] for src in others(net)}
    net.barrier().wait()
    for dst in others(net):
        for i in range(3):
            net.send(torch.full((i,), float(net.rank)), dst)
    for src in others(net):
        for i in (2, 0, 1):
            same(receipts[src][i].wait(), torch.full((i,), float(src)))
            assert receipts[src][i].done()
            same(receipts[src][i].wait(), torch.full((i,), float(src)))


def any_source_takes_each_message_once(net: Transport) -> None:
    if net.rank:
        for i in range(5):
            net.send(torch.tensor([net.rank, i]), 0, tag=9)
            net.send(torch.tensor([-1]), 0, tag=10)
        return
    heard: dict[int, list[int]] = {src: [] for src in others(net)}
    for _ in range(5 * len(heard)):
        receipt = net.recv(torch.empty(0, dtype=torch.int64), ANY, tag=9)
        rank, i = receipt.wait().tolist()
        same(receipt.source, rank)
        heard[rank].append(i)
    same(heard, {src: [0, 1, 2, 3, 4] for src in others(net)})
    for src in others(net):
        for _ in range(5):
            same(net.recv(torch.empty(0, dtype=torch.int64), src, tag=10).wait().item(), -1)


def messages_have_any_length_and_dtype(net: Transport) -> None:
    for dtype in DTYPES:
        for n in (0, 1, 7, 1000):
            for dst in others(net):
                net.send(noise(n, dtype, seed=net.rank), dst)
            for src in others(net):
                like = torch.empty(3, dtype=dtype)
                x = net.recv(like, src).wait()
                same(x, noise(n, dtype, seed=src))
                x += 1  # a tensor of our own


def a_tensor_sent_without_a_copy_may_change_once_it_is_sent(net: Transport) -> None:
    for n in (5, 3_000_000):
        x = noise(n, seed=net.rank)
        for sent in [net.send(x, dst, copy=False) for dst in others(net)]:
            sent.wait()
            assert sent.done()
        x.fill_(-1)
        for src in others(net):
            same(net.recv(EMPTY, src).wait(), noise(n, seed=src))


def a_sent_tensor_may_change_at_once(net: Transport) -> None:
    for n in (10, 2_000_000):
        for i in range(3):
            x = torch.full((n,), float(10 * net.rank + i))
            for dst in others(net):
                net.send(x, dst)
            x.fill_(-1.0)
        for src in others(net):
            for i in range(3):
                same(net.recv(EMPTY, src).wait(), torch.full((n,), float(10 * src + i)))


def sub_transports_are_independent(net: Endpoint) -> None:
    a, b = net.sub("a"), net.sub("b")
    for dst in others(net):
        for value, end in ((1.0, net), (2.0, a), (3.0, b)):
            end.send(torch.tensor([value]), dst)
    x, y, z = (torch.full((5,), value) for value in (1.0, 10.0, 100.0))
    pairs = [(a, y), (net, x), (b, z)] if net.rank % 2 else [(net, x), (b, z), (a, y)]
    works = {end.path: end.all_reduce(tensor) for end, tensor in pairs}
    for src in others(net):
        for value, end in ((3.0, b), (2.0, a), (1.0, net)):
            same(end.recv(EMPTY, src).wait().item(), value)
    for path in sorted(works):  # ranks wait in one order, whatever the order in which they begin
        works[path].wait()
    for value, tensor in ((1.0, x), (10.0, y), (100.0, z)):
        same(tensor, torch.full((5,), value * net.world_size))


# Collectives


def all_reduce_is_exact_where_sums_are(net: Transport) -> None:
    ranks = range(net.world_size)
    for dtype in (torch.float32, torch.float64, torch.int32, torch.int64):
        for n in (0, 1, net.world_size - 1, net.world_size, 1000, 10_007):
            x = torch.arange(n).to(dtype) * (net.rank + 1)
            assert net.all_reduce(x).wait() is x
            same(x, torch.arange(n).to(dtype) * sum(rank + 1 for rank in ranks))
    n = 1_200_001  # more than one part
    x = torch.full((n,), float(net.rank))
    x[-1] = 0.5
    net.all_reduce(x).wait()
    same(x[:-1], torch.full((n - 1,), float(sum(ranks))))
    same(x[-1].item(), 0.5 * net.world_size)


def all_reduce_is_the_same_to_the_bit_everywhere(net: Transport) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for n in (1, 5, 4099):
            x = noise(n, dtype, seed=net.rank)
            exact = sum(noise(n, dtype, seed=rank).double() for rank in range(net.world_size))
            net.all_reduce(x).wait()
            assert isinstance(exact, Tensor)
            torch.testing.assert_close(x, exact.to(dtype))
            for theirs in net.all_gather(x.view(torch.uint8)).wait():
                same(theirs, x.view(torch.uint8))


def all_reduce_sums_bfloat16_in_float32(net: Transport) -> None:
    xs = [1.0 + noise(501, seed=rank).abs().clamp(max=0.99) for rank in range(net.world_size)]
    xs = [x.bfloat16() for x in xs]  # in [1, 2): their sum is exact in float32
    x = xs[net.rank].clone()
    net.all_reduce(x).wait()
    same(x, torch.stack(xs).float().sum(0).bfloat16())


def all_gather_takes_any_lengths(net: Transport) -> None:
    for dtype in DTYPES:
        sent = [noise(3 * rank % 5, dtype, seed=rank) for rank in range(net.world_size)]
        received = net.all_gather(sent[net.rank]).wait()
        same(len(received), net.world_size)
        for got, expected in zip(received, sent, strict=True):
            same(got, expected)
    for got in net.all_gather(EMPTY).wait():
        same(got, EMPTY)


def all_to_all_takes_any_lengths(net: Transport) -> None:
    def parcel(src: int, dst: int) -> Tensor:
        return noise((2 * src + 3 * dst) % 7, torch.int64, seed=100 * src + dst)

    ranks = range(net.world_size)
    for _ in range(2):
        received = net.all_to_all([parcel(net.rank, dst) for dst in ranks]).wait()
        for src, got in enumerate(received):
            same(got, parcel(src, net.rank))
            got += 1


def broadcast_comes_from_each_root(net: Transport) -> None:
    for src in range(net.world_size):
        for n in (0, 1, 1000):
            x = noise(n, seed=net.rank)
            assert net.broadcast(x, src).wait() is x
            same(x, noise(n, seed=src))


def nobody_leaves_a_barrier_before_the_last_has_come(net: Transport) -> None:
    for last in range(net.world_size):
        pause(net, 0.02 if net.rank == last else 0.0)
        came = net.now()
        net.barrier().wait()
        left = net.now()
        stamps = torch.stack(net.all_gather(torch.tensor([came, left]).double()).wait())
        assert stamps[:, 0].max() <= stamps[:, 1].min(), f"came and left at {stamps.tolist()}"


def groups_are_independent(net: Transport) -> None:
    halves = [list(range(i, net.world_size, 2)) for i in range(2)]
    group = halves[net.rank % 2]
    backwards = group[::-1]
    for i in range(5):
        x = torch.full((7,), float(net.rank + i))
        everyone = torch.ones(3)
        in_group, in_all = net.all_reduce(x, group), net.all_reduce(everyone)
        in_all.wait()
        in_group.wait()
        same(x, torch.full((7,), float(sum(rank + i for rank in group))))
        same(everyone, torch.full((3,), float(net.world_size)))
    gathered = net.all_gather(torch.tensor([net.rank]), backwards).wait()
    same([int(rank) for rank in gathered], backwards)
    sent = [torch.tensor([net.rank, dst]) for dst in backwards]
    received = net.all_to_all(sent, backwards).wait()
    same([x.tolist() for x in received], [[src, net.rank] for src in backwards])
    for src in group:
        x = torch.tensor([net.rank])
        net.broadcast(x, src, backwards).wait()
        same(x.item(), src)
    net.barrier(group).wait()
    alone = torch.tensor([float(net.rank)])
    net.all_reduce(alone, [net.rank]).wait()
    same(alone.item(), float(net.rank))
    same(net.all_gather(alone, [net.rank]).wait()[0].item(), float(net.rank))
    net.broadcast(alone, net.rank, [net.rank]).wait()
    net.barrier([net.rank]).wait()


def many_collectives_may_be_under_way(net: Transport) -> None:
    xs = [torch.full((11,), float(i)) for i in range(10)]
    works = [net.all_reduce(x) for x in xs]
    gathers = [net.all_gather(torch.tensor([net.rank, i])) for i in range(5)]
    for i, work in reversed(list(enumerate(works))):
        same(work.wait(), torch.full((11,), float(i * net.world_size)))
    for i, gather in enumerate(gathers):
        same([x.tolist() for x in gather.wait()], [[rank, i] for rank in range(net.world_size)])


def done_becomes_true_without_wait(net: Transport) -> None:
    x = torch.ones(1000)
    works: dict[str, Any] = {
        "all_reduce": net.all_reduce(x),
        "all_gather": net.all_gather(torch.tensor([net.rank])),
        "all_to_all": net.all_to_all([EMPTY] * net.world_size),
        "broadcast": net.broadcast(torch.tensor([net.rank]), net.world_size - 1),
        "barrier": net.barrier(),
    }
    for dst in others(net):
        works[f"send to {dst}"] = net.send(torch.zeros(10), dst)
        works[f"recv from {dst}"] = net.recv(EMPTY, dst)
    deadline = net.now() + PATIENCE_S
    pending = set(works)
    while pending:
        assert net.now() < deadline, f"never done: {sorted(pending)}"
        pause(net, 1e-4)
        pending = {name for name in pending if not works[name].done()}
    for work in works.values():
        work.wait(timeout_s=1.0)
    same(x, torch.full((1000,), float(net.world_size)))
    same(works["broadcast"].wait().item(), net.world_size - 1)


# Lanes


def rounds_of_everything(net: Transport, base: float, results: list[float]) -> None:
    right, left = (net.rank + 1) % net.world_size, (net.rank - 1) % net.world_size
    for i in range(25):
        x = torch.full((33,), base + i)
        net.all_reduce(x).wait()
        gathered = net.all_gather(torch.tensor([base + net.rank])).wait()
        if right != net.rank:
            net.send(x, right)
            same(net.recv(x, left).wait(), x)
        same([y.item() for y in gathered], [base + rank for rank in range(net.world_size)])
        results.append(x[0].item())
    net.barrier().wait()


def lanes_do_not_disturb_each_other(net: Transport) -> None:
    results: dict[float, list[float]] = {0.0: [], 1000.0: [], 2000.0: []}
    lanes = [
        net.spawn_lane(
            lambda lane_net, base=base: rounds_of_everything(lane_net, base, results[base]), name
        )
        for base, name in ((1000.0, "first"), (2000.0, "second"))
    ]
    rounds_of_everything(net, 0.0, results[0.0])
    for lane in lanes:
        lane.join()
        lane.check()
    for base, sums in results.items():
        same(sums, [net.world_size * (base + i) for i in range(25)])


def threads_of_a_rank_talk_by_messages_to_it(net: Transport) -> None:
    ends: list[Transport] = []

    def answer(lane_net: Transport) -> None:
        ends.append(lane_net)
        net.send(EMPTY, net.rank, tag=1)
        for _ in range(5):
            question = lane_net.recv(EMPTY, net.rank).wait()
            net.send(question + 1, net.rank, tag=2)

    before = net.counters.bytes_sent, net.counters.messages_sent
    lane = net.spawn_lane(answer)
    net.recv(EMPTY, ANY, tag=1).wait()
    for i in range(5):
        receipt = net.recv(EMPTY, net.rank, tag=2)
        ends[0].send(torch.tensor([float(i)]), net.rank)
        same(receipt.wait().item(), i + 1.0)
        same(receipt.source, net.rank)
    lane.join()
    x = torch.ones(3)
    net.send(x, net.rank)
    x.zero_()
    same(net.recv(x, net.rank).wait(), torch.ones(3))
    same((net.counters.bytes_sent, net.counters.messages_sent), before)


def lanes_that_wait_or_poll_can_be_stopped(net: Transport) -> None:
    ended: list[str] = []

    def in_receive(lane_net: Transport) -> None:
        try:
            lane_net.recv(EMPTY, ANY).wait()
        except LaneStopped:
            ended.append("receive")
            raise

    def in_collective(lane_net: Transport) -> None:
        try:
            lane_net.broadcast(torch.ones(8), 1).wait()  # which rank 1 never calls
        finally:
            ended.append("collective")

    def polling(lane_net: Transport) -> None:
        receipt = lane_net.recv(EMPTY, ANY)
        try:
            while not receipt.done():
                pause(lane_net, 1e-3)
        finally:
            ended.append("polling")

    if net.world_size == 1:
        return
    third = in_receive if net.rank else in_collective  # every rank spawns as many
    lanes = [net.spawn_lane(fn) for fn in (in_receive, polling, third)]
    pause(net, 0.05)
    begin = net.now()
    for lane in lanes:
        lane.check()
        lane.stop()
    assert net.now() - begin < 5.0
    same(sorted(ended), sorted(["receive", "polling", "receive" if net.rank else "collective"]))


def a_lane_may_be_stopped_at_once(net: Transport) -> None:
    def fn(lane_net: Transport) -> None:
        while True:
            pause(lane_net, 1e-3)
            lane_net.recv(EMPTY, ANY).done()

    net.spawn_lane(fn).stop()


# Counting


def waiting_is_counted(net: Transport) -> None:
    def lane_fn(lane_net: Transport) -> None:
        late_message(lane_net)

    def late_message(end: Transport) -> None:
        if end.rank == 0:
            end.recv(EMPTY, 1).wait()
        elif end.rank == 1:
            pause(end, 0.2)
            end.send(EMPTY, 0)

    if net.world_size == 1:
        return
    net.barrier().wait()
    begin, wait_s, comm_s = net.now(), net.counters.wait_s, net.counters.comm_s
    late_message(net)
    if net.rank == 0:
        elapsed = net.now() - begin
        assert 0.1 <= net.counters.wait_s - wait_s <= elapsed + 1e-6
        assert 0.1 <= net.counters.comm_s - comm_s <= elapsed + 1e-6
    net.barrier().wait()
    wait_s, comm_s = net.counters.wait_s, net.counters.comm_s
    lane = net.spawn_lane(lane_fn)
    pause(net, 0.3)
    same(net.counters.wait_s, wait_s)
    lane.join()
    if net.rank == 0:
        assert net.counters.comm_s - comm_s >= 0.1


def traffic(net: Transport) -> dict[str, tuple[int, int]]:
    """Bytes and messages that each operation takes on this rank."""
    ranks = range(net.world_size)
    right = (net.rank + 1) % net.world_size
    operations: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: net.all_reduce(torch.ones(12)),
        "all_reduce bf16": lambda: net.all_reduce(torch.ones(12, dtype=torch.bfloat16)),
        "all_gather": lambda: net.all_gather(torch.ones(net.rank + 1)),
        "all_to_all": lambda: net.all_to_all([torch.ones(dst) for dst in ranks]),
        "broadcast": lambda: net.broadcast(torch.ones(5), 0),
        "barrier": net.barrier,
        "send": lambda: net.send(torch.ones(7, dtype=torch.int64), right),
    }
    table = {}
    counters = net.counters
    for name, operation in operations.items():
        before = counters.bytes_sent, counters.messages_sent
        operation().wait()
        after = counters.bytes_sent, counters.messages_sent
        table[name] = (after[0] - before[0], after[1] - before[1])
    net.recv(torch.empty(0, dtype=torch.int64), (net.rank - 1) % net.world_size).wait()
    return table


def all_reduces_send_no_more_than_they_must(net: Transport) -> None:
    """2n(P-1)/P elements a rank; where P does not divide n, over all ranks."""
    for n in (1, 5, 840, 1001):
        before = net.counters.bytes_sent
        net.all_reduce(torch.ones(n)).wait()
        sent = torch.tensor([net.counters.bytes_sent - before])
        total = int(torch.stack(net.all_gather(sent).wait()).sum())
        same(total, 4 * 2 * n * (net.world_size - 1))
        if n % net.world_size == 0:
            same(sent.item(), 4 * 2 * n * (net.world_size - 1) // net.world_size)


def lanes_count_for_their_rank(net: Transport) -> None:
    def around(lane_net: Transport) -> None:
        lane_net.send(torch.ones(6), (net.rank + 1) % net.world_size)
        lane_net.recv(EMPTY, (net.rank - 1) % net.world_size).wait()

    if net.world_size == 1:
        return
    before = net.counters.bytes_sent, net.counters.messages_sent
    net.spawn_lane(around).join()
    same((net.counters.bytes_sent, net.counters.messages_sent), (before[0] + 24, before[1] + 1))


IN_ORDER = (
    messages_of_a_pair_and_tag_stay_in_order,
    receives_are_served_in_the_order_in_which_they_began,
    any_source_takes_each_message_once,
    messages_have_any_length_and_dtype,
    a_sent_tensor_may_change_at_once,
    a_tensor_sent_without_a_copy_may_change_once_it_is_sent,
    sub_transports_are_independent,
    all_reduce_is_exact_where_sums_are,
    all_reduce_is_the_same_to_the_bit_everywhere,
    all_reduce_sums_bfloat16_in_float32,
    all_gather_takes_any_lengths,
    all_to_all_takes_any_lengths,
    broadcast_comes_from_each_root,
    nobody_leaves_a_barrier_before_the_last_has_come,
    groups_are_independent,
    many_collectives_may_be_under_way,
    done_becomes_true_without_wait,
    lanes_do_not_disturb_each_other,
    threads_of_a_rank_talk_by_messages_to_it,
    lanes_that_wait_or_poll_can_be_stopped,
    a_lane_may_be_stopped_at_once,
    waiting_is_counted,
    all_reduces_send_no_more_than_they_must,
    lanes_count_for_their_rank,
)


def run_in_order(net: Transport) -> None:
    for check in IN_ORDER:
        net.barrier().wait()
        try:
            check(net)
        except Exception as error:
            traceback.print_exc()
            raise AssertionError(f"{check.__name__}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_that_leaves_the_network_in_order(world, world_size):
    world.run(world_size, run_in_order)


@pytest.mark.parametrize("world_size", [5, 8])
def test_all_that_leaves_the_network_in_order_on_more_ranks(world_size):
    Simulated().run(world_size, run_in_order)


TRAFFIC = {
    2: {
        "all_reduce": [(48, 2)] * 2,
        "all_reduce bf16": [(36, 2)] * 2,  # half of it in float32
        "all_gather": [(4, 1), (8, 1)],
        "all_to_all": [(4, 1), (0, 1)],
        "broadcast": [(20, 1), (0, 0)],
        "barrier": [(0, 1)] * 2,
        "send": [(56, 1)] * 2,
    },
    3: {
        "all_reduce": [(64, 4)] * 3,
        "all_reduce bf16": [(48, 4)] * 3,
        "all_gather": [(8, 2), (16, 2), (24, 2)],
        "all_to_all": [(12, 2), (8, 2), (4, 2)],
        "broadcast": [(40, 2), (0, 0), (0, 0)],
        "barrier": [(0, 2)] * 3,
        "send": [(56, 1)] * 3,
    },
    4: {
        "all_reduce": [(72, 4)] * 4,
        "all_reduce bf16": [(54, 4)] * 4,
        "all_gather": [(12, 3), (24, 3), (36, 3), (48, 3)],
        "all_to_all": [(24, 3), (20, 3), (16, 3), (12, 3)],
        "broadcast": [(40, 2), (20, 1), (0, 0), (0, 0)],
        "barrier": [(0, 2)] * 4,
        "send": [(56, 1)] * 4,
    },
}
"""World size: operation: (bytes, messages) of each rank."""


@pytest.mark.parametrize("world_size", TRAFFIC)
def test_traffic_is_the_same_on_all_transports(world, world_size):
    ranks = world.run(world_size, traffic)
    assert {name: [rank[name] for rank in ranks] for name in ranks[0]} == TRAFFIC[world_size]


# Errors that a rank survives


def arguments_are_checked(net: Transport) -> None:
    me, x = net.rank, torch.ones(4)
    wide = torch.ones(2, 2)
    shape = r"one-dimensional and contiguous, got the shape \(2, 2\)"
    wrong: list[tuple[str, Callable[[], object]]] = [
        (rf"dst must be a rank of 0 to 1, got dst=2 on rank {me}", lambda: net.send(x, 2)),
        (r"got dst=-1 on rank", lambda: net.send(x, ANY)),
        (r"src must be a rank of 0 to 1, got src=5", lambda: net.recv(x, 5)),
        (r"got src=-2 on rank", lambda: net.recv(x, -2)),
        (shape, lambda: net.send(wide, 1 - me)),
        (shape, lambda: net.all_reduce(wide)),
        (shape, lambda: net.all_gather(wide)),
        (shape, lambda: net.all_to_all([wide, wide])),
        (shape, lambda: net.broadcast(wide, 0)),
        (r"contiguous, .* the strides \(2,\)", lambda: net.send(x[::2], 1 - me)),
        (rf"must hold this rank.*got group=\({1 - me},\)", lambda: net.all_reduce(x, [1 - me])),
        (r"got group=\(0, 1, 0\)", lambda: net.all_gather(x, [0, 1, 0])),
        (r"got group=\(0, 1, 2\)", lambda: net.barrier([0, 1, 2])),
        (r"got group=\(-1, 0, 1\)", lambda: net.barrier([-1, 0, 1])),
        (r"one tensor for each member .* got 1 tensors", lambda: net.all_to_all([x])),
        (r"src must be in the group, got src=2", lambda: net.broadcast(x, 2)),
    ]
    for message, call in wrong:
        try:
            with pytest.raises(ValueError, match=message):
                call()
        except BaseException as error:  # pytest's own failures say nothing of which case it was
            raise AssertionError(f"{message}: {error}") from error


def mismatched_collectives_name_both(net: Transport) -> None:
    def both(zero: Callable[[Transport], Any], one: Callable[[Transport], Any], name: str) -> str:
        with pytest.raises(TransportError) as info:
            (one if net.rank else zero)(net.sub(name)).wait()
        return str(info.value)

    text = both(
        lambda end: end.all_reduce(torch.ones(8)), lambda end: end.all_gather(torch.ones(8)), "a"
    )
    for word in ("disagree", "all_reduce", "all_gather", f"rank {1 - net.rank} calls"):
        assert word in text, text
    text = both(lambda end: end.barrier(), lambda end: end.all_to_all([EMPTY, EMPTY]), "b")
    for word in ("disagree", "barrier", "all_to_all"):
        assert word in text, text


def mismatched_lengths_and_dtypes_are_errors(net: Transport) -> None:
    me = net.rank
    wrong: dict[str, Callable[[Transport], Any]] = {
        "float32|float64": lambda end: end.all_reduce(
            torch.ones(8).to([torch.float32, torch.float64][me])
        ),
        "elements": lambda end: end.all_reduce(torch.ones(8 + 2 * me)),
        "elements from": lambda end: end.all_reduce(torch.ones(2 + 2 * me)),
    }
    for message, call in wrong.items():
        with pytest.raises(TransportError, match=message):
            call(net.sub(message)).wait()
    net.send(torch.ones(3), 1 - me, tag=5)
    with pytest.raises(
        TransportError, match=r"expected torch.int64 from rank ., got torch.float32"
    ):
        net.recv(torch.empty(0, dtype=torch.int64), 1 - me, tag=5).wait()
    x = torch.ones(3 + me)
    if me == 0:
        net.broadcast(x, 0).wait()
    else:
        with pytest.raises(
            TransportError, match="expected 4 elements from rank 0 in broadcast, got 3"
        ):
            net.broadcast(x, 0).wait()


def timeouts_say_who_waited_for_what(net: Transport) -> None:
    me, other = net.rank, 1 - net.rank

    def times_out(message: str, work: Any) -> None:
        begin = net.now()
        with pytest.raises(Timeout, match=message):
            work.wait(timeout_s=0.2)
        assert 0.19 <= net.now() - begin < 5.0

    who = f"rank {me} has waited 0.2 s for "
    times_out(who + f"a message with tag 7 from rank {other}$", net.recv(EMPTY, other, tag=7))
    times_out(who + "a message with tag 0 from any rank", net.recv(EMPTY, ANY))
    times_out(
        who + r"a message with tag 0 from any rank \[inner\]", net.sub("inner").recv(EMPTY, ANY)
    )
    if me == 0:
        times_out(who + "broadcast number 0 from rank 1", net.sub("x").broadcast(torch.ones(2), 1))
    net.barrier().wait()
    net.send(torch.ones(2), other, tag=7)  # not for those who gave up
    same(net.recv(EMPTY, other, tag=7).wait(), torch.ones(2))
    lane = net.spawn_lane(lambda lane_net: lane_net.recv(EMPTY, ANY).wait() and None)
    with pytest.raises(Timeout, match=f"rank {me} has waited 0.2 s for .*lane-1"):
        lane.join(timeout_s=0.2)
    lane.check()
    lane.stop()


SURVIVED = (
    arguments_are_checked,
    mismatched_collectives_name_both,
    mismatched_lengths_and_dtypes_are_errors,
    timeouts_say_who_waited_for_what,
)


def run_survived(net: Transport) -> list[str]:
    failed = []
    for check in SURVIVED:
        net.barrier().wait()
        try:
            check(net)
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{check.__name__}: {type(error).__name__}: {error}")
    return failed


def test_errors_that_a_rank_survives(world):
    for outcome in world.outcomes(2, run_survived):
        assert (outcome.error, outcome.result) == ("", [])


# Errors that end the world


def a_rank_fails(net: Transport) -> None:
    net.barrier().wait()
    if net.rank == 1:
        pause(net, 0.5)
        raise ValueError("no such luck")
    if net.rank == 0:
        net.recv(EMPTY, 2).wait()  # nothing to do with rank 1
    net.barrier().wait()


def test_a_failed_rank_is_named_to_all(world):
    zero, one, two = world.outcomes(3, a_rank_fails)
    assert one.error == "ValueError: no such luck"
    for outcome in (zero, two):
        assert outcome.error.startswith(
            "PeerLost: rank 1 failed: ValueError: no such luck; noticed"
        )
    assert "a message with tag 0 from rank 2" in zero.error
    assert "barrier number 1" in two.error


def a_lane_fails(net: Transport) -> list[str]:
    def fn(lane_net: Transport) -> None:
        lane_net.recv(EMPTY, 1).wait()
        raise ValueError("in the lane")

    heard: list[str] = []
    if net.rank == 0:
        lane = net.spawn_lane(fn)
        lane.check()
        net.send(EMPTY, 1)
        with pytest.raises(ValueError, match="in the lane"):
            lane.join()
        for look in (lane.check, lane.stop):
            with pytest.raises(ValueError, match="in the lane"):
                look()
        with pytest.raises(PeerLost, match="rank 0 failed: ValueError: in the lane"):
            net.recv(EMPTY, 1).wait()
    else:
        net.recv(EMPTY, 0).wait()
        net.spawn_lane(lambda lane_net: lane_net.send(EMPTY, 0) and None).join()
        with pytest.raises(PeerLost) as info:
            net.recv(EMPTY, ANY).wait()
        same((info.value.rank, info.value.reason), (0, "failed: ValueError: in the lane"))
        with pytest.raises(PeerLost, match="rank 0 failed: ValueError: in the lane"):
            net.check()
        with pytest.raises(PeerLost, match="rank 0 failed: ValueError: in the lane"):
            net.send(EMPTY, 0)
        heard.append(info.value.waited_for)
    return heard


def test_a_failed_lane_is_raised_at_home_and_fails_its_rank(world):
    outcomes = world.outcomes(2, a_lane_fails)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    assert outcomes[1].result == ["a message with tag 0 from any rank"]


def a_rank_leaves(net: Transport) -> None:
    net.barrier().wait()
    if net.rank == 1:
        net.send(torch.ones(1), 0)
        return
    net.recv(EMPTY, 1).wait()
    net.recv(EMPTY, 1, tag=3).wait()


def test_a_rank_that_left_is_named(world):
    zero, one = world.outcomes(2, a_rank_leaves)
    assert one.error == ""
    assert zero.error.startswith("PeerLost: rank 1 has left")
    assert zero.error.endswith("noticed in: a message with tag 3 from rank 1")
