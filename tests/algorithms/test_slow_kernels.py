"""A rank whose kernel is slow, on the emulated device: others go on, and no update is lost.

The kernel ends only once the others have made all of their steps, and their lanes have served them.
So whoever waits for it waits for ever, and the network's time-out says where.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.algorithms.adpsgd import ADPSGD
from lightning_dsgd.algorithms.eager_sgd import EagerSGD
from lightning_dsgd.algorithms.wagma import WAGMA
from lightning_dsgd.devices import until
from tests.support.fake_device import FakeDevice
from tests.support.worlds import FakeWorld

P, STEPS, PHASES = 4, 10, 2
SLOW_STEPS = 3
"""Of the slow rank: its second one is slow."""
EMPTY = torch.empty(0)

LATER = pytest.mark.exhaustive
SPECS = [
    *("wagma", "wagma:overlap=true", "eager_sgd:quorum=solo", "adpsgd", "popsgd", "hpsgd"),
    *(
        pytest.param(spec, marks=LATER)
        for spec in (
            *("wagma:rule=paper", "wagma:hierarchical=true:node_size=2:group_size=2"),
            *("wagma:hierarchical=true:node_size=2:group_size=2:overlap=true",),
            *("wagma:group_period=2", "wagma:group_period=2:overlap=true", "wagma:wire_dtype=int8"),
            *("adpsgd:wire_dtype=int8", "popsgd:wire_dtype=int8", "popsgd:local_steps=2"),
            *("hpsgd:wire_dtype=int8",),
        )
    ),
]
"""Not `eager_sgd` with a majority, which waits for one rank that is drawn."""


def slow_ranks(spec: str) -> set[int]:
    """One, which with AD-PSGD answers; with nodes, all of one."""
    return {2, 3} if "node_size=2" in spec else {2}


def has_enough(algorithm: Algorithm, step: int, phase: int) -> bool:
    """Whether a rank that is not slow has made its steps; one that asks, its exchanges too."""
    if isinstance(algorithm, ADPSGD) and algorithm.asks:
        return step >= STEPS and algorithm.num_exchanges >= (phase + 1) * STEPS
    return step == STEPS


def is_served(algorithm: Algorithm) -> bool:
    """Whether its lane has executed the rounds of its steps."""
    if isinstance(algorithm, WAGMA):
        return algorithm.engine.next_version >= algorithm.step // algorithm.group_period
    return True


def train(net: Any, fake: FakeDevice, spec: str) -> dict[str, Any]:
    """What has become of this rank's updates, and the algorithm's figures."""
    x = torch.zeros(64, dtype=torch.float64).to(fake.device)
    algorithm, slow = make_algorithm(spec), slow_ranks(spec)
    others = sorted({*range(P)} - slow)
    gates = [threading.Event() for _ in range(PHASES)]

    def open_gates(lane_net: Any) -> None:
        for gate in gates if net.rank in slow else ():
            for other in others:
                lane_net.recv(EMPTY, other).wait()
            gate.set()

    lane = net.spawn_lane(open_gates, "gates")
    algorithm.start(net.sub("algorithm"), x)
    made, applied = torch.zeros_like(x), torch.zeros_like(x)
    for phase, gate in enumerate(gates):
        for step in itertools.count():
            if step == SLOW_STEPS if net.rank in slow else has_enough(algorithm, step, phase):
                break
            if net.rank in slow and step == 1:
                fake.spin_until(gate)
            net.check()
            g = torch.full_like(x, 2.0**net.rank)
            made += g
            algorithm.before_update(x, g)
            applied += g
            x -= g
            algorithm.after_update(x)
        assert net.rank in slow or until(lambda: is_served(algorithm), 20.0, net.check)
        for rank in slow if net.rank in others else ():
            lane.net.send(EMPTY, rank)
        algorithm.settle(x)
    found = {"made": made.cpu(), "applied": applied.cpu(), **algorithm.metrics()}
    if isinstance(algorithm, EagerSGD):
        found |= {"pending": algorithm.pending.cpu(), "unapplied": algorithm.unapplied.cpu()}
    algorithm.finish(x)
    lane.join()
    return found | {"x": x.cpu()}


def check(world: FakeWorld, spec: str) -> None:
    ranks = world.run(P, train, spec)
    for rank in slow_ranks(spec):
        assert ranks[rank].get("late_share", 1) > 0.5
    total: Tensor = sum(rank["made"] for rank in ranks)
    if "eager_sgd" in spec:
        pending = sum(rank["pending"] for rank in ranks)
        for rank in ranks:
            torch.testing.assert_close(P * rank["applied"] + rank["unapplied"] + pending, total)
    elif "rule=paper" not in spec:  # which loses updates
        torch.testing.assert_close(ranks[0]["x"], -total / P, rtol=1e-9, atol=0)


@pytest.mark.parametrize("spec", SPECS)
def test_nobody_waits_for_a_slow_kernel_of_another_rank(spec: str) -> None:
    check(FakeWorld(timeout_s=20.0), spec)
