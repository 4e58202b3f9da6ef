"""What the cells of `benchmarks target` say: the best learning rates, and how soon who is there.

A learning rate, and a number of steps, are chosen with seeds that are reported nowhere, where there
are such seeds.  A target is reached at the first of three looks in a row that are as good.  A seed
that does not reach it counts as the time limit: when the strategy or the baseline ends, whichever
is later.  Shares are those of the baseline with the same seed, and of these the geometric mean.
Their interval has 95% of the means of seeds that are drawn again (bootstrap).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from lightning_dsgd.lab.jobs.cells import Cell

BASELINE: Final = "allreduce"
SHARES: Final = (0.99, 1.0)
"""The shares of the baseline's final quality that are targets."""
LOOKS: Final = 3
"""The number of looks in a row that must be as good."""
_DRAWS: Final = 2000

Row = dict[str, Any]


def label(cell: Cell) -> str:
    """Returns what a row is called: the strategy, and how batches are dealt if not equally."""
    return str(cell["strategy"]) + (f", {cell['data']}" if "data" in cell else "")


def best_lr(cells: Sequence[Cell], *, higher_is_better: bool) -> float:
    """Returns the learning rate with the best mean final value; of equal ones the lowest."""
    sign = 1 if higher_is_better else -1
    finals: dict[float, list[float]] = {}
    for cell in sorted(cells, key=lambda cell: float(cell["lr"])):
        final = cell["value"][-1]
        finals.setdefault(cell["lr"], []).append(
            -math.inf if math.isnan(final) else sign * float(final)
        )
    return max(finals, key=lambda lr: statistics.mean(finals[lr]))


def reached(cell: Cell, target: float, *, higher_is_better: bool) -> int | None:
    """Returns the place of the first of `LOOKS` values that are as good; at the end, of fewer."""
    good = [v >= target if higher_is_better else v <= target for v in cell["value"]]
    return next((k for k in range(len(good)) if all(good[k : k + LOOKS])), None)


def interval(ratios: Sequence[float]) -> list[float]:
    """Returns the bounds of 95% of the geometric means of so many ratios that are drawn again."""
    draw = random.Random(0)
    means = sorted(
        statistics.geometric_mean(draw.choices(ratios, k=len(ratios))) for _ in range(_DRAWS)
    )
    return [round(means[int(share * (_DRAWS - 1))], 4) for share in (0.025, 0.975)]


def shares(mine: Sequence[float], base: Sequence[float]) -> Row:
    """Returns the geometric mean of paired ratios, and its interval."""
    ratios = [ours / theirs for ours, theirs in zip(mine, base, strict=True)]
    return {"share": round(statistics.geometric_mean(ratios), 4), "interval": interval(ratios)}


def to_target(
    mine: Sequence[Cell], base: Sequence[Cell], share: float, *, higher_is_better: bool
) -> Row:
    """Returns how soon these cells are at a share of the baseline's quality with the same seed."""
    by_seed = {cell["seed"]: cell for cell in base}
    ours, theirs, found = [], [], []
    for cell in mine:
        other = by_seed[cell["seed"]]
        target = other["value"][-1] * share if higher_is_better else other["value"][-1] / share
        place = reached(cell, target, higher_is_better=higher_is_better)
        of_base = reached(other, target, higher_is_better=higher_is_better)
        assert of_base is not None, "the baseline's last value reaches its target"
        limit = max(cell["seconds"][-1], other["seconds"][-1])
        ours.append(limit if place is None else cell["seconds"][place])
        theirs.append(other["seconds"][of_base])
        found.append((place is not None, -1 if place is None else place))
    row: Row = {"reached": sum(is_there for is_there, _ in found)}
    row["seconds"] = round(statistics.mean(ours), 2)
    for key in ("step", "mb_sent"):
        values = [cell[key][place] for cell, (_, place) in zip(mine, found, strict=True)]
        row[key] = round(statistics.mean(values), 4)
    return row | shares(ours, theirs)


class Chosen:
    """Holds the cells of one situation, with learning rates that were chosen.

    Args:
        cells: the cells of all strategies
        tuning: the seeds that serve for choosing; none: those that are reported serve
        baseline: the strategy that others are compared to
        higher_is_better: whether a larger value is a better quality
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        tuning: Collection[int] = (),
        baseline: str = BASELINE,
        *,
        higher_is_better: bool,
    ) -> None:
        self.baseline = baseline
        self.higher_is_better = higher_is_better
        self._tuning, self._reported = (
            self._by_place([c for c in cells if (c["seed"] in tuning) == is_tuning])
            for is_tuning in (True, False)
        )
        if not tuning:
            self._tuning = self._reported

    @staticmethod
    def _by_place(cells: Sequence[Cell]) -> dict[str, dict[float, list[Cell]]]:
        found: dict[str, dict[float, list[Cell]]] = {}
        for cell in cells:
            found.setdefault(label(cell), {}).setdefault(cell.get("stretch", 1.0), []).append(cell)
        return found

    @property
    def labels(self) -> list[str]:
        """All rows, in the order of the cells."""
        return list(self._tuning)

    def lr(self, spec: str, stretch: float = 1.0) -> float:
        """Returns the learning rate that was chosen for a strategy and so many times the steps."""
        return best_lr(self._tuning[spec][stretch], higher_is_better=self.higher_is_better)

    def reported(self, spec: str, lr: float, stretch: float = 1.0) -> list[Cell]:
        """Returns the reported cells of a strategy with a learning rate."""
        cells = self._reported.get(spec, {}).get(stretch, [])
        return [cell for cell in cells if cell["lr"] == lr]

    def at_best(self, spec: str, stretch: float = 1.0) -> list[Cell]:
        """Returns the reported cells with the learning rate that was chosen."""
        return self.reported(spec, self.lr(spec, stretch), stretch)

    def soonest(self, spec: str, share: float) -> Row:
        """Returns how soon it is there with the number of steps that was chosen for this.

        More seeds that reach the target come first, then less time.
        """

        def rank(stretch: float) -> tuple[int, float]:
            ours, base = (
                [c for c in self._tuning[s][t] if c["lr"] == self.lr(s, t)]
                for s, t in ((spec, stretch), (self.baseline, 1.0))
            )
            row = to_target(ours, base, share, higher_is_better=self.higher_is_better)
            return -row["reached"], row["share"]

        stretches = self._tuning[spec]
        stretch = min(stretches, key=rank) if len(stretches) > 1 else 1.0
        row = self.compared(self.at_best(spec, stretch), share)
        return row if stretch == 1 else row | {"stretch": stretch}

    def compared(self, mine: Sequence[Cell], share: float) -> Row:
        """Returns how soon these cells are at a share of the baseline's quality."""
        base = self.at_best(self.baseline)
        return to_target(mine, base, share, higher_is_better=self.higher_is_better)

    def gain(self, mine: Sequence[Cell]) -> float:
        """Returns how much larger the final value is than the baseline's, mean over the seeds."""
        base = {cell["seed"]: cell["value"][-1] for cell in self.at_best(self.baseline)}
        gains: list[float] = [cell["value"][-1] - base[cell["seed"]] for cell in mine]
        return round(statistics.mean(gains), 5)


def summarize(
    cells: Sequence[Cell],
    tuning: Collection[int] = (),
    baseline: str = BASELINE,
    *,
    higher_is_better: bool,
) -> list[Row]:
    """Returns a row per situation and strategy; the arguments are those of `Chosen`."""
    rows = []
    lrs = {cell["lr"] for cell in cells}
    edges = {min(lrs), max(lrs)} if len(lrs) > 1 else set()
    for situation in dict.fromkeys(cell["situation"] for cell in cells):
        here = [cell for cell in cells if cell["situation"] == situation]
        chosen = Chosen(here, tuning, baseline, higher_is_better=higher_is_better)
        for spec in chosen.labels:
            row = _row(chosen, spec)
            rows.append({"situation": situation, **row, "lr_at_edge": row["lr"] in edges})
    return rows


def _row(chosen: Chosen, spec: str) -> Row:
    mine, base = chosen.at_best(spec), chosen.at_best(chosen.baseline)
    ends, of_base = ([c["seconds"][-1] for c in cells] for cells in (mine, base))

    def mean(key: str, digits: int) -> float | None:
        found = [cell[key] for cell in mine if key in cell]
        return round(statistics.mean(found), digits) if found else None

    row: Row = {
        "strategy": spec,
        "lr": chosen.lr(spec),
        "seeds": len(mine),
        "value": round(statistics.mean(cell["value"][-1] for cell in mine), 5),
        "difference": chosen.gain(mine),
        "job_steps_per_s": mean("job_steps_per_s", 4),
        "steps_per_s": mean("steps_per_s", 4),
        "slowest_steps_per_s": mean("slowest_steps_per_s", 4),
        "end": {"seconds": round(statistics.mean(ends), 2)} | shares(ends, of_base),
        "mb_sent": round(statistics.mean(cell["mb_sent"][-1] for cell in mine), 4),
        "to_target": {f"{share:g}": chosen.soonest(spec, share) for share in SHARES},
    }
    lr = chosen.lr(chosen.baseline)
    if alike := chosen.reported(spec, lr):
        row["at_baseline_lr"] = {
            "lr": lr,
            "difference": chosen.gain(alike),
            "to_target": {f"{share:g}": chosen.compared(alike, share) for share in SHARES},
        }
    return row


def curves(
    cells: Sequence[Cell],
    tuning: Collection[int] = (),
    baseline: str = BASELINE,
    *,
    higher_is_better: bool,
) -> tuple[list[Cell], list[Cell]]:
    """Returns the reported curves at the chosen rates, and all others, with fewer figures."""
    best, others = [], []
    chosen: Mapping[str, Chosen] = {
        name: Chosen(
            [c for c in cells if c["situation"] == name],
            tuning,
            baseline,
            higher_is_better=higher_is_better,
        )
        for name in dict.fromkeys(cell["situation"] for cell in cells)
    }
    for cell in cells:
        here, stretch = chosen[cell["situation"]], cell.get("stretch", 1.0)
        is_reported = cell["seed"] not in tuning
        if is_reported and stretch == 1.0 and cell["lr"] == here.lr(label(cell)):
            best.append(cell)
            continue
        kept = {k: v for k, v in cell.items() if not isinstance(v, list)}
        last = len(cell["value"]) - 1
        looks = [k for k in range(last + 1) if (last - k) % 2 == 0]
        others.append(
            kept
            | {"seconds": [round(cell["seconds"][k], 1) for k in looks]}
            | {"value": [round(cell["value"][k], 4) for k in looks]}
        )
    return best, others
