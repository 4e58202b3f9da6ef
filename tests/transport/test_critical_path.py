"""How many transfers lie one after another in a step, where an engine such as NCCL carries pairs.

In the simulated world, with the real tickets.  Each communicator of a rank makes one call after
another; a pair takes a second, from when both ranks have come to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.primitives import topology
from lightning_dsgd.simulated import SimulatedTransport, SimulatedWorld
from lightning_dsgd.transport.collectives import Call
from lightning_dsgd.transport.native_sends import colour_of
from lightning_dsgd.transport.tickets import EXCHANGE, PUSH, Form, Key, Tickets
from tests.support.rank import Rank
from tests.support.thorough import cases

TRANSFER_S, LATENCY_S, COMPUTE_S = 1.0, 1e-4, 20.0
WARM_UP, STEPS = 4, 4
_WORDS = torch.empty(0, dtype=torch.int64)


class Engine:
    """A rank's tickets, and its communicators."""

    def __init__(self, net: Any, num_colours: int) -> None:
        self._net, self._num_colours = net, num_colours
        self._asked: list[tuple[Key, Tensor, int, int]] = []
        self._tickets = Tickets(net.sub("tickets"), self)
        self._communicators = [net.spawn_lane(self._run) for _ in range(num_colours)]

    def pair(self, call: Call, x: Tensor) -> Any:
        """Asks for a pair; what comes is a message to the own rank."""
        key = call.members, call.channel, call.number
        is_push = call.kind == "push"
        colour = colour_of(call.members, self._net.world_size, is_push=is_push)
        peer = call.members[1 - call.me]
        receipt = self._net.recv(x, self._net.rank, tag=len(self._asked))
        self._asked.append((key, x.clone(), peer, colour % self._num_colours))
        self._tickets.ask(key, PUSH if is_push else EXCHANGE, 0, len(x))
        return receipt

    def launch(self, key: Key, lengths: Mapping[int, int]) -> None:
        place = next(place for place, asked in enumerate(self._asked) if asked[0] == key)
        words = torch.tensor([place, sum(lengths.values())])
        self._communicators[self._asked[place][-1]].net.send(words, self._net.rank)

    def _run(self, end: Any) -> None:
        while True:
            place, num_sent = end.recv(_WORDS, end.rank).wait(math.inf).tolist()
            _, x, peer, _ = self._asked[place]
            y = x[:0]
            if num_sent:
                end.send(x, peer)
                y = end.recv(x, peer).wait(math.inf)
                end.compute(TRANSFER_S)
            self._net.send(y, end.rank, tag=place)

    def refuse(self, key: Key, least: Form, greatest: Form) -> None:
        raise AssertionError(key)

    def abandon(self, failure: Exception | None = None) -> None:
        raise AssertionError(failure)

    def stop(self) -> None:
        self._tickets.stop()
        for communicator in self._communicators:
            communicator.stop()


def train(net: Any, spec: str, num_colours: int, engines: dict[int, Engine]) -> list[float]:
    """When each step ends."""
    engines[net.rank] = engine = Engine(net, num_colours)
    rank = Rank(net.sub(spec), make_algorithm(spec), torch.full((3,), float(net.rank)))
    ended = []
    for _ in range(WARM_UP + STEPS):
        rank.step(seconds=COMPUTE_S)
        ended.append(net.now())
    rank.settle()
    net.barrier().wait()
    engine.stop()
    return ended


def num_transfers(spec: str, world_size: int, num_colours: int) -> float:
    """How much longer than computing a step of the slowest rank is, in transfers."""
    engines: dict[int, Engine] = {}
    world = SimulatedWorld(world_size, latency_s=LATENCY_S, strict=False)  # nobody awaits a push
    pair = lambda net, call, x: engines[net.rank].pair(call, x)  # noqa: E731
    with mock.patch.object(SimulatedTransport, "pair_natively", pair):
        ended = torch.tensor(world.run(train, spec, num_colours, engines), dtype=torch.float64)
    step_s = float(ended[:, -1].max() - ended[:, WARM_UP - 1].max()) / STEPS
    return (step_s - COMPUTE_S) / TRANSFER_S


@cases(
    "spec, world_size, with_one",
    now=[("dpsgd", 16, 2.0), ("sgp", 16, 3.25)],
    later=[
        *(("dpsgd", 6, 2.0), ("sgp", 8, 3.0), ("sgp:topology=ring", 16, 2.0)),
        *(("sgp:topology=bipartite_exponential", 16, 2.0), ("popsgd:blocking=true", 16, 1.0)),
    ],
)
def test_a_step_of_pairs_is_one_transfer_long(spec: str, world_size: int, with_one: float) -> None:
    found = [num_transfers(spec, world_size, num_colours) for num_colours in (1, 2)]
    assert found == [pytest.approx(with_one, abs=0.02), pytest.approx(1.0, abs=0.02)]


@pytest.mark.parametrize("graph", ["exponential", "ring", "bipartite_exponential"])
@pytest.mark.parametrize("world_size", [2, 4, 8, 16, 32])
def test_what_a_rank_sends_and_gets_in_a_step_has_two_colours(graph: str, world_size: int) -> None:
    for step in range(5):
        for rank in range(world_size):
            [dst] = topology.out_peers(graph, step, rank, world_size)
            [src] = topology.in_peers(graph, step, rank, world_size)
            ends = (rank, dst), (src, rank)
            assert {colour_of(pair, world_size, is_push=True) for pair in ends} == {0, 1}


@pytest.mark.parametrize("world_size", [4, 6, 12, 16])
def test_exchanges_with_both_neighbours_have_two_colours(world_size: int) -> None:
    for rank in range(world_size):
        pairs = [sorted((rank, (rank + hop) % world_size)) for hop in (-1, 1)]
        assert {colour_of(pair, world_size, is_push=False) for pair in pairs} == {0, 1}
