"""All strategies are ranked on a machine that is known, and the advice follows from the figures."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare.situations import SITUATIONS
from lightning_dsgd.algorithms import ALGORITHMS, make_algorithm
from lightning_dsgd.lab.advise import accuracy
from lightning_dsgd.lab.advise.accuracy import Cost
from lightning_dsgd.lab.advise.candidates import CANDIDATES, Candidate, with_claims
from lightning_dsgd.lab.advise.ranking import Ranking, Row, rank
from lightning_dsgd.lab.advise.words import advice, table
from lightning_dsgd.lab.simulate.machines import Machine
from lightning_dsgd.lab.simulate.recorded import Recorded

ROOT = Path(__file__).parents[3]
FEW = [c for c in CANDIDATES if c.spec in ("no_sync", "allreduce", "wagma", "popsgd")]


def recorded(situation: str) -> Recorded:
    play = SITUATIONS[situation]
    return Recorded(tuple(tuple(play.step_s(0, s, r) for s in range(40)) for r in range(8)))


def machine(situation: str, bandwidth_bytes_s: float = 1e9) -> Machine:
    return Machine(1e-4, bandwidth_bytes_s, 0.0, 1_000_000, recorded=recorded(situation))


def test_every_strategy_is_a_candidate_whose_settings_work() -> None:
    assert {candidate.name for candidate in CANDIDATES} == set(ALGORITHMS)
    for candidate in CANDIDATES:
        algorithm = make_algorithm(candidate.spec)
        algorithm.check(8)
        if candidate.name not in ("no_sync", "local_sgd"):
            assert algorithm.num_copies(8) >= 1


@pytest.mark.parametrize(
    ("spec", "copies"),
    [
        ("allreduce:wire_dtype=int8:overlap=true", 3),
        ("diloco:overlap_steps=2:num_fragments=4", 2.5),
        ("sgp, claimed", 3),
        ("popsgd, on a device", 7),
        ("wagma:grace_s=Infinity", 0),
        ("wagma:overlap=true:sync_period=10:wire_dtype=int8", 7),  # during a sum
        ("topk_dsa", 2.125),
    ],
)
def test_memory_is_what_the_page_of_a_strategy_says(spec: str, copies: float) -> None:
    name, _, case = spec.partition(", ")
    cases = {"is_claimed": case == "claimed", "on_device": case == "on a device"}
    assert make_algorithm(name).num_copies(8, **cases) == copies


@pytest.mark.exhaustive
def test_all_strategies_are_ranked_below_the_bound() -> None:
    ranked = rank(CANDIDATES, machine("random"), 4, 8, epoch_steps=8)
    assert ranked.refused == {}
    assert {row.label for row in ranked.rows} == {c.label for c in with_claims(CANDIDATES)}
    shares = [row.end_share for row in ranked.rows]
    assert shares == sorted(shares)
    for bound in ("no_sync", "no_sync, claimed"):
        data = ranked.of(bound).candidate.data
        alike = [row.end_share for row in ranked.rows if row.candidate.data == data]
        assert ranked.of(bound).end_share <= min(alike) + 1e-9
    assert ranked.of("allreduce").end_share == 1
    assert ranked.of("allreduce").mb_sent == pytest.approx(2 * 3 / 4 * 4, rel=0.01)
    assert ranked.of("wagma").mb_memory == pytest.approx(8)
    assert "later ones whose accuracy was not measured" in table(ranked).splitlines()[-1]


def row(label: str, end: float, time: float | None, reached: int = 10, **other: Any) -> Row:
    """A row whose accuracy was measured, unless `time` is None."""
    spec, _, data = label.partition(", ")
    cost = None if time is None else Cost(-0.5, reached, 10, time)
    return replace(Row(Candidate(spec, data or "equal"), end, 1 / end, 1, 1, cost), **other)


ALLREDUCE = row("allreduce", 1.0, 1.0)


def test_of_what_ends_soonest_and_was_as_good_the_soonest_at_quality_is_advised() -> None:
    rows = [
        row("no_sync", 0.5, 0.1),
        row("diloco", 0.5, None),
        row("hpsgd", 0.5, 1.3, reached=3),  # most seeds were never as good
        row("local_sgd", 0.505, 1.1),  # as good only after all-reduce
        row("adpsgd, claimed", 0.6, 0.9),
        row("popsgd:blocking=true, claimed", 0.61, 0.7),
        row("sgp", 0.7, 0.5),
        row("allreduce:wire_dtype=int8:overlap=true", 0.8, 0.8),
        ALLREDUCE,
    ]
    ranking = Ranking(rows, "random", {}, epoch_steps=30)
    assert ranking.advised.label == "popsgd:blocking=true, claimed"
    text = advice(ranking)
    for part in (
        "Training ends after 0.61 of all-reduce's time.",
        "99% of all-reduce's accuracy in 0.70 of its time, and ended 0.5 points below it.",
        "All-reduce too can end sooner: allreduce:wire_dtype=int8:overlap=true after 0.80",
        'lightning_dsgd.PopSGDStrategy(blocking=True, data="claimed")',
        "init_args: {blocking: true, data: claimed}",
        "hpsgd ends sooner, after 0.50, but reached 99% of all-reduce's accuracy with only 3 of 10",
    ):
        assert part in " ".join(text.split()), part
    assert re.search("hpsgd .* 1.30, 3 of 10\n", table(ranking))
    later = Ranking([row("local_sgd", 0.8, 1.1), ALLREDUCE], "random", {})
    assert "accuracy\nonly after 1.10 of its time." in advice(later)


def test_a_slow_rank_claims_its_batches_and_training_ends_at_about_the_floor() -> None:
    too_wide = Candidate("wagma:group_size=16")
    ranked = rank([*FEW, too_wide], machine("slow-rank"), 8, 20, epoch_steps=20)
    assert "group_size" in ranked.refused[too_wide.label]
    floor = 8 / 15  # ranks share the steps by their speeds
    assert ranked.of("no_sync").end_share == pytest.approx(1, rel=0.01)
    assert ranked.of("popsgd").end_share == pytest.approx(1, rel=0.01)
    for label in ("no_sync, claimed", "popsgd, claimed"):
        assert floor < ranked.of(label).end_share < 1.06 * floor
    assert ranked.of("popsgd, claimed").job_steps_per_s == pytest.approx(
        ranked.of("popsgd").job_steps_per_s * 15 / 8, rel=0.06
    )
    assert not [row for row in ranked.rows if row.label == "allreduce, claimed"]
    assert ranked.advised.label == "popsgd, claimed"
    assert ranked.slow_ranks == {7: pytest.approx(4 / 7.5, rel=0.01)}
    text = advice(ranked)
    assert 'lightning_dsgd.PopSGDStrategy(data="claimed")' in text
    assert "rank 7 has 53% of the mean speed" in text
    endless = rank(FEW, machine("slow-rank"), 8, 20)  # nothing can be claimed
    assert {row.label for row in endless.rows} == {candidate.spec for candidate in FEW}
    text = advice(endless)
    assert text.startswith("Advice: stay with all-reduce")
    assert "ranks can claim their batches instead: try --epoch-steps 500" in " ".join(text.split())


def test_the_accuracy_is_that_of_the_results() -> None:
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    file = ROOT / "lightning_dsgd" / "lab" / "advise" / accuracy.FILE
    assert file.read_text() == tables["known_accuracy"](), "write it anew: python docs/tables.py"
    assert accuracy.cost("gtopk", "random") is None
    assert accuracy.in_words("slow-rank").endswith(SITUATIONS["slow-rank"].text)
    for situation in json.loads(file.read_text())["costs"]:
        assert accuracy.cost("allreduce", situation) == Cost(0.0, 10, 10, 1.0)
