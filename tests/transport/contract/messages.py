"""Promises about messages; each function is called on every rank."""

from __future__ import annotations

import math

import torch

from lightning_dsgd.transport import ANY, Transport
from lightning_dsgd.transport.endpoint import Endpoint
from tests.transport.contract.helpers import DTYPES, EMPTY, noise, others, same


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


def pairs_exchange_push_and_pull(net: Transport) -> None:
    """Both ways, of different lengths, some empty, each pair and each way for itself."""

    def of(rank: int, i: int) -> torch.Tensor:
        return noise((i + rank) % 4 * 300, DTYPES[i // 2 % len(DTYPES)], seed=i + 10 * rank)

    works = [
        (peer, i, net.exchange(of(net.rank, i), peer)) for peer in others(net) for i in range(4)
    ]
    pushes = [net.push(of(net.rank, i), dst) for dst in reversed(others(net)) for i in range(4, 12)]
    works += [(src, i, net.pull(of(src, i)[:0], src)) for src in others(net) for i in range(4, 12)]
    for push in pushes:  # as lanes that serve wait
        push.wait(math.inf)
    for src, i, work in reversed(works):
        same(work.wait(math.inf), of(src, i))
        assert work.done()
        same(work.wait(), of(src, i))


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
