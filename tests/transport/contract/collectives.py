"""Promises about collectives; each function is called on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_dsgd.transport import Transport
from tests.transport.contract.helpers import DTYPES, EMPTY, PATIENCE_S, noise, others, pause, same


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
            # Torch's own collectives round each sum of two to bfloat16.
            rounding = {"rtol": 0.016, "atol": 0.01 * net.world_size}
            near = rounding if dtype == torch.bfloat16 else {}
            torch.testing.assert_close(x, exact.to(dtype), **near)
            for theirs in net.all_gather(x.view(torch.uint8)).wait():
                same(theirs, x.view(torch.uint8))


def all_reduce_sums_bfloat16_in_float32_where_it_sends_that(net: Transport) -> None:
    xs = [1.0 + noise(501, seed=rank).abs().clamp(max=0.99) for rank in range(net.world_size)]
    xs = [x.bfloat16() for x in xs]  # in [1, 2): their sum is exact in float32
    x = xs[net.rank].clone()
    sent = net.counters.bytes_sent
    net.all_reduce(x).wait()
    sent = net.counters.bytes_sent - sent
    exact, size = torch.stack(xs).float().sum(0), net.world_size
    if 0 < sent * size < 5 * (size - 1) * len(x):  # 2 + 2 bytes, and not 4 + 2
        torch.testing.assert_close(x.float(), exact, rtol=size / 256, atol=0)
    else:
        same(x, exact.bfloat16())


def all_gather_takes_any_lengths(net: Transport) -> None:
    for dtype in DTYPES:
        sent = [noise(3 * rank % 5, dtype, seed=rank) for rank in range(net.world_size)]
        received = net.all_gather(sent[net.rank]).wait()
        same(len(received), net.world_size)
        for got, expected in zip(received, sent, strict=True):
            same(got, expected)
    for got in net.all_gather(EMPTY).wait():
        same(got, EMPTY)


def gather_into_puts_all_in_order(net: Transport) -> None:
    me = net.rank
    for dtype in DTYPES:
        sent = [noise(3 * rank % 5, dtype, seed=rank) for rank in range(net.world_size)]
        sizes = [len(x) for x in sent]
        for is_in_place in (False, True):
            into = noise(sum(sizes), dtype, seed=7)
            x = into.split(sizes)[me].copy_(sent[me]) if is_in_place else sent[me]
            assert net.gather_into(into, x, sizes).wait() is into
            same(into, torch.cat(sent))
    group = halves_of(net)[me % 2][::-1]
    into, x = torch.empty(len(group)), torch.tensor([float(me)])
    same(net.gather_into(into, x, [1] * len(group), group).wait(), torch.tensor(group).float())


def all_to_all_gives_each_its_part(net: Transport) -> None:
    everyone = range(net.world_size)

    def part(source: int, rank: int, dtype: torch.dtype) -> Tensor:
        return noise(5 * source * rank % 7, dtype, seed=source + 100 * rank)

    for dtype in DTYPES:
        parts = [part(net.rank, rank, dtype) for rank in everyone]
        comes = [part(rank, net.rank, dtype) for rank in everyone]
        from_each, to_each = ([len(x) for x in xs] for xs in (comes, parts))
        into = noise(sum(from_each), dtype, seed=7)
        work = net.all_to_all(into, torch.cat(parts), from_each, to_each)
        assert work.wait() is into
        same(into, torch.cat(comes))
    group = halves_of(net)[net.rank % 2][::-1]
    x, ones = torch.full((len(group),), float(net.rank)), [1] * len(group)
    same(net.all_to_all(x.clone(), x, ones, ones, group).wait(), torch.tensor(group).float())


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
    talk_in_groups(net, halves_of(net)[net.rank % 2])


def halves_of(net: Transport) -> list[list[int]]:
    return [list(range(i, net.world_size, 2)) for i in range(2)]


def talk_in_groups(net: Transport, group: list[int]) -> None:
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
