"""Why one run is slower than another: what a step's time went to in each, and what has grown.

A step lasts as long as the rank that comes last to each meeting of all ranks, and the meetings:

    step = parts of whoever came last, summed over the meetings + sums + other meetings

So the growths of these add up to the growth of the step.  No clock of one run is compared with the
other's.  `lab.diagnose` says what a meeting is, and what the parts of a rank's time are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightning_dsgd.why.slow import next_of, pauses_in, steps_of

LEAST_GROWTH: Final = 0.05
"""Steps whose lengths differ by less are called alike."""
_NAMED: Final = 0.5
"""A rank is named if what it is at has grown by this share of the largest growth of a rank."""
_LEAST_SHOWN: Final = 0.02
"""What takes a smaller share of a step is left out."""
_IN_WORDS: Final = {
    "loader": "waiting for the loader",
    "copies": "waiting for copies to the device",
    "validation": "validating",
    "gc": "collecting Python's garbage",
    "between": "callbacks, loggers and the like",
    "processor": "waiting for a processor",
    "saving": "saving checkpoints",
    "computing": "computing",
    "sums": "summing the gradient",
    "meetings": "meeting in other collectives",
}
_COMPUTING: Final = ("forward", "backward", "optimizer")
_OF_ALL: Final = ("sums", "meetings")
"""What all ranks do together."""
_SETTINGS: Final = {
    "world_size": "ranks",
    "host": "host of rank 0",
    "cores": "cores",
    "threads": "threads of a rank",
    "parameters": "weights",
    "device": "device",
    "accumulates": "accumulated batches",
}


@dataclass(frozen=True)
class Run:
    """Holds what a step of a run takes, in seconds.

    Args:
        name: what the user calls the run
        step_s: what a step takes
        spent: of that, what each of the things in `_IN_WORDS` takes
        of_ranks: how long each rank is at these in a step, but for what all do together
        num_steps: how many steps were seen
        items: how many numbers the batches of a step have, of all ranks
        about: what rank 0's record says of the run
    """

    name: str
    step_s: float
    spent: dict[str, float]
    of_ranks: dict[str, tuple[float, ...]]
    num_steps: int
    items: float
    about: dict[str, Any]


def lines_of(first: Path, second: Path) -> list[str]:
    """Returns what has made the slower of two runs slower, and what to do about it."""
    try:
        one, other = (run_in(steps_of(run), f"{run}") for run in (first, second))
    except (ValueError, OSError) as error:
        return [f"the steps cannot be compared: {error}"]
    fast, slow = sorted((one, other), key=lambda run: run.step_s)
    return lines(one, other, [] if is_alike(fast, slow) else next_of(Path(slow.name)))


def run_in(folder: Path, name: str) -> Run:
    """Reads a run's steps.

    Raises:
        ValueError: if there are none, or too few
    """
    from lightning_dsgd.lab.diagnose.times import PARTS, read  # loads torch

    times = read(folder)
    last = times.own.argmax(1)
    places = last.expand(len(PARTS), -1).unsqueeze(-1)
    of_last = times.parts.gather(2, places).sum((1, 2)) / times.num_steps
    by_rank = times.parts.sum(1) / times.num_steps
    spent = dict(zip(PARTS, of_last.tolist(), strict=True))
    of_ranks = {part: tuple(by_rank[place].tolist()) for place, part in enumerate(PARTS)}
    spent["computing"] = sum(spent.pop(part) for part in _COMPUTING)
    computing = [of_ranks.pop(part) for part in _COMPUTING]
    of_ranks["computing"] = tuple(map(sum, zip(*computing, strict=True)))
    _split_off_saving(spent, of_ranks, pauses_in(folder, times).saving)
    sums_s = float(times.takes[times.is_sum].sum()) / times.num_steps
    spent["sums"] = sums_s
    spent["meetings"] = float(times.takes.sum()) / times.num_steps - sums_s
    return Run(
        name,
        sum(spent.values()),
        spent,
        of_ranks,
        times.num_steps,
        float(times.items.sum()) / times.num_steps,
        times.about,
    )


def _split_off_saving(
    spent: dict[str, float], of_ranks: dict[str, tuple[float, ...]], saving: tuple[float, ...]
) -> None:
    """Takes what is saving out of what is between the steps, where `lab.diagnose` has it."""
    between = of_ranks["between"]
    of_ranks["saving"] = tuple(map(min, saving, between))
    of_ranks["between"] = tuple(map(float.__sub__, between, of_ranks["saving"]))
    spent["saving"] = min(max(of_ranks["saving"]), spent["between"])
    spent["between"] -= spent["saving"]


def is_alike(fast: Run, slow: Run) -> bool:
    """Returns whether the steps of two runs are about as long."""
    return slow.step_s - fast.step_s < LEAST_GROWTH * fast.step_s


def lines(first: Run, second: Run, then: Sequence[str] = ()) -> list[str]:
    """Returns what has made the slower of two runs slower, and what to do then."""
    fast, slow = sorted((first, second), key=lambda run: run.step_s)
    growth_s = slow.step_s - fast.step_s
    seen = f"Seen:    {first.num_steps} steps of {first.name}, {second.num_steps} of {second.name}"
    tables = [_table(first), _table(second)]
    if is_alike(fast, slow):
        alike = f"{seconds(first.step_s)} a step in {first.name}, {seconds(second.step_s)} in"
        return [f"Verdict: alike: {alike} {second.name}", *tables, *_changed(first, second), seen]
    grown = {what: slow.spent[what] - fast.spent[what] for what in slow.spent}
    what = max(grown, key=lambda each: grown[each])
    share = f"+{seconds(grown[what])} of +{seconds(growth_s)} a step"
    return [
        f"Verdict: {slow.name} takes {seconds(slow.step_s)} a step, and {fast.name} "
        f"{seconds(fast.step_s)}: {slow.step_s / fast.step_s:.2f} times as long",
        f"Why:     {_IN_WORDS[what]}{_who(what, fast, slow)}: {share}",
        *tables,
        *_changed(first, second),
        *then,
        seen,
    ]


def _who(what: str, fast: Run, slow: Run) -> str:
    """Returns on which ranks something has grown, in words."""
    if what in _OF_ALL:
        return ""
    now, before = slow.of_ranks[what], fast.of_ranks[what]
    if len(now) != len(before):
        before = (min(now),) * len(now)
    grown = [a - b for a, b in zip(now, before, strict=True)]
    ranks = [rank for rank, s in enumerate(grown) if s >= _NAMED * max(grown)]
    if len(ranks) > len(grown) // 2:
        return " on all ranks" if len(ranks) == len(grown) else " on most ranks"
    return f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}"


def _table(run: Run) -> str:
    shown = sorted(run.spent.items(), key=lambda each: -each[1])
    shown = [(what, s) for what, s in shown if s >= _LEAST_SHOWN * run.step_s]
    parts = ", ".join(f"{seconds(s)} {_IN_WORDS[what]}" for what, s in shown)
    return f"         {run.name}: {parts}"


def _changed(first: Run, second: Run) -> list[str]:
    """Says which of the settings that were recorded differ."""
    found = [
        f"{words} {first.about.get(name)} -> {second.about.get(name)}"
        for name, words in _SETTINGS.items()
        if first.about.get(name) != second.about.get(name)
    ]
    if first.items and abs(second.items / first.items - 1) > LEAST_GROWTH:
        found.append(f"numbers in a step's batches {first.items:.0f} -> {second.items:.0f}")
    return [f"Changed: {', '.join(found)}"] if found else []


def seconds(value: float) -> str:
    """Returns a time in words."""
    return f"{value:.2f} s" if value >= 0.995 else f"{1e3 * value:.1f} ms"
