"""What the protocol of `balanced` takes, played by events: as measured, and in virtual time."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.balanced import UNIT_S, WARM_UP, Pace
from lightning_dsgd.lab.diagnose.remedies import advised, remedies
from lightning_dsgd.lab.diagnose.sharing import Work, shared_s
from lightning_dsgd.lab.diagnose.times import times_of
from lightning_dsgd.lab.diagnose.verdict import judge
from tests.lab.diagnose import made
from tests.support.thorough import cases

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "balanced"
VIRTUAL = json.loads((RESULTS / "virtual.json").read_text())
REAL = json.loads((RESULTS / "real.json").read_text())


def share_of_ddp(row: dict[str, Any], ranks: int, steps: int, seed: int, besides_s: float) -> float:
    """What a cell of `benchmarks/balanced.py` takes, as a share of DDP.

    Args:
        row: the cell's k, situation and backups
        ranks: how many ranks there are
        steps: how many steps they make
        seed: of the draws
        besides_s: what a micro-batch takes besides its sleep; its sleep is a share of 1 second
            in virtual time
    """
    k = row["k"]
    unit_s = UNIT_S[k] if besides_s else 1 / k
    pace = Pace(row["situation"], ranks, steps, seed)
    each = [range(steps)] * ranks
    units = [[unit_s * pace.factor(r, s) + besides_s for s in of] for r, of in enumerate(each)]
    stalls = [[k * unit_s * pace.delay(r, s) for s in of] for r, of in enumerate(each)]
    work = Work([[0.0] * steps] * ranks, units, stalls, k, backups=row.get("backups", True))
    ddp_s = sum(max(k * units[r][s] + stalls[r][s] for r in range(ranks)) for s in range(steps))
    return shared_s(work) / ddp_s


@cases(
    "row",
    now=[r for r in VIRTUAL["rows"] if r["ranks"] == 4 and (r["k"] == 4 or r["backups"])],
    later=[r for r in VIRTUAL["rows"] if r["ranks"] == 8],
)
def test_the_model_is_the_protocol(row: dict[str, Any]) -> None:
    shares = [share_of_ddp(row, row["ranks"], 40, seed, 0.0) for seed in range(3)]
    assert statistics.median(shares) == pytest.approx(row["share_of_ddp"], abs=0.01)


@pytest.mark.parametrize("row", REAL["rows"], ids=lambda row: f"k = {row['k']}, {row['situation']}")
def test_the_model_is_what_was_measured(row: dict[str, Any]) -> None:
    """What a micro-batch took besides its sleep is that of DDP where all ranks are alike."""
    (alike,) = (r for r in REAL["rows"] if r["k"] == row["k"] and r["situation"] == "alike")
    num_timed = REAL["steps"] - WARM_UP
    besides_s = alike["ddp_s"] / num_timed / row["k"] - UNIT_S[row["k"]]
    shares = [
        share_of_ddp(row, REAL["ranks"], REAL["steps"], seed, besides_s)
        for seed in range(row["rounds"])
    ]
    assert statistics.median(shares) == pytest.approx(row["share_of_ddp"], abs=0.05)


# ---- what is advised ----


def twice_as_slow(s: made.Setting, step: int, rank: int, own: made.Own) -> None:
    if rank == s.victim:
        own.forward, own.backward = 4 * own.forward, 4 * own.backward
    else:
        own.forward, own.backward = 2 * own.forward, 2 * own.backward


def late(s: made.Setting, step: int, rank: int, own: made.Own) -> None:
    if rank == s.drawn.setdefault(step, s.source.randrange(s.ranks)):
        own.forward += 60e-3


def stalled(s: made.Setting, step: int, rank: int, own: made.Own) -> None:
    if rank == s.victim and step % 25 >= 17:
        own.forward += 150e-3


def short_steps(s: made.Setting, step: int, rank: int, own: made.Own) -> None:
    twice_as_slow(s, step, rank, own)
    own.forward, own.backward, own.sum = own.forward / 40, own.backward / 40, 2e-4
    own.between, own.optimizer, own.loader = 1e-4, 1e-4, 1e-5


def slow_link(s: made.Setting, step: int, rank: int, own: made.Own) -> None:
    late(s, step, rank, own)
    own.sum = 0.4


def advice(inject: made.Cause, **about: object) -> tuple[str | None, float]:
    """What is advised, and what `balanced` is said to gain; 0 where it is not offered."""
    seen = times_of(made.traces(inject, 0, 4, 60, 0.02, 2, about))
    found = judge(seen)
    offered = remedies(seen, found)
    best = advised(offered, found)
    gains = {remedy.name: remedy.gain for remedy in offered}
    return best and best.name, gains.get("balanced", 0.0)


@pytest.mark.parametrize(("inject", "least"), [(twice_as_slow, 1.3), (late, 1.3), (stalled, 1.2)])
def test_it_is_advised_first_where_ranks_are_slow_late_or_stalled(
    inject: made.Cause, least: float
) -> None:
    name, gain = advice(inject)
    assert name == "balanced"
    assert gain > least


def test_it_is_not_advised_where_it_cannot_help() -> None:
    name, gain = advice(short_steps)
    assert name != "balanced"
    assert gain < 1.0  # messages cost more than waits
    name, gain = advice(slow_link)
    assert name == "int8"
    assert gain < 1.2  # its sums are DDP's
    name, gain = advice(twice_as_slow, can_share=False)
    assert (name, gain) == ("claimed", 0.0)


def test_micro_batches_that_are_accumulated_are_the_units() -> None:
    """Two that take longer leave more to wait for than four."""
    _, split = advice(twice_as_slow)
    _, accumulated = advice(twice_as_slow, accumulates=2)
    assert 1.0 < accumulated < split
