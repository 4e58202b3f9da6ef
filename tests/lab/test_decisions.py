"""One answer to one situation: choices work, results back them, and commands give the same."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

import lightning_dsgd
from benchmarks.compare.situations import SITUATIONS as measured
from lightning_dsgd.algorithms import ALGORITHMS, COMPARISONS, make_algorithm
from lightning_dsgd.lab import catalogue, decisions
from lightning_dsgd.lab.decisions import OWN_RATE, SITUATIONS, Choice, Situation
from lightning_dsgd.lab.diagnose import remedy
from lightning_dsgd.lab.diagnose.verdict import CAUSES
from lightning_dsgd.lab.epochs import CLAIMED, EQUAL
from lightning_dsgd.lab.simulate.machines import Machine, Recorded
from lightning_dsgd.lab.simulate.model import run
from tests.support.thorough import cases

ROOT = Path(__file__).parents[2]
ALL = [
    (s, c)
    for s in SITUATIONS.values()
    for c in s.choices
    if c.strategy not in decisions.NOT_COMPARED
]
IDS = [f"{s.short}: {c.case} {c.label}" for s, c in ALL]
IN_EPOCHS = ("random", "heavy-tail", "slow-rank", "slow-link")
CLOSE = 0.03
"""Ends that differ by less are alike."""
NEAR = 0.1
"""Predictions that differ by less are alike."""
NOISE = 0.05
"""Shares of the time to 99% that differ by less are alike: their intervals are wider."""


@pytest.mark.parametrize(("situation", "choice"), ALL, ids=IDS)
def test_a_choice_works_and_a_result_backs_it(situation: Situation, choice: Choice) -> None:
    algorithm = make_algorithm(choice.strategy)
    algorithm.check(max(choice.least_ranks, 2))
    assert choice.data == EQUAL or not algorithm.traits.lockstep
    code = decisions.code(choice.strategy, choice.data)
    made = eval(code, {"lightning_dsgd": lightning_dsgd})
    assert made == choice.strategy or made.algorithm == algorithm
    assert f'"{choice.strategy}"' in code or f"dsgd.{type(algorithm).__name__}(" in code
    assert ('data="claimed"' in code) == (choice.data == CLAIMED)
    if situation is SITUATIONS["memory"]:
        assert algorithm.num_copies(8) == 0
    assert bool(choice.source) == bool(situation.measured)
    if choice.source:
        assert (ROOT / "docs/results" / choice.source).exists()
        row = runpy.run_path(str(ROOT / "docs" / "tables.py"))["measured_row"](choice, situation)
        found = row["at_baseline_lr"] if choice.case == OWN_RATE else row
        at_99 = found["to_target"]["0.99"]
        assert 2 * at_99["reached"] > row["seeds"]
        assert at_99["share"] < 1
        if choice.case == OWN_RATE:  # it was as good, with all-reduce's own learning rate
            assert 2 * found["to_target"]["1"]["reached"] > row["seeds"]
            assert found["to_target"]["1"]["share"] < 1


@pytest.mark.parametrize("name", IN_EPOCHS)
def test_nothing_that_was_measured_is_clearly_better_than_the_first_choice(name: str) -> None:
    result = "target_epochs_slow_link" if name == "slow-link" else "target_epochs"
    summary = json.loads((ROOT / f"docs/results/choosing/{result}.json").read_text())["summary"]
    ends = {r["strategy"]: r["end"]["seconds"] for r in summary if r["situation"] == name}
    first = decisions.measured_as(name).first.label
    assert ends[first] <= min(ends.values()) * (1 + CLOSE)
    times = {
        row["strategy"]: row["to_target"]["0.99"]["share"]
        for row in summary
        if row["situation"] == name and row["to_target"]["0.99"]["share"] is not None
    }
    assert times[first] <= min(times.values()) * (1 + NOISE)


@cases("name", now=["slow-rank"], later=[name for name in IN_EPOCHS if name != "slow-rank"])
def test_the_first_choice_ends_soonest_where_it_is_simulated(name: str) -> None:
    """On 8 ranks as fast as those of the measured situation; of all that `decisions` has for it."""
    here, play, steps = decisions.measured_as(name), measured[name], 20
    seconds = tuple(tuple(play.step_s(0, s, r) for s in range(steps)) for r in range(8))
    bandwidth_bytes_s = 2e6 if name == "slow-link" else 1e9
    machine = Machine(1e-4, bandwidth_bytes_s, 0.0, 1_000_000, recorded=Recorded(seconds))

    def rate(spec: str, data: str = EQUAL) -> float:
        return run(spec, 8, machine, steps, epoch_steps=steps, data=data).slowest_steps_per_s

    rates = {
        choice.label: rate(choice.strategy, choice.data)
        for choice in here.choices
        if choice.strategy not in decisions.NOT_COMPARED
    }
    assert rates[here.first.label] >= (1 - NEAR) * max(rates.values())
    assert rates[here.first.label] > 1.2 * rate("allreduce")


def test_diagnose_gives_the_same_answer() -> None:
    causes = [cause for situation in SITUATIONS.values() for cause in situation.causes]
    assert len(causes) == len(set(causes))
    assert {*causes} <= {*CAUSES}
    for name, cause in remedy.STRATEGIES.items():
        (here,) = (s for s in SITUATIONS.values() if cause in s.causes)
        for ranks in (4, 8):
            choice = here.choice(OWN_RATE, ranks) or here.first
            if name == decisions.BALANCED:
                choice = next(c for c in here.choices if c.case == decisions.SAME_LOSS)
                assert choice is here.choices[0]
            paste = remedy.paste_of(name, ranks)
            assert decisions.code(choice.strategy, choice.data) in paste
            assert remedy.what_of(name, ranks).lower() == choice.why.lower().rstrip(".")


def test_what_is_there_to_be_compared_with_is_nobodys_answer() -> None:
    chosen = {choice.name for _, choice in ALL}
    assert not chosen & {*COMPARISONS}
    before, title, after = catalogue.table().partition(catalogue.TO_COMPARE)
    assert title
    for name in ALGORITHMS:
        found = re.compile(rf"^{name}\b", re.MULTILINE).search
        assert bool(found(after)) == (name in COMPARISONS) != bool(found(before))


def test_what_a_strategy_is_for_follows() -> None:
    for name, algorithm in ALGORITHMS.items():
        assert catalogue.row(algorithm)[-1] == decisions.use_for(name) != ""
    for situation, choice in ALL:
        if choice.case != OWN_RATE:
            assert situation.short in decisions.use_for(choice.name)
