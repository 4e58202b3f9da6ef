"""`balanced` over a simulated network: in each step the weights of one process on all data."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_dsgd.algorithm import Conditions
from lightning_dsgd.algorithms.balanced import Balanced
from lightning_dsgd.data.units.dealing import UnitDealing
from lightning_dsgd.data.units.protocol import NONE
from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.transport import PeerLost
from tests.support.thorough import times
from tests.support.worlds import FakeWorld

N = 12
LR = 0.1
CPU = torch.device("cpu")

Time = Callable[[int, int], float]


def gradient(x: Tensor, step: int, unit: int) -> list[Tensor | None]:
    """Of two parameters, of which the second one has a gradient in some units alone."""
    draw = torch.Generator().manual_seed(1000 * step + unit)
    g = torch.randn(N, generator=draw, dtype=torch.float64) + 0.3 * x
    return [g[:8], g[8:] if unit % 3 else None]


def views(flat: Tensor) -> list[Tensor]:
    return [flat[:8], flat[8:]]


def train(
    net: Any,
    num_steps: int,
    num_slots: int,
    time: Time,
    backups: bool,
    device: torch.device = CPU,
    before: Sequence[dict[str, Any]] = (),
    num_homes: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What a rank ends with; `before` holds all ranks' states of a training before."""
    algorithm, x = (
        Balanced(backups=backups, **options),
        torch.zeros(N, dtype=torch.float64, device=device),
    )
    counts = torch.zeros(2).long()
    algorithm.start(net.sub("sums"), x, Conditions(gradient_counts=counts, num_homes=num_homes))
    if len(before) == net.world_size:
        algorithm.load_state_dict(before[net.rank])
    else:
        for state in before[net.rank :: net.world_size]:
            algorithm.carry_over(state, len(before))
    dealing = UnitDealing(net.sub("units"), backups=backups, on_closed=algorithm.close_step)
    homes = [rank for _ in range(num_slots) for rank in range(net.world_size)]
    dealing.know(0, [homes] * num_steps)
    seen, num_void, own, applied = [], 0, torch.zeros_like(x), torch.zeros_like(x)
    for step in range(num_steps):
        dealing.begin_step(step)
        while (unit := dealing.take(waits=True)) != NONE:
            net.compute(time(net.rank, step))
            mine = [None if g is None else g.to(device) for g in gradient(x.cpu(), step, unit)]
            has_entered = dealing.finish(lambda: algorithm.add(step, unit, views, mine))  # noqa: B023
            num_void += not has_entered
            if has_entered:
                own += flat_of(mine)
        g, flags = algorithm.take_sum(step)
        assert bool(flags.all()) or net.world_size * num_slots == 1  # see `gradient`
        x -= LR * g / num_slots
        applied += g
        seen.append(x.clone())
    net.sub("end").barrier().wait()
    dealing.close()
    algorithm.stop()
    found = {"x": seen, "void": num_void, "at": net.now(), "own": own, "applied": applied}
    return found | algorithm.state_dict()


def flat_of(gradients: list[Tensor | None]) -> Tensor:
    """Of the second parameter there may be none."""
    first, second = gradients
    assert first is not None
    return torch.cat([first, first.new_zeros(N - 8) if second is None else second])


def in_one_process(num_ranks: int, num_steps: int, num_slots: int) -> list[Tensor]:
    x, seen = torch.zeros(N, dtype=torch.float64), []
    for step in range(num_steps):
        total = torch.zeros_like(x)
        for unit in range(num_ranks * num_slots):
            total += flat_of(gradient(x, step, unit))
        x = x - LR * (total / num_ranks) / num_slots
        seen.append(x)
    return seen


def run(num_ranks: int, num_steps: int, num_slots: int, time: Time, **options: Any) -> Any:
    backups, latency_s = options.pop("backups", True), options.pop("latency_s", 0.0)
    # Where the world ends, the dealer may still have words for a rank that has made its sums.
    world = SimulatedWorld(num_ranks, strict=False, latency_s=latency_s)
    return world.run(lambda net: train(net, num_steps, num_slots, time, backups, CPU, **options))


def check(num_ranks: int, num_steps: int, num_slots: int, time: Time, **options: Any) -> Any:
    ranks = run(num_ranks, num_steps, num_slots, time, **options)
    expected = in_one_process(num_ranks, num_steps, num_slots)
    for rank in ranks:
        for x, right in zip(rank["x"], expected, strict=True):
            torch.testing.assert_close(x, right, rtol=1e-12, atol=1e-12)
        assert all(map(torch.equal, rank["x"], ranks[0]["x"]))
    return ranks


def times_by(chance: random.Random) -> Time:
    """Ranks that are slow, and units that stall."""
    slow = [chance.choice([0.1, 0.1, 0.2, 0.5]) for _ in range(8)]

    def time(rank: int, step: int) -> float:
        return slow[rank] * (1 + chance.random()) + 2.0 * (chance.random() < 0.05)

    return time


@pytest.mark.parametrize("seed", times(12))
def test_weights_equal_one_process_in_every_step(seed: int) -> None:
    chance = random.Random(seed)
    time = times_by(chance)
    num_ranks, num_slots = chance.choice([1, 2, 3, 5, 8]), chance.choice([1, 2, 4])
    latency = chance.choice([0.0, 1e-3, 0.05])
    check(num_ranks, 6, num_slots, time, latency_s=latency, backups=bool(seed % 3))


@pytest.mark.parametrize("wire_dtype", ["bfloat16", "int8"])
def test_what_is_rounded_off_is_added_to_the_next_sum(wire_dtype: str) -> None:
    ranks = run(4, 8, 4, times_by(random.Random(0)), latency_s=1e-3, wire_dtype=wire_dtype)
    given = sum(rank["own"] for rank in ranks) / 4
    kept = sum(rank["kept"] for rank in ranks) / 4
    assert kept.abs().max() > 1e-4
    for rank in ranks:
        torch.testing.assert_close(rank["applied"] + kept, given, rtol=1e-12, atol=1e-12)
        assert all(map(torch.equal, rank["x"], ranks[0]["x"]))
    exact = in_one_process(4, 8, 4)[-1]
    torch.testing.assert_close(ranks[0]["x"][-1], exact, rtol=0, atol=LR * 0.05)


@pytest.mark.parametrize("num_ranks", [1, 3, 4, 5])
def test_what_is_rounded_off_outlives_a_resume_on_any_number_of_ranks(num_ranks: int) -> None:
    before = run(4, 1, 2, lambda rank, step: 0.1, wire_dtype="int8")
    states = [{"kept": rank["kept"]} for rank in before]  # as before there were homes
    for num_homes in (num_ranks, 4):  # as a loop of one's own makes a step, and as the Trainer does
        options: dict[str, Any] = {"wire_dtype": "int8", "num_homes": num_homes}
        ranks = run(num_ranks, 2, 2, lambda rank, step: 0.1, before=states, **options)
        states = [state | {"num_homes": 4} for state in states]
        given = sum(rank["own"] for rank in ranks) / num_homes + sum(s["kept"] for s in states) / 4
        kept = sum(rank["kept"] for rank in ranks) / num_homes
        torch.testing.assert_close(ranks[0]["applied"] + kept, given, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", times(8))
def test_sums_in_the_order_of_the_units_are_equal_to_the_bit(seed: int) -> None:
    chance = random.Random(seed)
    num_ranks, num_slots = chance.choice([1, 2, 3, 5, 8]), chance.choice([1, 2, 4])
    options: dict[str, Any] = {"latency_s": chance.choice([0.0, 1e-3, 0.05])}
    options |= {"backups": bool(seed % 3), "deterministic": True}
    ranks = run(num_ranks, 6, num_slots, times_by(chance), **options)
    expected = in_one_process(num_ranks, 6, num_slots)
    for rank in ranks:
        assert all(map(torch.equal, rank["x"], expected))


def test_options_of_sums_that_cannot_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match='deterministic=True with wire_dtype="int8"'):
        Balanced(deterministic=True, wire_dtype="int8").check(2)
    with pytest.raises(ValueError, match='wire_dtype="int8" with a loss that is scaled for fp16'):
        Balanced(wire_dtype="int8").check(2, Conditions(skips_overflow=True))
    with pytest.raises(ValueError, match='wire_dtype="int8" with on_loss="continue"'):
        Balanced(wire_dtype="int8").check(2, Conditions(goes_on=True))


def test_a_stalled_rank_holds_up_no_step_and_applies_the_sums_that_it_missed() -> None:
    def time(rank: int, step: int) -> float:
        return 3.0 if rank == 2 and step == 4 and not stalled and not stalled.append(1) else 0.25

    stalled: list[int] = []
    with_backups = check(4, 12, 4, time, latency_s=1e-4)
    stalled.clear()
    without = check(4, 12, 4, time, latency_s=1e-4, backups=False)
    assert sum(rank["void"] for rank in with_backups) > 0
    assert max(rank["at"] for rank in without) > 12 + 2.0
    assert max(rank["at"] for rank in with_backups) < 12 + 1.6


def test_a_lost_rank_is_named_by_all() -> None:
    world = SimulatedWorld(4, latency_s=1e-3, strict=False)
    world.kill(3, at_s=2.0)
    outcomes = world.outcomes(train, 10, 4, lambda rank, step: 0.25, True)
    for outcome in outcomes[:3]:
        assert isinstance(outcome, PeerLost), outcome
        assert outcome.rank == 3


# ---- on a device ----


def train_on_device(net: Any, on: Any) -> tuple[Tensor, Tensor]:
    """What steps make of weights on a device, where rank 1 stalls in one; and on the CPU."""
    is_fake = not isinstance(on, torch.device)
    found = []
    for device in (on.device if is_fake else on, torch.device("cpu")):
        stalled: list[int] = []

        def time(rank: int, step: int, stalled: list[int] = stalled) -> float:
            is_stalled = rank == 1 and step == 2 and not stalled
            if is_stalled:
                stalled.append(1)
            return 0.3 if is_stalled else 0.01

        with mock.patch.object(
            type(net), "compute", lambda _, s: threading.Event().wait(s), create=True
        ):
            trained = train(net.sub(device.type), 5, 4, time, True, device)
        found.append(trained["x"][-1].cpu())
    if is_fake:
        assert not on.races, on.races[0]
    return found[0], found[1]


def test_sums_on_a_device_are_ordered_after_the_units() -> None:
    for on_device, on_cpu in FakeWorld().run(3, train_on_device):
        torch.testing.assert_close(on_device, on_cpu, rtol=1e-12, atol=1e-12)
