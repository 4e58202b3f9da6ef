"""The rank that others wait for is named, once; in the simulated world, and by each face."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lightning_dsgd as dsgd
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.session import meeting
from lightning_dsgd.session.meeting import Lateness
from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.transport import Transport
from tests.support.faces import FACES, Loop
from tests.support.fake_device import FakeDevice
from tests.support.fits import Plain, fit, run, strategy
from tests.support.heard import Heard
from tests.support.models import trainer
from tests.support.thorough import cases
from tests.support.worlds import FakeFitWorld

# ---- who is late: simulated ranks ----
Steps = Callable[[int, int], tuple[int, float]]
"""How many steps a rank makes before its n-th meeting, and how long each takes; 0: how long it
does something else.
"""

EQUAL: dict[str, Steps] = {
    "equal": lambda rank, n: (30, 0.2),
    "a tenth slower": lambda rank, n: (30, 0.22 if rank == 1 else 0.2),
    "one prepares": lambda rank, n: (30, 0.2) if n % 2 else (0, 20.0 if rank == 0 else 0.0),
    "too short to tell": lambda rank, n: (1, 0.4 if rank == 1 and n < 10 else 0.01),
}
LATE: dict[str, tuple[Steps, list[str]]] = {
    "twice as slow": (
        lambda rank, n: (30, 0.4 if rank == 1 else 0.2),
        ["of the last 12.0 s", "idle for 6.0 s (50%)", "30 steps took 12.0 s, their 30 took 6.0 s"],
    ),
    "more batches": (
        lambda rank, n: (45 if rank == 1 else 30, 0.2),
        ["of the last 9.0 s", "its 45 steps took 9.0 s, their 30 took 6.0 s"],
    ),
    "its first step": (
        lambda rank, n: (1, 60.0) if rank == 1 else (30, 0.2),
        ["its 1 steps took 60.0 s, their 30 took 6.0 s"],
    ),
    "meetings after each step": (
        lambda rank, n: (1, 0.4 if rank == 1 else 0.2),
        ["idle for 2.6 s (50%)", "its 13 steps took 5.2 s"],
    ),
}


def lines(
    net: Transport, steps: Steps, name: str, num_meetings: int, options: dict[str, bool]
) -> list[str]:
    found, algorithm = Lateness(net), make_algorithm(name)
    said = []
    for n in range(num_meetings):
        number, seconds = steps(net.rank, n)
        for _ in range(max(1, number)):
            net.compute(seconds)  # type: ignore[attr-defined]
            if algorithm.traits.lockstep:
                net.barrier().wait()
        found.num_steps += number
        figures = torch.stack(net.all_gather(found.figures()).wait())
        members = range(net.world_size)
        said.append(found.end(figures.view(-1), members, algorithm, **options))
    return [line for line in said if line]


def simulated(
    steps: Steps, name: str = "no_sync", num_meetings: int = 60, **options: bool
) -> list[str]:
    """What all ranks find alike."""
    given = {"claims": False, **options}
    first, *others = SimulatedWorld(3).run(lines, steps, name, num_meetings, given)
    assert all(other == first for other in others)
    return first


def test_nobody_is_named_where_nobody_is_late() -> None:
    for case, steps in EQUAL.items():
        assert simulated(steps) == [], case
    assert simulated(EQUAL["a tenth slower"], "allreduce", num_meetings=20) == []


def test_the_late_rank_is_named_once() -> None:
    for case, (steps, words) in LATE.items():
        (line,) = simulated(steps)
        assert line.startswith("rank 1 is late"), case
        assert '; use data="claimed", which deals rank 1 fewer batches' in line
        assert all(word in line for word in words), case


def test_what_is_proposed_is_what_helps() -> None:
    """Where all wait in each step, and where batches are claimed already."""
    steps, _ = LATE["twice as slow"]
    (line,) = simulated(steps, "allreduce")
    assert "(50%)" in line
    assert 'a strategy that waits less, such as "popsgd", with data="claimed"' in line
    (line,) = simulated(steps, claims=True)
    assert "; the others wait for its last batch: have longer epochs, or smaller batches" in line
    (line,) = simulated(steps, may_claim=False)
    assert "; relieve rank 1, or give it smaller batches (page" in line
    (line,) = simulated(steps, "allreduce", may_claim=False)
    assert 'such as "popsgd" (page' in line


# ---- in each face: real ranks ----
NUM_STEPS = 6


def listen(least_s: float) -> Heard:
    meeting.LEAST_S = least_s
    return Heard("lightning_dsgd")


def late(heard: Heard) -> list[str]:
    return [line for line in heard.lines if "late" in line]


class Slow(Plain):
    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s

    def loss(self, batch: Any) -> Tensor:
        time.sleep(self.step_s)
        return super().loss(batch)


def train(
    face: str, name: str, step_s: tuple[float, ...], folder: str, least_s: float = 0.5
) -> list[str]:
    heard = listen(least_s)
    seconds = step_s[int(os.environ["RANK"])]
    if face == "Trainer":
        monitor = dsgd.CommunicationMonitor(per_rank=True)
        logging = {"logger": CSVLogger(folder, name="", version=""), "log_every_n_steps": 2}
        samples = {"num_samples": 3 * 8 * NUM_STEPS}
        fit(name, lambda: Slow(seconds), samples, max_epochs=2, callbacks=[monitor], **logging)
    else:
        batches = [(torch.ones(4, 10), torch.ones(4, 1))] * NUM_STEPS
        FACES[face](Loop(Slow(seconds), make_algorithm(name), batches, epochs=2))
    return late(heard)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:  # type: ignore[override]
        return iter([(torch.ones(4, 10), torch.ones(4, 1))] * NUM_STEPS)


def train_on_a_stream(face: str) -> list[str]:
    heard = listen(0.3)
    model, loader = Slow((0.1, 0.01)[int(os.environ["RANK"])]), DataLoader(Stream(), None)
    if face == "plain":
        optimizer = model.configure_optimizers()
        with dsgd.decentralized(model, optimizer, make_algorithm("no_sync")) as replica:
            for batch in replica.batches(loader):
                model.loss(batch).backward()
                optimizer.step()
    else:
        trainer(strategy("no_sync"), 2).fit(model, loader)
    return late(heard)


@pytest.mark.parametrize("face", ["plain", "Trainer"])
def test_no_claims_are_proposed_to_ranks_that_read_streams(face: str) -> None:
    (line,), other = run(2, train_on_a_stream, face)
    assert other == []
    assert "; relieve rank 0, or give it smaller batches (page" in line


ONE_SLOW = (0.2, 0.02, 0.02)
"""Rank 0, whose broadcasts Lightning itself would have all wait for."""


@cases(
    "face, name",
    now=[("Trainer", "wagma"), ("plain", "no_sync")],
    later=[("Fabric", "no_sync")],
)
def test_a_slow_rank_is_named_by_rank_0_once(face: str, name: str, tmp_path: Path) -> None:
    said, *others = run(3, train, face, name, ONE_SLOW, str(tmp_path))
    assert others == [[], []]
    assert sum(line.startswith("rank 0 is late") for line in said) == 1
    if face == "Trainer":
        with (tmp_path / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row.get("dsgd/rank_00000/wait_s")]
        assert len(rows) == 2  # one an epoch
        for row in rows:  # the fast ranks stand still at the end, which is this epoch's
            waits = [float(row[f"dsgd/rank_{rank:05d}/wait_s"]) for rank in range(3)]
            least = 0.5 * NUM_STEPS * (ONE_SLOW[0] - ONE_SLOW[1])
            assert min(waits[1], waits[2]) > waits[0] + least


SELDOM = ["no_sync", "local_sgd:sync_period=20", "hpsgd"]
"""Strategies whose host waits for no device in the steps of an epoch."""


def train_with_slow_kernels(fake: FakeDevice) -> dict[str, list[str]]:
    said, data = {}, torch.ones(NUM_STEPS, 4, 10).to(fake.device)
    for name in SELDOM:
        heard, model = listen(0.3), nn.Linear(10, 1).to(fake.device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with dsgd.decentralized(model, optimizer, make_algorithm(name)) as replica:
            for x in replica.batches(data):
                fake.spin(0.1 if replica.rank == 1 else 0.0)
                model(x).sum().backward()
                optimizer.step()
            replica.barrier()
        said[name] = late(heard)
    return said


def test_a_rank_whose_device_is_slow_is_named() -> None:
    """Its host comes to the meeting as early as the other's: its kernels are still queued."""
    said, other = FakeFitWorld().run(2, train_with_slow_kernels)
    assert other == {name: [] for name in SELDOM}
    first = {name: [line[:14] for line in lines] for name, lines in said.items()}
    assert first == {name: ["rank 1 is late"] for name in SELDOM}
