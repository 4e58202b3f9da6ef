"""The verdict names the cause and the rank, for twelve causes; and none where there is none."""

from __future__ import annotations

import random

import pytest

from lightning_dsgd.lab.diagnose.times import times_of
from lightning_dsgd.lab.diagnose.verdict import judge
from tests.lab.diagnose import made

OF_MANY = pytest.param("one rank slow", 16, id="of 16")


@pytest.mark.parametrize(("cause", "ranks"), [*((cause, 4) for cause in made.CAUSES), OF_MANY])
def test_the_verdict_names_cause_and_rank(cause: str, ranks: int) -> None:
    inject, name = made.CAUSES[cause]
    for seed in range(2):
        victim = random.Random(f"victim {seed}").randrange(1, ranks)
        found = judge(times_of(made.traces(inject, seed, ranks, victim=victim)))
        assert (found.cause, found.ranks) == (name, made.ranks_of(cause, victim, ranks)), found


def test_there_is_no_false_alarm() -> None:
    for seed in range(10):
        for ranks, jitter in ((2, 0.03), (4, 0.05), (8, 0.02)):
            found = judge(times_of(made.traces(made.none, seed, ranks, 60, jitter)))
            assert (found.cause, found.ranks) == ("none", ()), (seed, ranks, found)


def slow_loaders(s: made.Setting, step: int, rank: int, own: made.Own) -> None:
    own.loader = s.source.uniform(20e-3, 22e-3)


def since_half(s: made.Setting, step: int, rank: int, own: made.Own) -> None:
    if step > 100:
        made.slow(s, step, rank, own)


def on_one_rank(s: made.Setting, step: int, rank: int, own: made.Own) -> None:
    if rank == s.victim and s.source.random() < 0.3:
        own.forward += 40e-3


def after_validation(s: made.Setting, step: int, rank: int, own: made.Own) -> None:
    if step % 12 == 0:
        own.validation = 20e-3
        if rank == s.victim:
            own.forward += 150e-3


def in_callbacks(s: made.Setting, step: int, rank: int, own: made.Own) -> None:
    if rank == s.victim:
        own.between += 20e-3


@pytest.mark.parametrize(
    ("inject", "cause", "ranks", "since", "after"),
    [
        (slow_loaders, "loader", (0, 1, 2, 3), None, False),
        (since_half, "slow", (2,), 101, False),
        (on_one_rank, "random", (2,), None, False),
        (after_validation, "random", (2,), None, True),
        (in_callbacks, "callbacks", (2,), None, False),
    ],
)
def test_when_and_in_what(
    inject: made.Cause, cause: str, ranks: tuple[int, ...], since: int | None, after: bool
) -> None:
    found = judge(times_of(made.traces(inject, victim=2)))
    assert (found.cause, found.ranks, found.after_validation) == (cause, ranks, after), found
    assert found.since == (since and pytest.approx(since, abs=1))
    assert found.late_s > 10e-3
