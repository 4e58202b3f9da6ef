"""Every algorithm trains tensors on a device, on one that is none: `tests/support/fake_device.py`.

Its work is late, its memory poisoned until then, and CUDA's sanitizer looks for accesses that
nothing has ordered.
"""

from __future__ import annotations

import contextlib
import operator
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_dsgd.algorithms import ALGORITHMS, make_algorithm
from lightning_dsgd.devices import is_on_host
from lightning_dsgd.transport.collectives import Collective
from lightning_dsgd.transport.processes import _Receipt
from tests.algorithms.table import LR, TABLE, start_at, target
from tests.support.fake_device import FakeDevice, _where
from tests.support.rank import Rank
from tests.support.thorough import cases
from tests.support.worlds import ON_ACCELERATORS, FakeWorld, ProcessWorld

STEPS = 6
NAMES = [name for name in ALGORITHMS if name in TABLE] + ["eager_solo"]
"""One row for each algorithm."""
LATER = pytest.mark.exhaustive


def train(net: Any, name: str, device: torch.device) -> Tensor:
    """What a few steps make of the weights, as the CPU sees it."""
    x, goal = start_at(net.rank, 0.0).to(device), target(net.rank).to(device)
    rank = Rank(net.sub(f"{name} on {device.type}"), TABLE[name].make(), x)
    for _ in range(STEPS):
        rank.descend(x - goal, LR)
    return rank.finish().cpu()


def train_all(
    net: Any, on: FakeDevice | torch.device, names: list[str]
) -> dict[str, tuple[Tensor, Tensor]]:
    """For each algorithm, the weights it has made on the device, and those of the CPU."""
    found = {}
    device, races = (on, []) if isinstance(on, torch.device) else (on.device, on.races)
    for name in names:
        try:
            trained = train(net, name, device)
            found[name] = trained, train(net, name, torch.device("cpu"))
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
        assert not races, f"{name}: {races[0]}"
    return found


def check(world: ProcessWorld, names: list[str], world_size: int, *, to_the_bit: bool) -> None:
    ranks = world.run(world_size, train_all, names)
    for name in names:
        on_device = [rank[name][0] for rank in ranks]
        for x in on_device:
            assert x.isfinite().all(), name
            assert x.abs().max() < 10, f"{name}: poison"
        if name != "no_sync":
            assert all(x.equal(on_device[0]) for x in on_device), f"{name}: ranks differ"
        if TABLE[name].is_synchronous:
            for trained, expected in (rank[name] for rank in ranks):
                apart = float((trained - expected).abs().max())
                assert apart <= (0 if to_the_bit else 1e-9), f"{name}: {apart}"


@pytest.mark.timeout(180)  # alone it takes 35 to 55 s on two cores
def test_algorithms_train_on_a_device() -> None:
    check(FakeWorld(), ["wagma", "oktopk", "allreduce_delay_overlap_int4"], 2, to_the_bit=True)


@pytest.mark.gpu
@pytest.mark.parametrize("world", ON_ACCELERATORS)
def test_every_algorithm_trains_on_an_accelerator(world: ProcessWorld) -> None:
    """All ranks share one device; what is rounded may be rounded the other way there."""
    check(world, NAMES, 4, to_the_bit=False)


@LATER
def test_every_row_trains_on_a_device() -> None:
    check(FakeWorld(), list(TABLE), 2, to_the_bit=True)


# ---- where the host waits for the device ----
RESULT = "a result"
Step = tuple[int, int, int]
"""How often the host waits for results and for values, and how many operations it queues."""
TABLE_OF_THE_PAGE = {
    name: tuple(map(int, numbers))
    for name, *numbers in re.findall(
        r"^\| `(\w+)`[^|]*\| (\d+) \| (\d+) \| (\d+) \|$",
        Path(__file__).parents[2].joinpath("benchmarks/pages/gpus.md").read_text(),
        re.MULTILINE,
    )
}
"""For each strategy, waits for results, waits for values and operations, at most."""


@contextlib.contextmanager
def noting_results(fake: FakeDevice) -> Iterator[None]:
    """Lists the training thread's waits for messages and sums that go to the device as well.

    The host queues nothing until all is done that these are made of.  A word of the rank's own
    lane, that an exchange is done, is such a message.  Of those that had come early, as a slow step
    finds several, a step notes one: nobody waits for them.
    """
    depth, is_result, had_come = 0, False, False

    def noting(kind: Any) -> Any:
        original = kind.wait

        def wait(work: Any, timeout_s: float | None = None) -> Any:
            nonlocal depth, is_result, had_come
            if threading.current_thread() is not threading.main_thread():
                return original(work, timeout_s)
            if not depth:
                had_come = isinstance(work, _Receipt) and work.done()
            depth += 1
            try:
                return original(work, timeout_s)
            finally:
                depth -= 1
                if isinstance(work, _Receipt):
                    into = work._into
                    is_result |= not is_on_host(work._like) or work.wanted == work._net.rank
                    is_result |= into is not None and is_on_host(into) and fake.is_pinned(into)
                if not depth and is_result:
                    is_result, noted = False, ("", _where().rpartition(".")[0], RESULT)
                    if not had_come or noted not in fake.syncs:
                        fake.syncs.append(noted)

        return mock.patch.object(kind, "wait", wait)

    with noting(_Receipt), noting(Collective):
        yield


@contextlib.contextmanager
def counting(fake: FakeDevice, found: list[Step]) -> Iterator[None]:
    fake.syncs.clear()
    queued = fake.num_queued
    with noting_results(fake):
        yield
    waits = [why for *_, why in fake.syncs]
    results = waits.count(RESULT)
    found.append((results, len(waits) - results, fake.num_queued - queued))


def steps_of(net: Any, fake: FakeDevice, name: str) -> list[Step]:
    x, goal = start_at(net.rank, 0.0).to(fake.device), target(net.rank).to(fake.device)
    rank, found = Rank(net, TABLE[name].make(), x), []
    for _ in range(STEPS):
        g = x - goal
        with counting(fake, found):
            rank.descend(g, LR)
    rank.finish()
    return found


def exchanges_of_oktopk(net: Any, fake: FakeDevice) -> list[Step]:
    """Those in which as many entries as before are large: the first one makes a threshold."""
    n, found, algorithm = 8000, [], make_algorithm("oktopk")
    algorithm.start(net, torch.zeros(n, device=fake.device))
    k = algorithm.num_selected_of(n)
    for step in range(3):
        chance, g = torch.Generator().manual_seed(step), torch.zeros(n)
        g[torch.randperm(n, generator=chance)[:k]] = 1 + torch.rand(k, generator=chance)
        g = g.to(fake.device)
        with counting(fake, found):
            algorithm.before_update(torch.empty(0), g)
    return found[1:]


def steps_of_each(net: Any, fake: FakeDevice, names: list[str]) -> dict[str, list[Step]]:
    found = {name: steps_of(net.sub(name), fake, name) for name in names}
    return found | {"oktopk": exchanges_of_oktopk(net, fake)}


@cases(
    "names, world_size",
    now=[(["wagma", "sgp", "allreduce", "eager_solo", "adpsgd", "popsgd", "hpsgd"], 3)],
    later=[
        (["no_sync", "local_sgd", "diloco", "dpsgd", "noloco", "sparse_loco"], 3),
        (["topk_allgather", "gaussian_topk", "topk_dsa", "gtopk"], 3),
        ([], 16),
    ],
)
def test_a_step_waits_and_queues_no_more_than_the_page_says(
    names: list[str], world_size: int
) -> None:
    assert {*TABLE_OF_THE_PAGE} >= {*ALGORITHMS}
    for of_rank in FakeWorld(timeout_s=60).run(world_size, steps_of_each, names):
        for name, found in of_rank.items():
            stated = TABLE_OF_THE_PAGE[TABLE[name].make().name]
            for step in found:
                assert all(map(operator.le, step, stated)), (name, step)
