"""All strategies are ranked on a machine that is known, and the advice follows from the figures."""

from __future__ import annotations

import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_dsgd.algorithms import ALGORITHMS, make_algorithm
from lightning_dsgd.lab.advise import accuracy
from lightning_dsgd.lab.advise.accuracy import Cost
from lightning_dsgd.lab.advise.candidates import CANDIDATES, Candidate
from lightning_dsgd.lab.advise.ranking import Ranking, Row, rank
from lightning_dsgd.lab.advise.words import advice, paste, table, warnings
from lightning_dsgd.lab.bench.situations import SITUATIONS
from lightning_dsgd.lab.simulate.machines import Machine
from lightning_dsgd.lab.simulate.recorded import Recorded

ROOT = Path(__file__).parents[3]
FEW = [c for c in CANDIDATES if c.spec in ("no_sync", "allreduce", "wagma", "popsgd")]


def recorded(situation: str, ranks: int = 8, steps: int = 40) -> Recorded:
    play = SITUATIONS[situation]
    return Recorded(tuple(tuple(play.step_s(0, s, r) for s in range(steps)) for r in range(ranks)))


def machine(situation: str, bandwidth_bytes_s: float = 1e9) -> Machine:
    return Machine(1e-4, bandwidth_bytes_s, 0.0, 1_000_000, recorded=recorded(situation))


def test_every_strategy_is_a_candidate_whose_settings_work() -> None:
    assert {candidate.name for candidate in CANDIDATES} == set(ALGORITHMS)
    for candidate in CANDIDATES:
        make_algorithm(candidate.spec).check(8)
        if candidate.spec in ALGORITHMS and not candidate.is_sparse:
            assert candidate.copies == peak(ALGORITHMS[candidate.spec].profile.memory)


def peak(memory: str) -> int:
    """Copies in what the page of an algorithm says, but for what options add."""
    always = ";".join(part for part in memory.split(";") if "with" not in part)
    copies = re.findall(r"(\d*) ?\|[xg]\|", always)
    return max([int(copy or 1) for copy in copies], default=0)


@pytest.mark.parametrize(
    ("situation", "bandwidth"),
    [("slow-link", 2e6), ("slow-rank", 1e9), ("heavy-tail", 1e9), ("random", 1e9)],
)
def test_the_most_similar_situation_is_found(situation: str, bandwidth: float) -> None:
    ranked = rank(FEW, machine(situation, bandwidth), 8, 20)
    assert ranked.situation == situation


@pytest.mark.exhaustive
def test_all_strategies_are_ranked_below_the_bound() -> None:
    ranked = rank(CANDIDATES, machine("random"), 4, 8)
    assert ranked.refused == {}
    assert len(ranked.rows) == len(CANDIDATES)
    rates = [row.slowest_steps_per_s for row in ranked.rows]
    assert rates == sorted(rates, reverse=True)
    assert all(row.share <= 1 + 1e-9 for row in ranked.rows)
    assert ranked.of("no_sync").share == pytest.approx(1)
    assert ranked.of("allreduce").slowest_ratio == ranked.of("allreduce").mean_ratio == 1
    assert ranked.of("allreduce").mb_sent == pytest.approx(2 * 3 / 4 * 4, rel=0.01)
    assert ranked.of("wagma").mb_memory == pytest.approx(8)
    text = table(ranked)
    assert len(text.splitlines()) == len(CANDIDATES) + 3
    assert len({len(line) for line in text.splitlines()}) == 1


def test_what_cannot_run_is_left_out_with_the_reason() -> None:
    ranked = rank([*FEW, Candidate("wagma:group_size=16", 2)], machine("random"), 8, 5)
    assert "group_size" in ranked.refused["wagma:group_size=16"]


def row(spec: str, rate: float, time: float | None, points: float = -0.5, **other: Any) -> Row:
    cost = Cost(points, 1.0, time)
    return replace(Row(Candidate(spec, 0), rate, rate / 2, rate, rate, 1, 1, cost), **other)


def test_of_equally_fast_ones_the_soonest_at_quality_is_advised() -> None:
    rows = [
        row("no_sync", 2.0, 0.1),
        row("diloco", 2.0, None, cost=None),
        row("adpsgd", 1.99, 0.9),
        row("popsgd:blocking=true", 1.97, 0.7),
        row("hpsgd", 1.96, None),
        row("sgp", 1.8, 0.5),
        row("allreduce", 1.0, 1.0, 0.0),
    ]
    ranking = Ranking(rows, "random", {})
    assert ranking.advised.candidate.spec == "popsgd:blocking=true"
    text = advice(ranking)
    assert "1.97 times as fast as all-reduce" in text
    assert "lightning_dsgd.PopSGDStrategy(blocking=True)" in text
    assert "init_args: {blocking: true}" in text


def test_where_the_fastest_was_never_as_good_the_next_is_named() -> None:
    rows = [row("adpsgd", 3.0, None), row("sgp", 2.0, 0.6), row("allreduce", 1.0, 1.0, 0.0)]
    text = advice(Ranking(rows, "slow-link", {}))
    assert text.startswith("Advice: adpsgd")
    assert "never reached 99% of its accuracy with half of the seeds" in text
    assert "The fastest that reached 99% there: sgp, 2.00 times as fast" in text


def test_where_a_rank_is_slow_the_batches_are_to_be_dealt_otherwise() -> None:
    ranked = rank(FEW, machine("slow-rank"), 8, 20)
    popsgd = ranked.of("popsgd")
    assert popsgd.slowest_ratio < 1.1  # training ends with the slow rank
    assert popsgd.mean_ratio > 1.8
    assert ranked.slow_ranks == {7: pytest.approx(4 / 7.5, rel=0.01)}
    assert ranked.dealt_by_speed == pytest.approx(8 / 15, rel=0.02)
    text = advice(ranked)
    assert "Deal the batches by speed:\nrecorded rank 7 53% of an equal share.  Then popsgd" in text
    assert "endless epoch" in table(ranked)
    assert "Deal the batches" not in advice(rank(FEW, machine("random"), 8, 20))


def test_where_nothing_is_faster_all_reduce_stays() -> None:
    ranking = Ranking([row("sgp", 1.02, 0.5), row("allreduce", 1.0, 1.0, 0.0)], "random", {})
    assert advice(ranking).startswith("Advice: stay with all-reduce")
    assert paste("allreduce").startswith('    L.Trainer(strategy="allreduce", ...)')


def test_the_accuracy_is_that_of_the_results() -> None:
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    file = ROOT / "lightning_dsgd" / "lab" / "advise" / accuracy.FILE
    assert file.read_text() == tables["known_accuracy"](), "write it anew: python docs/tables.py"
    assert accuracy.cost("gtopk", "random") is None
    assert accuracy.in_words("slow-rank") == SITUATIONS["slow-rank"].text
    for situation in SITUATIONS:
        assert accuracy.cost("allreduce", situation) == Cost(0.0, 1.0, 1.0)


def test_it_says_where_it_extrapolates() -> None:
    assert warnings(4, 4, 4, has_nodes=False) == []
    beyond = warnings(64, 4, 8, has_nodes=False)
    assert [text.split(":")[0] for text in beyond] == ["extrapolated"] * 3
    assert "more than the 4 that were probed" in beyond[0]
    assert "probe two nodes" in beyond[1]
    assert "more than the 8 that were recorded" in beyond[2]
