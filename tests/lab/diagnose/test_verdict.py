"""The verdict names the cause and the rank, for twelve causes; and none where there is none."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lightning_dsgd.lab.diagnose import times
from lightning_dsgd.lab.diagnose.remedies import remedies
from lightning_dsgd.lab.diagnose.times import times_of
from lightning_dsgd.lab.diagnose.verdict import judge
from lightning_dsgd.lab.timeline.trace import Step, Trace
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


# ---- since when ----
def late_from(number: int, by_s: float = 25e-3, before_s: float = 0.0) -> made.Cause:
    """The victim is late in all steps from this number on, and by less before."""

    def inject(s: made.Setting, step: int, rank: int, own: made.Own) -> None:
        if rank == s.victim:
            own.forward += by_s if step >= number else before_s

    return inject


@pytest.mark.parametrize(
    ("inject", "cause", "since"),
    [
        pytest.param(late_from(101), "slow", 101, id="a jump"),
        pytest.param(late_from(7), "slow", None, id="three quiet steps are no beginning"),
        pytest.param(late_from(199, 5.0), "bursts", None, id="two late steps are no beginning"),
    ],
)
def test_since_when_is_told_where_it_began_within_the_run(
    inject: made.Cause, cause: str, since: int | None
) -> None:
    found = judge(times_of(made.traces(inject, victim=2, jitter=0.0)))
    assert (found.cause, found.ranks, found.since) == (cause, (2,), since), found


def two_later(s: made.Setting, step: int, rank: int, own: made.Own) -> None:
    """Two ranks are late all the time, and twice as late from step 101 on."""
    if rank in (1, 2):
        own.forward += 25e-3 if step > 100 else 12e-3


def test_ranks_that_were_late_before_have_no_beginning() -> None:
    found = judge(times_of(made.traces(two_later, jitter=0.0, ranks=8)))
    assert (found.cause, found.ranks, found.since) == ("slow", (1, 2), None), found


def behind(by_s: float) -> made.Cause:
    def inject(s: made.Setting, step: int, rank: int, own: made.Own) -> None:
        own.sum = 45e-3
        own.behind = by_s if rank == s.victim else 0.0

    return inject


@pytest.mark.parametrize(
    ("ranks", "by_s", "cause"),
    [(4, 3e-3, "link"), (4, 1.5e-3, "network"), (16, 0.8e-3, "link"), (16, 0.2e-3, "network")],
)
def test_a_link_is_slow_where_one_of_its_messages_takes_longer(
    ranks: int, by_s: float, cause: str
) -> None:
    """A sum of 45 ms has 6 messages in a ring of 4 ranks, and 30 among 16."""
    found = judge(times_of(made.traces(behind(by_s), ranks=ranks, steps=60, victim=2)))
    assert (found.cause, found.ranks) == (cause, (2,) if cause == "link" else ())


# ---- on devices ----
ON_DEVICE = {"clock": "device"}


@pytest.mark.parametrize("name", sorted({*made.CAUSES, "copies"} - {"one slow link"}))
def test_causes_are_named_by_the_times_of_devices(name: str) -> None:
    inject, cause = made.CAUSES.get(name, (made.copies, "copies"))
    found = judge(times_of(made.traces(inject, victim=2, about=ON_DEVICE)))
    ranks = (0, 1, 2, 3) if name == "copies" else made.ranks_of(name, 2, 4)
    assert (found.cause, found.ranks) == (cause, ranks)


@pytest.mark.parametrize("pins", [False, True])
def test_pinned_memory_is_advised_where_batches_are_not_in_it(pins: bool) -> None:
    about = ON_DEVICE | {"pins": pins}
    seen = times_of(made.traces(made.copies, ranks=2, steps=60, victim=1, about=about))
    offered = {remedy.name for remedy in remedies(seen, judge(seen))}
    assert offered & {"pinned", "ahead"} == (set() if pins else {"pinned"})


def on_host(traces: list[Trace], **spans: Callable[[Step], Any]) -> list[Trace]:
    """The same run, whose hosts say something else of their steps."""
    return [
        replace(t, steps=tuple(replace(s, **{k: f(s) for k, f in spans.items()}) for s in t.steps))
        for t in traces
    ]


def test_a_copy_that_waits_on_the_host_for_the_passes_before_it_is_none() -> None:
    """The host of the slow rank waits for its device in its copies, and computes in no time."""
    traces = made.traces(made.slow, victim=2, about=ON_DEVICE)
    seen = on_host(
        traces,
        copy=lambda s: (*s.forward, *s.backward),
        forward=lambda s: (),
        backward=lambda s: (),
    )
    assert judge(times_of(seen)) == judge(times_of(traces))


def test_a_loader_costs_nothing_while_the_device_computes() -> None:
    traces = made.traces(made.slow, victim=2, about=ON_DEVICE)
    seen = on_host(traces, load=lambda s: s.forward)
    assert judge(times_of(seen)).cause == "slow"
    waits = made.traces(made.loader, victim=2, about=ON_DEVICE)
    assert judge(times_of(waits)).cause == "loader"


# ---- which steps ----
def slow_start(s: made.Setting, step: int, rank: int, own: made.Own) -> None:
    if step <= 3 and rank == s.victim:
        own.forward += 20.0


def test_the_first_steps_and_those_of_long_ago_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traces = made.traces(slow_start, victim=2, steps=60)
    seen = times_of(traces)
    assert seen.numbers.tolist() == list(range(4, 61))
    assert judge(seen).cause == "none"
    monkeypatch.setattr(times, "_MOST_STEPS", 30)
    assert times_of(traces).numbers.tolist() == list(range(31, 61))
