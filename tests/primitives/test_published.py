"""What a rank publishes ahead of its device: against an account, in a world, and on a device."""

from __future__ import annotations

import math
import random
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dsgd.algorithms import wagma
from lightning_dsgd.algorithms.wagma import WAGMA
from lightning_dsgd.devices import PASSED, Mark, Port, until
from lightning_dsgd.primitives import published
from lightning_dsgd.primitives.published import ContributedAhead, PublishedAhead
from lightning_dsgd.simulated import SimulatedWorld
from tests.support.fake_device import FakeDevice
from tests.support.thorough import times
from tests.support.worlds import FakeWorld

LATER = pytest.mark.exhaustive
SEEDS = pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(times(40), marks=LATER)], ids=["few", "many"]
)
CLOSE = {"rtol": 0, "atol": 1e-12}


# ---- against a plain account ----
class Late(Mark):
    """Has passed once the test says so."""

    def __init__(self) -> None:
        self.is_made = False

    def has_passed(self) -> bool:
        return self.is_made


class LatePort(Port):
    """The CPU's, with marks that do not pass by themselves."""

    def mark(self) -> Mark:
        return Late()


class Account:
    """All publications, and all corrections with the publication that took each."""

    def __init__(self, x: Tensor) -> None:
        self.publications = [(x.clone(), -1)]
        self.corrections: list[tuple[Tensor, float]] = []
        self.newest_made = 0

    def publish(self, x: Tensor, step: int) -> Tensor:
        """Returns what x is to be."""
        number = len(self.publications)
        for k, (d, taken_by) in enumerate(self.corrections):
            if taken_by == math.inf:
                x = x + d
                self.corrections[k] = d, number
        self.publications.append((x.clone(), step))
        return x

    def contribution(self) -> tuple[Tensor, int]:
        x, step = self.publications[self.newest_made]
        missing = [d for d, taken_by in self.corrections if taken_by > self.newest_made]
        return sum(missing, x), step


class Schedule:
    """Publishes, makes, lends and corrects in any order, and compares with the account."""

    def __init__(self, seed: int, kind: type[PublishedAhead]) -> None:
        self.chance = random.Random(seed)
        self.draw = torch.Generator().manual_seed(seed)
        self.x = self.random()
        net: Any = SimpleNamespace(timeout_s=1.0, check=lambda: None, rank=0)
        self.ahead: Any = kind(net, self.x)
        self.account = Account(self.x)
        self.step = 0
        self.lent: Tensor | None = None

    def random(self) -> Tensor:
        return torch.randn(3, generator=self.draw).double()

    def make(self) -> None:
        self.ahead._made.is_made = True
        self.account.newest_made = len(self.account.publications) - 1

    def publish(self) -> None:
        if self.step:
            self.make()
        self.x += self.random()
        expected = self.account.publish(self.x, self.step)
        self.ahead.publish(self.x, self.step)
        self.step += 1
        torch.testing.assert_close(self.x, expected, **CLOSE)

    def lend(self) -> None:
        is_sum = isinstance(self.ahead, ContributedAhead)
        self.lent = self.ahead.contribution() if is_sum else self.ahead.snapshot()
        self.began = self.lent.clone()
        expected, step = self.account.contribution()
        torch.testing.assert_close(self.lent, expected, **CLOSE)
        if is_sum:
            assert self.ahead.contributed_at == step

    def correct(self) -> None:
        assert self.lent is not None
        d = self.random()
        if isinstance(self.ahead, ContributedAhead):
            size = self.chance.choice([1, 2, 3, 8])
            self.lent += d
            self.ahead.reduced(size)
            d = (self.began + d) / size - self.began
        else:
            torch.testing.assert_close(self.lent, self.began, rtol=0, atol=0)
            self.ahead.correct(d)
        self.account.corrections.append((d, math.inf))
        self.lent = None

    def meet(self) -> None:
        theirs = self.random()
        d = (theirs - self.account.contribution()[0]) / 2
        message = self.ahead.meet(theirs, "float32")
        torch.testing.assert_close(message, -d, **CLOSE)
        self.account.corrections.append((d, math.inf))

    def play(self) -> None:
        for _ in range(60):
            if self.chance.random() < 0.3:
                self.make()
            elif self.chance.random() < 0.5:
                self.publish()
            elif self.lent is not None:
                self.correct()
            elif self.chance.random() < 0.3 and type(self.ahead) is PublishedAhead:
                self.meet()
            else:
                self.lend()


@SEEDS
@pytest.mark.parametrize(("kind", "copies"), [(PublishedAhead, 3), (ContributedAhead, 4)])
def test_what_is_lent_is_the_newest_that_is_made_and_all_corrections_since(
    kind: type[PublishedAhead], copies: int, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And there is always room for the next publication."""
    monkeypatch.setattr(published, "port_of", lambda device: LatePort())
    for seed in seeds:
        schedule = Schedule(seed, kind)
        try:
            schedule.play()
        except Exception as error:
            raise AssertionError(f"replay with Schedule({seed}, {kind.__name__})") from error
        assert len(schedule.ahead._buffers) == copies


# ---- in a simulated world ----
class Passes(Mark):
    """Passes at a time of the simulated world."""

    def __init__(self, net: Any, at: float) -> None:
        self.net, self.at = net, at

    def has_passed(self) -> bool:
        return bool(self.net.now() >= self.at)


class OnSlowDevice(ContributedAhead):
    """Each publication is made some time after it was queued; the host is a step ahead at most."""

    def __init__(self, net: Any, x: Tensor, seed: int) -> None:
        self._chance = random.Random(f"{seed}/{net.rank}/device")
        self._trains = threading.current_thread()
        super().__init__(net, x)

    def publish(self, x: Tensor, step: int = -1) -> None:
        if isinstance(self._made, Passes) and self._trains is threading.current_thread():
            self._net.compute(max(0.0, self._made.at - self._net.now()))
        self._made = PASSED
        super().publish(x, step)
        self._made = Passes(self._net, self._net.now() + self._chance.choice([0.0, 0.05, 0.7]))


def take_steps(net: Any, seed: int, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What this rank began with and added in three phases, and the consensus."""
    chance = random.Random(f"{seed}/{net.rank}")
    draw = torch.Generator().manual_seed(seed * 1000 + net.rank)
    x = torch.randn(5, generator=draw).double()
    own, algorithm = x.clone(), WAGMA(overlap=True, **options)
    algorithm.start(net, x)
    assert isinstance(algorithm.mine, OnSlowDevice)
    speed = chance.choice([1, 1, 1, 10])
    for _ in range(3):
        for _ in range(chance.randrange(12)):
            update = torch.randn(5, generator=draw).double()
            own += update
            net.compute(speed * chance.choice([0.0, 0.01, 0.1, 0.1, 0.5]))
            algorithm.before_update(x, x[:0])
            x += update
            algorithm.after_update(x)
        algorithm.settle(x)
    algorithm.finish(x)
    return own, x


def options_of(chance: random.Random, world_size: int) -> dict[str, Any]:
    period = chance.choice([1, 1, 2, 3])
    return {
        "group_size": chance.choice([None, chance.randrange(1, world_size + 1)]),
        "group_period": period,
        "sync_period": period * chance.choice([1, 2, 5, 100]),
        "grace_s": chance.choice([0.0, 0.02, None]),
        "wire_dtype": chance.choice(["float32", "float32", "int8"]),
    }


@SEEDS
def test_the_mean_is_the_start_and_all_updates_on_slow_devices(
    seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wagma, "is_on_host", lambda x: False)
    for seed in seeds:
        monkeypatch.setattr(wagma, "ContributedAhead", partial(OnSlowDevice, seed=seed))
        chance = random.Random(seed)
        world_size = chance.randrange(2, 9)
        options = options_of(chance, world_size)
        world = SimulatedWorld(world_size, latency_s=chance.choice([0.0, 0.001, 0.05]))
        owns, consensus = zip(*world.run(take_steps, seed, options), strict=True)
        for x in consensus:
            assert torch.equal(x, consensus[0]), (seed, world_size, options)
            expected = torch.stack(owns).mean(0)
            atol = 1e-5 if options["wire_dtype"] == "int8" else 1e-12
            torch.testing.assert_close(x, expected, rtol=0, atol=atol, msg=f"{seed}: {options}")


# ---- on a device, whose work is late and whose races are found ----
STEPS = 30
EMPTY = torch.empty(0)


def contribute_beside(net: Any, fake: FakeDevice) -> None:
    """All entries of x are one number, to which each step and each sum adds 1."""
    x = torch.zeros(1000, device=fake.device)
    ahead, seen = ContributedAhead(net, x), list[Tensor]()

    def fn(lane_net: Any) -> None:
        for _ in range(STEPS):
            lane_net.recv(EMPTY, net.rank).wait()
            y = ahead.contribution()
            seen.append(torch.stack([y.min(), y.max()]))
            y *= 2
            y += 2
            ahead.reduced(2)

    lane = net.spawn_lane(fn)
    for step in range(STEPS):
        if step % 5 == 1:
            fake.spin(0.05)
        x += 1
        ahead.publish(x, step)
        if step % 3:
            lane.tell(EMPTY)
        else:  # beside the step: on a publication that is not the newest
            lane.net.send(EMPTY, net.rank)
    lane.join()
    ahead.publish(x)
    pairs = [pair.tolist() for pair in seen]
    assert all(least == most for least, most in pairs), "torn"
    assert set(x.tolist()) == {2.0 * STEPS}, "each step and each sum counts once"


def test_no_contribution_is_torn_on_a_device() -> None:
    FakeWorld().run(1, contribute_beside)


def take_up_beside_a_slow_kernel(net: Any, fake: FakeDevice) -> None:
    """The first publication lacks a correction; the lane wants both while the next step is slow."""
    x, lane = torch.zeros(10, device=fake.device), fake.new()
    ahead, first, second = ContributedAhead(net, x), threading.Event(), threading.Event()
    fake.spin_until(first)
    x += 1
    ahead.publish(x, 0)
    with fake.using(lane):
        y = ahead.contribution()
        y += 2
        ahead.reduced(1)
    first.set()
    fake.spin_until(second)
    x += 1
    ahead.publish(x, 1)
    with fake.using(lane):
        y = ahead.contribution()
        made = fake.mark()
    is_made = until(made.has_passed, 10, net.check)
    second.set()
    assert is_made, "the lane waits for a slow kernel"
    assert (ahead.contributed_at, y.tolist(), x.tolist()) == (0, [3] * 10, [4] * 10)


def test_a_publication_is_taken_up_beside_a_slow_kernel() -> None:
    FakeWorld().run(1, take_up_beside_a_slow_kernel)
