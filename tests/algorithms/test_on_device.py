"""Every algorithm trains tensors on a device, on one that is none: `tests/support/fake_device.py`.

Its work is late, its memory poisoned until then, and CUDA's sanitizer looks for accesses that
nothing has ordered.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_dsgd.algorithms import ALGORITHMS, make_algorithm
from lightning_dsgd.algorithms.sgp import SGP
from lightning_dsgd.devices import is_on_host
from lightning_dsgd.primitives import sparse
from lightning_dsgd.primitives.step_scaling import made_for
from lightning_dsgd.transport.collectives import Collective
from lightning_dsgd.transport.processes import _Receipt
from tests.algorithms.table import LR, TABLE, start_at, target
from tests.support.fake_device import FakeDevice, _where
from tests.support.rank import Rank
from tests.support.thorough import cases
from tests.support.worlds import AcceleratorWorld, FakeWorld, ProcessWorld
from tests.transport.test_staging import hung

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


def test_algorithms_train_on_a_device() -> None:
    names = ["wagma", "hpsgd", "oktopk", "allreduce_delay_overlap_int4"]
    check(FakeWorld(), names, 3, to_the_bit=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_every_algorithm_trains_on_an_accelerator() -> None:
    """All ranks share one device; what is rounded may be rounded the other way there."""
    check(AcceleratorWorld(), NAMES, 3, to_the_bit=False)


@LATER
def test_every_row_trains_on_a_device() -> None:
    check(FakeWorld(), list(TABLE), 2, to_the_bit=True)


def push_while_a_share_is_late(net: Any, fake: FakeDevice) -> float:
    """Rank 1's share is behind what its device has not come to; its push weight is not."""
    x, other = torch.zeros(4, device=fake.device), 1 - net.rank
    algorithm, words = SGP(overlap=3), net.sub("words")
    rank = Rank(net, algorithm, x)
    with hung(fake) if net.rank else contextlib.nullcontext():
        if net.rank:
            x += 1
            rank.step()
            words.recv(torch.ones(1), other).wait()
        else:
            for _ in range(3):
                rank.step()
            words.send(torch.ones(1), other)
    for _ in range(2 * net.rank):
        rank.step()
    return float(rank.finish().cpu().mean())


def test_sgp_waits_for_no_share_that_is_not_due() -> None:
    assert FakeWorld(timeout_s=20).run(2, push_while_a_share_is_late) == [0.5, 0.5]


# ---- where the host waits for the device ----
P = 3
RESULT = "a result"
Step = tuple[Counter[tuple[str, str]], int]
"""What the host waits for, how often, and how many operations it queues."""
TABLE_OF_THE_PAGE = {
    name: tuple(map(int, numbers))
    for name, *numbers in re.findall(
        r"^\| `(\w+)`[^|]*\| (\d+) \| (\d+) \| (\d+) \|$",
        Path(__file__).parents[2].joinpath("docs/evidence/gpus.md").read_text(),
        re.MULTILINE,
    )
}
"""For each strategy, waits for results, waits for values and operations, at most."""
SENT = ("primitives.error_feedback", RESULT)
SUM = ("algorithms.oktopk", RESULT)
OKTOPK = {("primitives.sparse_wire.measure", "a copy"): 2, SENT: 2}
"""How often in an ordinary exchange, at any P: docs/evidence/gpus.md lists them, and the sum."""
ANSWER = ("primitives.wait_avoiding", RESULT)
BEGINS = ("algorithms.hpsgd._begin", "aten::equal")
SCALES = ("primitives.step_scaling", RESULT)
RESULTS = {
    "wagma": {ANSWER},
    "sgp": {("algorithms.sgp", RESULT)},
    "allreduce": {("algorithms.allreduce", RESULT)},
    "wagma_overlap": set(),
    "wagma_paper": {ANSWER},
    "wagma_int8": {ANSWER},
    "eager_solo": {ANSWER},
    "adpsgd": set(),
    "popsgd": set(),
    "hpsgd": set(),
    "hpsgd_bounded": set(),
}
"""What the host waits for in a step, each once, and nothing else: docs/evidence/gpus.md too."""
SOMETIMES = {
    "wagma_overlap": {ANSWER},  # a global average, which another step waits for
    "popsgd": {("algorithms.popsgd", RESULT)},  # the exchange of the step before
    "hpsgd": {("algorithms.hpsgd", RESULT), BEGINS},  # the sum, once it is there
    "hpsgd_bounded": {("algorithms.hpsgd", RESULT), BEGINS},
}
"""What it waits for in some of the steps."""


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


def waits_of(
    net: Any, fake: FakeDevice, name: str, options: dict[str, Any] | None = None
) -> list[Step]:
    """What the host waits for in each step, how often, and how much it queues."""
    x, goal = start_at(net.rank, 0.0).to(fake.device), target(net.rank).to(fake.device)
    algorithm, found = dataclasses.replace(TABLE[name].make(), **options or {}), []
    algorithm.start(net.sub(name), x)
    scaling = made_for(algorithm, net.sub(f"steps of {name}"), x)
    for _ in range(STEPS):
        g = x - goal
        fake.syncs.clear()
        queued = fake.num_queued
        with noting_results(fake):
            algorithm.before_update(x, g)
            scaling.update_begins(x, [([slice(0, len(x))], 0.01)])
            x.sub_(g if algorithm.uses_gradient else x - goal, alpha=LR)
            scaling.update_ends(x)
            algorithm.after_update(x)
        waits = ((where, what.split(" between")[0]) for _, where, what in list(fake.syncs))
        found.append((Counter(waits), fake.num_queued - queued))
    algorithm.settle(x)
    scaling.settle()
    algorithm.finish(x)
    assert x.isfinite().all()
    return found


def waits_of_each(
    net: Any, fake: FakeDevice, cases: list[tuple[str, dict[str, Any]]]
) -> list[list[Step]]:
    return [waits_of(net.sub(str(options)), fake, name, options) for name, options in cases]


def require_as_the_page_says(name: str, waits: Counter[tuple[str, str]], launches: int) -> None:
    results = sum(count for (_, what), count in waits.items() if what == RESULT)
    found = results, waits.total() - results, launches
    stated = TABLE_OF_THE_PAGE[TABLE[name].make().name]
    assert all(map(operator.le, found, stated)), (name, found)


OTHERS = ["no_sync", "local_sgd", "diloco", "dpsgd", "noloco", "sparse_loco"]
BASELINES = ["topk_allgather", "gaussian_topk", "topk_dsa", "gtopk"]


@cases("names", now=[OTHERS], later=[BASELINES])
def test_a_step_waits_and_queues_no_more_than_the_page_says(names: list[str]) -> None:
    for of_rank in FakeWorld().run(P, waits_of_each, [(name, {}) for name in names]):
        for name, found in zip(names, of_rank, strict=True):
            for waits, launches in found:
                require_as_the_page_says(name, waits, launches)


def test_the_page_has_every_strategy() -> None:
    assert {*TABLE_OF_THE_PAGE} >= {*ALGORITHMS}


@cases(
    "names",
    now=[["wagma", "sgp", "allreduce"], ["eager_solo", "adpsgd", "popsgd", "hpsgd"]],
    later=[["wagma_overlap", "wagma_paper", "wagma_int8", "hpsgd_bounded"]],
)
def test_the_host_waits_for_one_result_a_step_at_most(names: list[str]) -> None:
    cases: list[Any] = [(name, {}) for name in names] + [("wagma", {"scale_steps": True})]
    for of_rank in FakeWorld().run(P, waits_of_each, cases):
        for (name, options), found in zip(cases, of_rank, strict=True):
            sometimes = SOMETIMES.get(name, set()) | ({SCALES} if options else set())
            assert all(BEGINS not in waits for waits, _ in found[1:]), (name, found)
            for waits, launches in found:
                if name in NAMES and not options:
                    require_as_the_page_says(name, waits, launches)
                assert RESULTS[name] <= {*waits} <= RESULTS[name] | sometimes, (name, waits)
                assert all(count == 1 for count in waits.values()), (name, waits)


def exchange_entries(net: Any, fake: FakeDevice, options: dict[str, Any]) -> list[Step]:
    """The waits and launches of steps in which as many entries as before are large."""
    n, found, algorithm = 8000, [], make_algorithm("oktopk")
    algorithm = dataclasses.replace(algorithm, **options)
    algorithm.start(net, torch.zeros(n, device=fake.device))
    k = algorithm.num_selected_of(n)
    for step in range(3):
        chance, g = torch.Generator().manual_seed(step), torch.zeros(n)
        g[torch.randperm(n, generator=chance)[:k]] = 1 + torch.rand(k, generator=chance)
        g = g.to(fake.device)
        fake.syncs.clear()
        before = fake.num_queued
        with noting_results(fake):
            algorithm.before_update(torch.empty(0), g)
        launches = fake.num_queued - before
        waits = ((where, what.split(" between")[0]) for _, where, what in list(fake.syncs))
        found.append((Counter(waits), launches))
        assert sparse.is_near(int(g.cpu().count_nonzero()), k)
    return found[1:]  # the first one makes a threshold


@cases("world_size", now=[2], later=[4, 8, 16])
@pytest.mark.parametrize(
    ("options", "sums"),
    [
        ({"density": 0.01}, {SUM: 1}),  # distances of one byte and of more
        pytest.param({"density": 0.01, "rule": "paper"}, {}, marks=LATER),
        pytest.param({"density": 0.3}, {SUM: 1}, marks=LATER),  # a bit for each place
        pytest.param({"density": 0.01, "wire_dtype": "int8"}, {SENT: 4}, marks=LATER),
    ],
    ids=str,
)
def test_oktopk_waits_and_launches_as_often_for_any_number_of_ranks(
    world_size: int, options: dict[str, Any], sums: dict[tuple[str, str], int]
) -> None:
    for found in FakeWorld(timeout_s=60).run(world_size, exchange_entries, options):
        for waits, launches in found:
            assert waits == OKTOPK | sums
            if "wire_dtype" in options:  # as the page says below the table
                waits, launches = waits - Counter([SENT]), launches - 180
            require_as_the_page_says("oktopk", waits, launches)
