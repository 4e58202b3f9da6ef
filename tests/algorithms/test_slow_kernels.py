"""A rank whose kernel is slow, on the emulated device: others go on, and no update is lost.

The kernel ends only once the others have made all of their steps, and their lanes have served them.
So whoever waits for it waits for ever, and the network's time-out says where.
"""

from __future__ import annotations

import itertools
import math
import threading
from typing import Any

import torch
from torch import Tensor

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.algorithms.adpsgd import ADPSGD
from lightning_dsgd.algorithms.eager_sgd import EagerSGD
from lightning_dsgd.algorithms.hpsgd import HPSGD
from lightning_dsgd.algorithms.popsgd import PopSGD
from lightning_dsgd.algorithms.wagma import WAGMA
from lightning_dsgd.devices import until
from tests.support.fake_device import FakeDevice
from tests.support.thorough import cases
from tests.support.worlds import FakeWorld

P, STEPS, PHASES = 4, 10, 2
SLOW_STEPS = 3
"""Of the slow rank: its second one is slow."""
EMPTY = torch.empty(0)

SPECS = ["wagma", "eager_sgd:quorum=solo", f"sgp:overlap={STEPS - 1}", "adpsgd", "popsgd", "hpsgd"]
LATER_SPECS = [
    "wagma:overlap=true",
    "wagma:node_size=2:group_size=2:overlap=true",
    "wagma:node_size=2:group_size=2:overlap=true:num_buckets=4",
    "popsgd:wire_dtype=int8",
    "hpsgd:wire_dtype=int8",
]


def slow_ranks(spec: str) -> set[int]:
    """One, which with AD-PSGD answers; with nodes, two."""
    return {2, 3} if "node_size=2" in spec else {2}


def has_enough(algorithm: Algorithm, step: int, exchanges: int) -> bool:
    """Whether a rank that is not slow has made its steps; with AD-PSGD, its exchanges too."""
    if isinstance(algorithm, ADPSGD):
        return step >= STEPS and exchanges >= (STEPS if algorithm.asks else 1)
    return step == STEPS


def is_served(algorithm: Algorithm) -> bool:
    """Whether its lane has executed the rounds of its steps."""
    if isinstance(algorithm, WAGMA):
        return algorithm.engine.next_version >= algorithm.step // algorithm.group_period
    if isinstance(algorithm, PopSGD) and algorithm.lane is not None:
        return algorithm.lane.next_version >= algorithm.version
    return True


def num_exchanges(algorithm: Algorithm) -> int:
    """How many exchanges this rank's lane has made, or how many sums HPSGD has begun."""
    if isinstance(algorithm, PopSGD):
        return 0 if algorithm.lane is None else algorithm.lane.next_version
    if isinstance(algorithm, HPSGD):
        return algorithm.num_syncs
    return algorithm.num_exchanges if isinstance(algorithm, ADPSGD) else 0


def least_and_most(spec: str) -> tuple[int, int]:
    """How many exchanges each rank makes while the kernel is slow, the slow rank too."""
    if spec.startswith("popsgd"):  # its lane may be in the last one
        return STEPS - 1, STEPS
    if spec.startswith("hpsgd"):  # the second sum waits for the slow rank
        return 1, 2
    return (1, P * STEPS * PHASES) if spec.startswith("adpsgd") else (0, 0)


def train(
    net: Any, fake: FakeDevice, spec: str, all_wait: bool, limit_s: float = math.inf
) -> dict[str, Any]:
    """What has become of this rank's updates, and the algorithm's figures.

    Where all wait for each other, the kernel ends once the others come to the same step.

    Args:
        net: the network
        fake: the rank's device
        spec: the algorithm
        all_wait: whether all wait for each other
        limit_s: after how long the kernel ends where the others wait for it
    """
    x = torch.zeros(64, dtype=torch.float64).to(fake.device)
    algorithm, slow = make_algorithm(spec), slow_ranks(spec)
    others = sorted({*range(P)} - slow)
    gates = [threading.Event() for _ in range(PHASES)]
    before: list[int] = []
    meanwhile: list[int] = []
    waited: list[bool] = []

    def open_gates(lane_net: Any) -> None:
        for gate in gates if net.rank in slow else ():
            come = [lane_net.recv(EMPTY, other) for other in others]
            have_come = until(lambda come=come: all(c.done() for c in come), limit_s, net.check)
            waited.append(not have_come)
            meanwhile.append(exchanges())
            gate.set()
            for each in come:
                each.wait()

    def exchanges() -> int:
        return num_exchanges(algorithm) - before[-1]

    def come_to_gate() -> None:
        for rank in slow if net.rank in others else ():
            lane.net.send(EMPTY, rank)

    lane = net.spawn_lane(open_gates, "gates")
    algorithm.start(net.sub("algorithm"), x)
    made, applied = torch.zeros_like(x), torch.zeros_like(x)
    for gate in gates:
        before.append(num_exchanges(algorithm))
        net.barrier().wait()
        for step in itertools.count():
            if net.rank in slow:
                is_last = step == SLOW_STEPS
            else:
                is_last = has_enough(algorithm, step, exchanges())
            if is_last:
                break
            if net.rank in slow and step == 1:
                fake.spin_until(gate)
            if all_wait and step == 1:
                come_to_gate()
            net.check()
            g = torch.full_like(x, 2.0**net.rank)
            made += g
            algorithm.before_update(x, g)
            applied += g
            x -= g
            algorithm.after_update(x)
        if net.rank in others and limit_s == math.inf:
            assert until(lambda: is_served(algorithm), 20.0, net.check)
            meanwhile.append(exchanges())
        if not all_wait:
            come_to_gate()
        algorithm.settle(x)
    found = {
        "meanwhile": meanwhile,
        "waited": waited,
        "made": made.cpu(),
        "applied": applied.cpu(),
        **algorithm.metrics(),
    }
    if isinstance(algorithm, EagerSGD):
        found |= {"pending": algorithm.pending.cpu(), "unapplied": algorithm.unapplied.cpu()}
    algorithm.finish(x)
    lane.join()
    return found | {"x": x.cpu()}


def check(world: FakeWorld, spec: str, *, all_wait: bool = False) -> None:
    ranks = world.run(P, train, spec, all_wait)
    if spec.startswith(("wagma", "eager_sgd")):
        assert all(ranks[rank]["late_share"] > 0.5 for rank in slow_ranks(spec))
    least, most = (0, 0) if all_wait else least_and_most(spec)
    for rank in ranks:
        assert len(rank["meanwhile"]) == PHASES
        assert all(least <= made <= most for made in rank["meanwhile"]), rank["meanwhile"]
    total: Tensor = sum(rank["made"] for rank in ranks)
    if "eager_sgd" in spec:
        pending = sum(rank["pending"] for rank in ranks)
        for rank in ranks:
            torch.testing.assert_close(P * rank["applied"] + rank["unapplied"] + pending, total)
    else:
        torch.testing.assert_close(ranks[0]["x"], -total / P, rtol=1e-9, atol=0)


@cases("spec", now=SPECS, later=LATER_SPECS)
def test_nobody_waits_for_a_slow_kernel_of_another_rank(spec: str) -> None:
    check(FakeWorld(timeout_s=20.0), spec)


def test_no_update_is_lost_where_all_wait_for_the_slow_kernel() -> None:
    check(FakeWorld(timeout_s=20.0), "sgp", all_wait=True)


def steps_ahead(net: Any, fake: FakeDevice, spec: str) -> list[bool]:
    """Of each step, whether the device has made the step before when the host goes on."""
    x = torch.zeros(64, dtype=torch.float64).to(fake.device)
    algorithm, found = make_algorithm(spec), []
    algorithm.start(net.sub("algorithm"), x)
    before = fake.mark()
    for _ in range(STEPS):
        g = torch.ones_like(x)
        algorithm.before_update(x, g)
        fake.spin(0.05)
        x -= g
        made = fake.mark()
        algorithm.after_update(x)
        found.append(before.has_passed())
        before = made
    algorithm.settle(x)
    algorithm.finish(x)
    return found


@cases("spec", now=["hpsgd"], later=["wagma", "wagma:overlap=true", "adpsgd", "popsgd"])
def test_no_host_is_more_than_a_step_ahead_of_its_device(spec: str) -> None:
    for found in FakeWorld(timeout_s=20.0).run(2, steps_ahead, spec):
        assert all(found), found


# ---- where streams share hardware queues ----


WAITING = [spec for spec in SPECS if spec not in ("hpsgd", "sgp:overlap=9")]
"""`sgp` that overlaps waits or not, as the ranks' steps fall."""
GOING_ON = ["hpsgd", "wagma:overlap=true"]
"""Their sums wait, and no training thread waits for a sum."""


def have_waited(spec: str, num_queues: int | None, limit_s: float) -> bool:
    """Whether the other ranks waited for the slow rank's kernel, for so long."""
    world = FakeWorld(timeout_s=30.0, num_queues=num_queues)
    ranks = world.run(P, train, spec, False, limit_s)
    return any(waited for rank in ranks for waited in rank["waited"])


@cases("spec", now=WAITING[:1], later=WAITING[1:])
def test_with_one_hardware_queue_ranks_wait_for_the_kernel_of_another(spec: str) -> None:
    """What the slow rank's lane queues comes behind the kernel."""
    assert have_waited(spec, 1, limit_s=3.0)


@cases("spec", now=[], later=GOING_ON)
def test_with_one_hardware_queue_some_still_go_on(spec: str) -> None:
    assert not have_waited(spec, 1, limit_s=20.0)
