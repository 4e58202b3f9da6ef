"""What each remedy would gain: how many times as fast the job would be, with an interval.

A remedy either takes a part away from a rank's own time, and DDP goes on as before:

    workers    loader workers: what was waited for the loader is read ahead
    ahead      loader workers do what a script does while it hands a batch over
    pinned     on devices, in its place: batches are copied from pinned memory; not where the
               trace says that they are already, as that of Lightning's Trainer can
    shared     each rank validates as much as the mean of all ranks
    freeze     Python collects no garbage while training goes on
    sorted     the batches of one step have the same length
    lighter    between batches each rank spends as little as the others, on callbacks and loggers
    mended     the late ranks are as fast as the others
    cores      each rank has a processor whenever it is ready to run

or a strategy takes DDP's place (not FSDP's): `in_ddps_place` says which, and what that gains.
Where processors are short, no strategy is advised: what it sends would wait for them too.
`balanced` comes first where ranks are late, as it keeps DDP's loss.

`remedy` tells what an interval has.  The lower end of `ahead` has half of the copies left; `pinned`
has half of them left, three quarters at the lower end, and none at the upper one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.lab.diagnose.in_ddps_place import dealt, name_of, of_situation, strategies
from lightning_dsgd.lab.diagnose.remedy import Remedy, drawn
from lightning_dsgd.lab.diagnose.times import PARTS, Times
from lightning_dsgd.lab.diagnose.verdict import Verdict, base

WORTH: Final = 1.05
"""A remedy that makes the job this many times as fast is worth a change."""
_FETCH_S: Final = 5e-4
"""What a rank spends on a batch that a worker has ready."""
_LEFT_OF_COPIES: Final = 0.5
"""The share of a copy that is left at the lower end of what is foretold; nobody has measured it."""
_OF_CAUSE: Final = {
    "slow": ("balanced", "claimed"),
    "drift": ("balanced", "claimed"),
    "random": ("balanced", "wagma"),
    "bursts": ("balanced", "wagma"),
    "lengths": ("sorted", "balanced"),
    "loader": ("workers",),
    "copies": ("ahead", "pinned"),
    "validation": ("shared",),
    "callbacks": ("lighter", "balanced"),
    "processor": ("cores",),
    "gc": ("freeze", "balanced"),
    "link": ("int8",),
    "network": ("int8",),
}
"""The remedies of a cause, which come before others: the first that is worth it."""
_ONLY_FOR_ITS_CAUSE: Final = ("mended", "cores")
"""Remedies that tell what would be gained, and need other machines."""


def remedies(times: Times, verdict: Verdict, asked: Sequence[str] = ()) -> list[Remedy]:
    """Returns all remedies that apply, the best first.

    Args:
        times: what was recorded, or is foretold
        verdict: what makes the job slow
        asked: strategies of which the user wants to know; they are advised to nobody
    """
    ddp = _of_ddp(times, times.own)
    found = [
        _replaced(times, ddp, "workers", _less("loader", times, at_most=_FETCH_S)),
        _replaced(times, ddp, "shared", _less("validation", times, share=True)),
        _replaced(times, ddp, "freeze", _less("gc", times)),
        _replaced(times, ddp, "lighter", _as_the_others("between", times)),
        replace(
            _replaced(times, ddp, "cores", _less("processor", times)),
            paste=_how_to_get_cores(times),
        ),
    ]
    if not times.is_on_device:
        found.append(_ahead(times, ddp))
    elif not times.pins_batches:
        found.append(_pinned(times, ddp))
    if _takes_strategies(times):
        found += strategies(times, verdict, ddp, asked)
    if verdict.cause == "lengths":
        even = times.own.mean(1, keepdim=True).expand_as(times.own)
        found.append(_replaced(times, ddp, "sorted", even))
    if verdict.cause in ("slow", "drift", "bursts") and verdict.ranks:
        found.append(_replaced(times, ddp, "mended", _mended(times, verdict)))
    return sorted(found, key=lambda remedy: -remedy.gain)


def check_asked(times: Times, asked: Sequence[str]) -> None:
    """Raises where it cannot be told what the strategies would gain of which the user asks."""
    for spec in asked:
        algorithm = make_algorithm(dealt(spec).strategy)
        if algorithm.traits.sums_units:
            raise ValueError(
                f"--strategies must name strategies that are simulated, got {spec!r}, whose gain "
                "--json tells of every run whose batches can be shared; leave it out"
            )
        algorithm.check(times.num_ranks)
    if asked and not _takes_strategies(times):
        got = "one whose ranks wait for processors" if times.strategy == "ddp" else times.strategy
        raise ValueError(
            "--strategies needs a run of DDP whose ranks have processors of their own, got "
            f"{got}; leave --strategies out"
        )


def _takes_strategies(times: Times) -> bool:
    """Returns whether a strategy can take DDP's place; a rank of FSDP has no replica."""
    return times.strategy == "ddp" and not times.are_processors_short


def advised(found: list[Remedy], verdict: Verdict) -> Remedy | None:
    """Returns what to do first; None: stay with what is in use.

    The remedy of the cause itself comes first, if it is worth it: most of them keep DDP.  Then come
    all others, the best first.  Where none of them is worth it, as with late ranks of FSDP, it is
    to mend these ranks.
    """
    if verdict.cause == "none":
        return None
    worth = [
        remedy
        for remedy in found
        if remedy.gain >= WORTH and remedy.low > 1.0 and not remedy.is_asked
    ]
    by_name = {remedy.name: remedy for remedy in worth}
    labels = map(name_of, of_situation(verdict))
    names = (*_OF_CAUSE.get(verdict.cause, ()), *labels)
    own = [by_name[name] for name in names if name in by_name]
    others = [remedy for remedy in worth if remedy.name not in _ONLY_FOR_ITS_CAUSE]
    last = [remedy for remedy in worth if remedy.name == "mended"]
    return next(iter([*own, *others, *last]), None)


# ---- DDP with a part taken away ----


def _of_ddp(times: Times, own: Tensor) -> Tensor:
    """Returns what each step of DDP takes: [S]."""
    return times.by_step(own.max(1).values + times.takes)


def _less(part: str, times: Times, at_most: float = 0.0, share: bool = False) -> Tensor:
    spent = times.parts[PARTS.index(part)]
    left = spent.mean(1, keepdim=True).expand_as(spent) if share else spent.clamp(max=at_most)
    return times.own - spent + left


def _as_the_others(part: str, times: Times) -> Tensor:
    spent = times.parts[PARTS.index(part)]
    return times.own - (spent - base(spent)[:, None]).clamp(min=0.0)


def _mended(times: Times, verdict: Verdict) -> Tensor:
    own = times.own.clone()
    usual = base(times.own)[:, None]
    late = list(verdict.ranks)
    own[:, late] = torch.minimum(own[:, late], usual)
    return own


def _replaced(times: Times, ddp: Tensor, name: str, own: Tensor) -> Remedy:
    workers = 2
    if name == "workers":  # so many that a batch is read while the ranks compute
        loader = float(times.by_step(times.parts[PARTS.index("loader")]).mean(0).max())
        workers = max(2, 1 + int(loader / max(1e-6, float(_of_ddp(times, own).mean()))))
    return drawn(name, times, ddp, _of_ddp(times, own), workers=workers)


def _ahead(times: Times, ddp: Tensor) -> Remedy:
    """Returns what copies that nobody waits for would gain; at the least half of each is left."""
    found = _replaced(times, ddp, "ahead", _less("copies", times))
    half = times.own - times.parts[PARTS.index("copies")] * _LEFT_OF_COPIES
    left = _replaced(times, ddp, "ahead", half)
    return replace(found, low=min(found.low, left.low))


def _pinned(times: Times, ddp: Tensor) -> Remedy:
    """Returns what copies from pinned memory would gain, which nobody has measured."""
    copies = times.parts[PARTS.index("copies")]
    found, least, most = (
        _replaced(times, ddp, "pinned", times.own - copies * share)
        for share in (_LEFT_OF_COPIES, 0.5 * _LEFT_OF_COPIES, 1.0)
    )
    return replace(found, low=min(found.low, least.low), high=max(found.high, most.high))


def _how_to_get_cores(times: Times) -> str:
    """Says what to change where processors are short."""
    about = times.about
    cores, threads = int(about.get("cores") or 0), int(about.get("threads") or 1)
    here = [each.get("host") for each in times.abouts].count(about.get("host"))
    if threads > 1 and here * threads > cores:
        fewer = max(1, cores // here)
        return (
            f"OMP_NUM_THREADS={fewer}    # in the ranks' environment: {here} ranks with {threads} "
            f"threads each share {cores} cores"
        )
    if here > cores > 0:
        return (
            f"more cores, fewer ranks on a machine, or nothing else there: {here} ranks share "
            f"{cores} cores"
        )
    return "stop what else runs on the ranks' machines, such as loader workers and other jobs"
