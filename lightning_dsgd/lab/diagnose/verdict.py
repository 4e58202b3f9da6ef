"""From times to a verdict: what makes the job slow, which ranks are late, how often, since when.

Each second that a late rank costs goes to the part of its own time that was longer than usual:

    part        cause
    loader      "loader"
    copies      "copies": to the device
    validation  "validation"
    gc          "garbage"
    between     "callbacks"
    processor   "processor": it was ready to run, and waited for a core
    forward, backward, optimizer: computing, and then, in this order,
                "lengths"  the batches' sizes tell who is late
                "drift"    one rank gets slower and slower
                "bursts"   late for some steps on end, and then not
                "slow"     the same ranks in most steps
                "random"   other ranks in other steps

Waiting for the loader, for copies or for a processor is no work: it also costs where all ranks wait
for as long.  What the sums take is the cause "network", or "link" where the sums are always over
last for the same rank.  The largest of these is the verdict, if it costs LEAST_SHARE of the time;
else "none".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from lightning_dsgd.lab.diagnose.times import PARTS, Times

LEAST_SHARE: Final = 0.05
"""What costs a smaller share of the time is not worth a change."""
LEAST_SUM_SHARE: Final = 0.12
"""The same for the sums, which no job can do without."""
_COMPUTING: Final = ("forward", "backward", "optimizer")
_OF_EVERYONE: Final = ("loader", "copies", "processor")
"""The parts that are no work, also where all ranks are at them for as long."""
_LATE: Final = 0.05
"""A rank is late in a step by more than this share of a step."""
_MOST: Final = 0.6
"""A rank that is late in so many steps is always late."""
_EXPLAINED: Final = 0.5
"""The share of the variance that a cause must explain."""
_BEHIND: Final = 0.3
"""A slow link's last message is later than others by more than this share of a message's time."""
_NAMED: Final = 0.7
"""The share of the cost that the ranks which are named must have."""


@dataclass(frozen=True)
class Verdict:
    """Says what makes a job slow.

    Args:
        cause: one of CAUSES
        ranks: the ranks that are late; empty where they change, or where nobody is
        share: the share of the time that it costs
        late_share: the share of the steps in which one of these ranks, or any, is late
        last_share: the share of the steps in which one of these ranks, or any, is the last
        late_s: by how much, in the median of these steps
        since: the number of the step since when, where it began within the run
        after_validation: whether ranks are late in the steps after a validation
        step_s: what a step takes
        sums_s: of that, the sums once all ranks had come
        costs: the share of the time that each cause costs
        parts: by how much longer each part of a late rank is, in a step in which it is late
        is_everyones: whether all ranks are named since all wait for as long, not one for another
    """

    cause: str
    ranks: tuple[int, ...]
    share: float
    late_share: float = 0.0
    last_share: float = 0.0
    late_s: float = 0.0
    since: int | None = None
    after_validation: bool = False
    step_s: float = 0.0
    sums_s: float = 0.0
    costs: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    is_everyones: bool = False


CAUSES: Final = {
    "none": "nobody is late, and the sums take little",
    "slow": "some ranks compute longer in most steps",
    "random": "other ranks are late in other steps",
    "bursts": "late for some steps on end, and then not",
    "drift": "one rank gets slower and slower",
    "lengths": "batches differ in size",
    "loader": "waiting for the data loader",
    "copies": "waiting for copies to the device",
    "validation": "validating",
    "gc": "Python collects garbage",
    "callbacks": "callbacks and loggers between batches",
    "processor": "ready to run, and waiting for a processor",
    "link": "the sums wait for one slow link",
    "network": "the sums take long for all ranks",
}


def base(own: Tensor) -> Tensor:
    """Returns the lower median over the ranks, of what belongs to meetings: [N, P] to [N]."""
    return own.median(-1).values


def judge(times: Times) -> Verdict:
    """Returns the verdict on a run."""
    usual = base(times.own)
    last = times.own.max(1)
    late = last.values - usual
    total_s = float((last.values + times.takes).sum())
    blame = _blame(times, last.indices, late)  # [F, P]
    sums_s = float(times.takes[times.is_sum].sum())
    step_s = total_s / times.num_steps
    of_part = dict(zip(PARTS, (blame.sum(1) / total_s).tolist(), strict=True))
    costs = {
        "loader": of_part["loader"],
        "copies": of_part["copies"],
        "validation": of_part["validation"],
        "gc": of_part["gc"],
        "callbacks": of_part["between"],
        "processor": of_part["processor"],
        "computing": sum(of_part[part] for part in _COMPUTING),
        "network": sums_s / total_s,
    }
    everyones = {part: _everyones(times, part) for part in _OF_EVERYONE}
    for part, seconds in everyones.items():
        costs[part] += seconds / total_s
    least = dict.fromkeys(costs, LEAST_SHARE) | {"network": LEAST_SUM_SHARE}
    cause = max(costs, key=lambda name: costs[name] - least[name])
    known: dict[str, Any] = {"step_s": step_s, "sums_s": sums_s / times.num_steps, "costs": costs}
    if costs[cause] < least[cause]:
        return Verdict("none", (), float(late.sum()) / total_s, **known)
    if cause == "network":
        ranks = _behind_a_slow_link(times)
        return Verdict("link" if ranks else "network", ranks, costs[cause], **known)
    is_everyones = everyones.get(cause, 0.0) > 0.5 * costs[cause] * total_s
    if is_everyones:
        excess = times.by_step(times.parts[PARTS.index(cause)])
    else:
        excess = _excess(times, _parts_of(cause))  # [S, P]
    least_s = max(_LATE * step_s, 1e-3)
    is_late = excess > least_s
    ranks = _named(excess * is_late)
    if is_everyones:
        ranks = tuple(range(times.num_ranks))
    of_ranks = is_late[:, list(ranks)] if ranks else is_late
    late_steps = of_ranks.any(1)
    kind, since = cause, None
    if cause == "computing":
        kind, ranks, since = _kind_of_computing(times, excess, ranks, is_late)
    elif ranks and len(ranks) < times.num_ranks:
        since = _since(times, excess[:, list(ranks)].sum(1))
    by_rank = excess[:, list(ranks)].max(1).values if ranks else excess.max(1).values
    late_s = float(by_rank[late_steps].median()) if late_steps.any() else 0.0
    after = _has_validation(times)
    return Verdict(
        kind,
        ranks,
        costs[cause],
        late_share=float(late_steps.double().mean()),
        last_share=_last_share(times, ranks),
        late_s=late_s,
        since=since,
        after_validation=kind != "validation" and _is_after(after, excess.clamp(min=0.0).sum(1)),
        parts=_longer(times, ranks, late_steps),
        is_everyones=is_everyones,
        **known,
    )


def _everyones(times: Times, part: str) -> float:
    """Returns how long all ranks are at a part, in all steps."""
    return float(base(times.parts[PARTS.index(part)]).sum())


def _blame(times: Times, last: Tensor, late: Tensor) -> Tensor:
    """Shares what the last rank of each meeting costs among its parts: [F, P]."""
    longer = (times.parts - times.parts.median(2, keepdim=True).values).clamp(min=0.0)
    of_last = longer.gather(2, last.expand(len(PARTS), -1)[..., None])[..., 0]  # [F, N]
    weights = of_last / of_last.sum(0).clamp(min=1e-12)
    return torch.zeros(len(PARTS), times.num_ranks, dtype=torch.float64).index_add(
        1, last, weights * late
    )


def _parts_of(cause: str) -> list[int]:
    names = {"computing": _COMPUTING, "callbacks": ("between",)}.get(cause, (cause,))
    return [PARTS.index(name) for name in names]


def _excess(times: Times, parts: list[int]) -> Tensor:
    """Returns by how much longer than usual each rank was at these parts: [S, P]."""
    each = times.by_step(times.parts[parts].sum(0))
    return each - base(each)[:, None]


def _named(excess: Tensor) -> tuple[int, ...]:
    """Returns the ranks that have most of the excess; empty where all have some."""
    of_rank = excess.sum(0)
    chosen = [rank for rank, s in enumerate(of_rank) if s >= 0.5 * of_rank.max()]
    is_theirs = float(of_rank[chosen].sum()) >= _NAMED * float(of_rank.sum())
    return tuple(chosen) if is_theirs and len(chosen) <= excess.shape[1] // 2 else ()


def _kind_of_computing(
    times: Times, excess: Tensor, ranks: tuple[int, ...], is_late: Tensor
) -> tuple[str, tuple[int, ...], int | None]:
    """Returns which of the causes of longer computation it is, the ranks, and since when."""
    if _explained_by_lengths(times):
        return "lengths", ranks, None
    if not ranks:
        someone = is_late.any(1)
        latest = excess.argmax(1)
        again = (latest[1:] == latest[:-1]) & someone[1:] & someone[:-1]
        repeats = float(again.sum()) / max(1.0, float((someone[1:] & someone[:-1]).sum()))
        stays = float((someone[1:] & someone[:-1]).sum()) / max(1.0, float(someone[:-1].sum()))
        in_bursts = repeats > 0.5 + 0.5 / times.num_ranks and stays > 0.6
        return ("bursts" if in_bursts else "random"), (), None
    series = excess[:, list(ranks)].sum(1)
    jump, at_jump = _fit_jump(series)
    ramp, at_ramp = _fit_ramp(series)
    if ramp >= _EXPLAINED and ramp > jump + 0.02 and len(ranks) == 1:
        return "drift", ranks, int(times.numbers[at_ramp])
    if jump >= _EXPLAINED:
        return "slow", ranks, int(times.numbers[at_jump])
    late = is_late[:, list(ranks)].any(1)
    share = float(late.double().mean())
    if share >= _MOST:
        return "slow", ranks, None
    return ("bursts" if _is_in_bursts(late) else "random"), ranks, None


def _is_in_bursts(late: Tensor) -> bool:
    """Returns whether a step after a late one is late far more often than any step is."""
    share = float(late.double().mean())
    again = float((late[1:] & late[:-1]).sum()) / max(1.0, float(late[:-1].sum()))
    return again > share + 0.5 * (1 - share)


def _explained_by_lengths(times: Times) -> bool:
    parts = [PARTS.index(name) for name in _COMPUTING]
    seconds = times.by_step(times.parts[parts].sum(0))
    seconds = seconds - seconds.mean(1, keepdim=True)
    items = times.items - times.items.mean(1, keepdim=True)
    scale = float(seconds.square().sum() * items.square().sum())
    if scale <= 0.0 or float(items.square().mean()) < 1e-4 * float(times.items.square().mean()):
        return False
    together = float((seconds * items).sum())
    return together > 0 and together**2 / scale >= _EXPLAINED


def _fit_jump(series: Tensor) -> tuple[float, int]:
    """Returns the variance explained by a jump upwards at the best step, and this step."""
    n, variance = len(series), float((series - series.mean()).square().sum())
    if variance <= 0.0:
        return 0.0, 0
    before, count = series.cumsum(0)[:-1], torch.arange(1, n, dtype=torch.float64)
    low, high = before / count, (series.sum() - before) / (n - count)
    between = count * (n - count) / n * (high - low).square()
    # Only where nobody was late before.
    between[(low > 0.3 * high) | (count < 5) | (n - count < 5)] = 0.0
    best = int(between.argmax())
    return float(between[best]) / variance, best + 1


def _fit_ramp(series: Tensor) -> tuple[float, int]:
    """Returns the variance explained by a rise from the best step on, and this step."""
    n, centred = len(series), series - series.mean()
    variance = float(centred.square().sum())
    best, at = 0.0, 0
    for begin in range(0, 3 * n // 4, max(1, n // 40)):
        ramp = (torch.arange(n, dtype=torch.float64) - begin).clamp(min=0.0)
        ramp = ramp - ramp.mean()
        slope = float((ramp * centred).sum())
        explained = slope**2 / float(ramp.square().sum()) / variance if variance else 0.0
        if slope > 0 and explained > best:
            best, at = explained, begin
    return best, at


def _since(times: Times, series: Tensor) -> int | None:
    explained, at = _fit_jump(series)
    return int(times.numbers[at]) if explained >= _EXPLAINED else None


def _has_validation(times: Times) -> Tensor:
    return times.by_step(times.parts[PARTS.index("validation")]).max(1).values > 0


def _is_after(after: Tensor, excess: Tensor) -> bool:
    share = float(after.double().mean())
    if not 0 < share < 0.3:
        return False
    return float(excess[after].sum()) > 0.6 * float(excess.sum())


def _last_share(times: Times, ranks: Sequence[int]) -> float:
    """Returns in which share of the steps one of these ranks kept the others waiting longest."""
    if not ranks or len(ranks) == times.num_ranks:
        return 1.0
    own = times.by_step(times.own)
    return float(torch.isin(own.argmax(1), torch.tensor(ranks)).double().mean())


def _longer(times: Times, ranks: Sequence[int], late_steps: Tensor) -> dict[str, float]:
    if not late_steps.any():
        return {}
    found = {}
    for place, name in enumerate(PARTS):
        each = times.by_step(times.parts[place])
        longer = each - base(each)[:, None]
        of_ranks = longer[:, list(ranks)] if ranks else longer
        found[name] = float(of_ranks.max(1).values[late_steps].mean())
    return found


def _behind_a_slow_link(times: Times) -> tuple[int, ...]:
    """Returns the rank for which the sums are always over last; none where that changes.

    A ring passes 2 (P - 1) messages on, one after the other.  The last one over a slow link comes
    later than all others, by as long as it takes.
    """
    over, takes = times.over[times.is_sum], times.takes[times.is_sum]
    last = over.argmax(1)
    rank = int(last.mode().values)
    lead = over[:, rank] - over[:, [r for r in range(times.num_ranks) if r != rank]].max(1).values
    message_s = float(takes.median()) / (2 * (times.num_ranks - 1))
    is_always = float((last == rank).double().mean()) >= _NAMED
    return (rank,) if is_always and float(lead.median()) > _BEHIND * message_s else ()
