"""Promises about lanes; each function is called on every rank."""

from __future__ import annotations

import torch

from lightning_dsgd.transport import ANY, LaneStopped, Transport
from tests.transport.contract.helpers import EMPTY, PATIENCE_S, pause, same


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
        question = torch.tensor([float(i)])
        lane.tell(question) if i % 2 else ends[0].send(question, net.rank)
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
    assert net.now() - begin < PATIENCE_S
    same(sorted(ended), sorted(["receive", "polling", "receive" if net.rank else "collective"]))


def a_lane_may_be_stopped_at_once(net: Transport) -> None:
    def fn(lane_net: Transport) -> None:
        while True:
            pause(lane_net, 1e-3)
            lane_net.recv(EMPTY, ANY).done()

    net.spawn_lane(fn).stop()
