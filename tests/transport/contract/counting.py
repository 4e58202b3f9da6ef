"""Promises about what is counted; each function is called on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_dsgd.transport import Transport
from tests.transport.contract.helpers import EMPTY, pause, same


def waiting_is_counted(net: Transport) -> None:
    def lane_fn(lane_net: Transport) -> None:
        late_message(lane_net)

    def late_message(end: Transport) -> None:
        if end.rank == 0:
            end.recv(EMPTY, 1).wait()
        elif end.rank == 1:
            pause(end, 1.0)  # much beside what a busy machine delays rank 0
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
    pause(net, 0.3)  # its lane waits meanwhile
    same(net.counters.wait_s, wait_s)
    lane.join()
    if net.rank == 0:
        assert net.counters.comm_s - comm_s >= 0.1


def traffic(net: Transport) -> dict[str, tuple[int, int]]:
    left, right = ((net.rank + hop) % net.world_size for hop in (-1, 1))
    operations: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: net.all_reduce(torch.ones(12)),
        "all_reduce bf16": lambda: net.all_reduce(torch.ones(12, dtype=torch.bfloat16)),
        "all_gather": lambda: net.all_gather(torch.ones(net.rank + 1)),
        "broadcast": lambda: net.broadcast(torch.ones(5), 0),
        "barrier": net.barrier,
        "send": lambda: net.send(torch.ones(7, dtype=torch.int64), right),
        "push": lambda: (net.push(torch.ones(6), right), net.pull(EMPTY, left))[1],
    }
    table = {}
    counters = net.counters
    for name, operation in operations.items():
        before = counters.bytes_sent, counters.messages_sent
        operation().wait()
        after = counters.bytes_sent, counters.messages_sent
        table[name] = (after[0] - before[0], after[1] - before[1])
    net.recv(torch.empty(0, dtype=torch.int64), left).wait()
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
