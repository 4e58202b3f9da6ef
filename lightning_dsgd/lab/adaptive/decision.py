"""What `adaptive` trains with next: a function of what all ranks have seen, and of nothing else.

    floor    the time of a step if nobody waited; where it is within `NO_GAIN` of all-reduce's, stay
    predict  when training ends with each candidate: see `prediction`
    choose   of those that were as good with all-reduce's own rate (`own_rate`), what ends soonest;
             of those within `CLOSE`, what was sooner at all of the quality
    change   if it gains `GAIN`, and within an epoch more than a change costs

Hysteresis.  All-reduce is left at once; what is in force instead stays until another choice is
clearly sooner twice in a row.  All-reduce comes back where less than `NO_GAIN` is left to gain.  A
choice that is measured to be slower than all-reduce would be is left at once, and not taken again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from lightning_dsgd.hyperparameters import parse
from lightning_dsgd.lab.adaptive import own_rate
from lightning_dsgd.lab.adaptive.prediction import HOME, LONG_EPOCH, ROUNDED, Seen, predicted
from lightning_dsgd.lab.advise.candidates import BASELINE, Candidate
from lightning_dsgd.lab.advise.ranking import CLOSE
from lightning_dsgd.lab.epochs import CLAIMED, EQUAL

GAIN: Final = 0.08
"""The least share of the time that a change must gain."""
NO_GAIN: Final = 0.03
"""The share of the time below which there is nothing to gain."""
WORSE: Final = 0.03
"""How much slower than all-reduce's prediction a choice may be measured."""
CHANGE_STEPS: Final = 2.0
"""What a change costs, in steps, before one was measured."""
TWICE: Final = 2
"""How often in a row another choice must be sooner."""


@dataclass(frozen=True)
class State:
    """Holds where `adaptive` stands, the same on all ranks.

    Args:
        choice: what is in force
        doubts: how often in a row another choice was sooner
        left: choices that were measured to be slower than all-reduce
    """

    choice: str = HOME
    doubts: int = 0
    left: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """Says how to go on.

    Args:
        state: where `adaptive` stands from now on
        reason: why, in words
    """

    state: State
    reason: str


def decide(seen: Seen, state: State) -> Decision:
    """Returns what to train with from now on, and why."""
    now, home = state.choice, seen.home
    if now != home and seen.made_s > (1 + WORSE) * seen.home_s:
        reason = (
            f"a step of the job takes {_ms(seen.made_s)}, all-reduce's would take "
            f"{_ms(seen.home_s)}; {now} is not taken again"
        )
        return Decision(State(home, left=(*state.left, now)), reason)
    if now not in seen.candidates:
        return Decision(State(home, left=state.left), f"{now} cannot be taken here")
    most = 1 - seen.floor_s / seen.home_s
    if most < NO_GAIN:
        reason = (
            f"at most {max(0.0, most):.0%} could be gained: a step takes {_ms(seen.home_s)} with "
            f"all-reduce, and {_ms(seen.floor_s)} if nobody waited"
        )
        return _change(state, home, reason) if now != home else Decision(State(now), reason)
    situation, shares = predicted(seen)
    good = _as_good(seen, situation, shares, state.left)
    best = _best(good, situation, shares, seen)
    sooner = shares[now] - shares[best]
    why = (
        f"{situation}: training ends after {shares[best]:.2f} of all-reduce's time with {best}, "
        f"after {shares[now]:.2f} with {now}"
    )
    if best == now:
        return Decision(replace(state, doubts=0), f"{situation}: nothing is sooner")
    if now in good and sooner < GAIN:
        return Decision(replace(state, doubts=0), f"{why}: not enough to change for")
    cost_steps = seen.change_s / seen.home_s if seen.change_s else CHANGE_STEPS
    if now in good and sooner * (seen.epoch_steps or LONG_EPOCH) < cost_steps:
        reason = f"{why}: a change would not pay for itself within an epoch"
        return Decision(replace(state, doubts=0), reason)
    if now not in good:
        why = f"{situation}: {now} was not as good as all-reduce there, {best} was"
    return _change(state, best, why, at_once=now == home)


def _change(state: State, to: str, reason: str, *, at_once: bool = False) -> Decision:
    doubts = state.doubts + 1
    if at_once or doubts >= TWICE:
        return Decision(State(to, left=state.left), reason)
    return Decision(replace(state, doubts=doubts), f"{reason}: looks once more")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


def _row_of(spec: str, data: str) -> str:
    """Returns the row of the table that stands for a choice."""
    name, options = parse(spec)
    if name == BASELINE:
        return BASELINE if "wire_dtype" not in options else ROUNDED
    return Candidate(own_rate.WIDE if "group_size" in options else spec, data).label


def _data(seen: Seen, spec: str) -> str:
    return CLAIMED if seen.claims and parse(spec)[0] != BASELINE else EQUAL


def _as_good(
    seen: Seen, situation: str, shares: dict[str, float], left: Sequence[str]
) -> list[str]:
    """Returns what was as good as all-reduce with its own rate in this situation."""
    good = [seen.home]
    for spec in shares:
        cost = own_rate.cost(_row_of(spec, _data(seen, spec)), situation)
        if spec != good[0] and spec not in left and own_rate.is_as_good(cost):
            good.append(spec)
    return good


def _best(good: list[str], situation: str, shares: dict[str, float], seen: Seen) -> str:
    def time(spec: str) -> float:
        cost = own_rate.cost(_row_of(spec, _data(seen, spec)), situation)
        assert cost is not None, "it was measured to be as good"
        return cost.time

    home = good[0]
    soonest = min(shares[spec] for spec in good)
    if soonest > (1 - CLOSE) * shares[home]:
        return home
    return min((s for s in good if s != home and shares[s] * (1 - CLOSE) <= soonest), key=time)
