"""What `adaptive` decides from what all ranks have seen, in situations that stay or change."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.compare.situations import SITUATIONS, Situation
from lightning_dsgd.lab.adaptive import own_rate
from lightning_dsgd.lab.adaptive.decision import State, decide
from lightning_dsgd.lab.adaptive.prediction import HOME, ROUNDED, Seen
from lightning_dsgd.lab.advise.candidates import BASELINE
from tests.support.thorough import tries

RESULTS = Path(__file__).parents[3] / "docs" / "results"
WINDOW = 16
ALIKE = Situation("nobody is late")
WIDE = own_rate.WIDE


def seen(situation: Situation, seed: int, *, claims: bool, first: int = 0) -> Seen:
    own = tuple(
        tuple(situation.step_s(seed, first + step, rank) for step in range(WINDOW))
        for rank in range(situation.ranks)
    )
    return Seen(own, situation.allreduce_s, epoch_steps=30, claims=claims)


def test_the_table_is_that_of_the_published_results() -> None:
    results = (json.loads((RESULTS / name).read_text()) for name in own_rate.SOURCES)
    file = Path(own_rate.__file__).with_name(own_rate.FILE)
    assert json.loads(file.read_text()) == own_rate.distilled(results)


CHOICES = {
    "alike": (HOME, HOME),
    "random": (WIDE, WIDE),
    "slow-rank": (HOME, WIDE),  # an epoch ends with the slow rank, whoever else is faster
    "heavy-tail": (WIDE, WIDE),
    "slow-link": (ROUNDED, ROUNDED),
}
"""In each situation, with batches that are dealt equally and with claimed ones."""


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("seed", tries(20, 1))
@pytest.mark.parametrize("home", [HOME, BASELINE])
def test_each_situation_has_its_choice_which_stays(name: str, seed: int, home: str) -> None:
    for claims, choice in zip((False, True), CHOICES[name], strict=True):
        state, chosen = State(home), []
        for look in range(8):
            what = seen(SITUATIONS.get(name, ALIKE), seed, claims=claims, first=16 * look)
            state = decide(replace(what, is_small=home == BASELINE), state).state
            chosen.append(state.choice)
        if name == "heavy-tail" and not claims:  # whose windows differ most
            assert chosen[-1] in (WIDE, home)
        else:
            assert set(chosen) == {home if choice == HOME else choice}
        assert sum(a != b for a, b in pairwise(chosen)) <= 1


@pytest.mark.parametrize("seed", tries(20, 1))
@pytest.mark.parametrize(
    ("before", "after", "claims", "choices"),
    [
        ("alike", "slow-rank", True, [HOME, WIDE]),
        ("alike", "slow-link", False, [HOME, ROUNDED]),
        ("slow-link", "alike", False, [ROUNDED, HOME]),
        ("random", "alike", False, [WIDE, HOME]),
    ],
)
def test_it_follows_a_change_once(
    before: str, after: str, claims: bool, choices: list[str], seed: int
) -> None:
    state, chosen = State(), []
    for look in range(10):
        here = SITUATIONS.get(before if look < 5 else after, ALIKE)
        state = decide(seen(here, seed, claims=claims, first=16 * look), state).state
        chosen.append(state.choice)
    assert list(dict.fromkeys(chosen)) == choices
    assert chosen[4] == choices[0]
    assert chosen[6] == choices[1], "it sees the change at the second look"
    assert sum(a != b for a, b in pairwise(chosen)) == 1


def test_it_changes_only_for_what_pays() -> None:
    late = seen(SITUATIONS["random"], 0, claims=False)
    assert decide(late, State()).state.choice == WIDE
    adam = decide(replace(late, averages=False), State())
    assert adam.state.choice == HOME  # whose steps averages would shrink
    dear = decide(replace(late, change_s=100.0), State())
    assert dear.state.choice == HOME
    assert dear.reason.endswith("a change would not pay for itself within an epoch")
    slow = decide(replace(late, made_s=1.1 * late.home_s), State(WIDE))
    assert slow.state == State(HOME, left=(WIDE,))
    assert "is not taken again" in slow.reason
    assert decide(late, slow.state).state.choice not in (WIDE, slow.state.left[0])
    once = decide(seen(ALIKE, 0, claims=False), State(WIDE))
    assert once.state == State(WIDE, doubts=1)
    assert once.reason.endswith("looks once more")
    assert decide(late, replace(once.state, choice="wagma:group_size=5")).state.choice == HOME
