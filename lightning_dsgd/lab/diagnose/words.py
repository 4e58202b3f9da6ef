"""A verdict in words: Verdict, Why, Next, in at most ten lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from lightning_dsgd.lab.diagnose.in_ddps_place import MOST_SIMULATED
from lightning_dsgd.lab.diagnose.remedies import advised
from lightning_dsgd.lab.diagnose.remedy import Remedy
from lightning_dsgd.lab.diagnose.times import PARTS, Times
from lightning_dsgd.lab.diagnose.verdict import Verdict, base

_LEAST_PART: Final = 0.1
"""The least share of a lateness at which a part is told."""
_SHOWN: Final = 1.02
_NO_WORK: Final = {
    "loader": "the loader",
    "copies": "copies to the device",
    "processor": "processors",
}
"""The parts of a rank's own time in which it does not work."""
_ALWAYS: Final = ("workers", "claimed", "wagma", "int8")
"""The remedies whose gains are told also where there are none."""


def verdict(found: Verdict, strategy: str = "ddp") -> str:
    """Says in one sentence what makes the job slow."""
    who = "all ranks" if found.is_everyones else _ranks(found.ranks)
    many = f"in {found.late_share:.0%} of the steps, by {_ms(found.late_s)}"
    costs = f"it costs {found.share:.0%} of the time"
    s = "s" if len(found.ranks) == 1 else ""
    if found.cause == "none":
        sums = f"the sums take {found.sums_s / found.step_s:.0%}"
        return f"no rank is late, and {sums}: stay with {strategy}"
    if found.cause == "network":
        sums = "the sums of the gradient" if strategy == "ddp" else "sums and gathers"
        return f"{sums} take {found.share:.0%} of the time, on all ranks alike"
    if found.cause == "link":
        return (
            f"the sums take {found.share:.0%} of the time, and are over last for {who}: "
            "a link there is slow"
        )
    if found.cause == "random" and not found.ranks:
        return f"another rank is late each time, {many}: {costs}"
    if found.cause == "bursts" and not found.ranks:
        return f"ranks are late for some steps on end, {many}: {costs}"
    if found.cause == "lengths":
        return f"ranks wait for the one with the largest batch, {many}: {costs}"
    does = {
        "slow": f"compute{s} longer than the others",
        "random": f"compute{s} longer, at random",
        "bursts": f"compute{s} longer for some steps on end, and then not",
        "drift": f"get{s} slower and slower",
        "loader": f"wait{s} for the data loader",
        "copies": f"wait{s} for copies to the device",
        "validation": f"validate{s} longer than the others",
        "gc": f"collect{s} Python's garbage",
        "callbacks": f"spend{s} longer between batches, in callbacks or loggers",
        "processor": f"wait{s} for a processor",
    }[found.cause]
    if not who:
        who = "ranks"
    return f"{who} {does}, {many}: {costs}"


def lines(
    times: Times, found: Verdict, remedies: Sequence[Remedy], num_recorded: int | None = None
) -> list[str]:
    """Returns the text.

    Args:
        times: what was recorded, or is foretold for another cluster
        found: the verdict on these times
        remedies: what each remedy would gain
        num_recorded: how many ranks were recorded; None: as many as the times have
    """
    first = f"Verdict: {verdict(found, times.strategy)}"
    step_s = found.step_s
    meetings_s = float(times.takes.sum()) / times.num_steps
    others_s = meetings_s - found.sums_s
    late_s = sum(v for k, v in found.costs.items() if k != "network") * step_s
    everyones = {
        f"of waiting for {what}": float(base(times.parts[PARTS.index(part)]).sum())
        / times.num_steps
        for part, what in _NO_WORK.items()
    }
    late_s -= sum(everyones.values())
    work_s = step_s - late_s - meetings_s - sum(everyones.values())
    spent = {"of own work": max(0.0, work_s), "of waiting for who is last": late_s}
    spent |= {what: s for what, s in everyones.items() if s > 0.02 * step_s}
    spent |= {"of sums": found.sums_s}
    took = f"{_ms(step_s)} of device time" if times.is_on_device else _ms(step_s)
    whole = f"a step takes {took}: " + ", ".join(f"{_ms(s)} {w}" for w, s in spent.items())
    if others_s > 0.02 * step_s:
        whole += f", {_ms(others_s)} of other meetings"
    text = [
        *_cluster(times, num_recorded),
        first,
        f"Why:     {whole}",
        *(f"         {each}" for each in _details(times, found)),
    ]
    best = advised(list(remedies), found)
    if best is None:
        text.append(f"Next:    stay with {times.strategy}: nothing here would gain 5%")
    else:
        text.append(f"Next:    {best.what}: {_gain(best)} times as fast")
        if best.paste:
            text.append(f"             {best.paste}")
    others = [r for r in remedies if r is not best and _is_told(r)]
    if others:
        text.append("Others:  " + ", ".join(f"{r.name} {r.gain:.2f}" for r in others))
    if times.is_on_device:
        text += _passes(times, [r for r in (best, *others) if r is not None and r.is_strategy])
    text.append(
        f"Seen:    {times.num_ranks} ranks, {times.num_steps} steps; how to read this: "
        'docs/know_before_you_choose.md, "Why is my DDP job slow?"'
    )
    return text


def record(times: Times, found: Verdict, remedies: Sequence[Remedy]) -> dict[str, Any]:
    """Returns the same for programs."""
    best = advised(list(remedies), found)
    return {
        "verdict": verdict(found, times.strategy),
        **asdict(found),
        "num_ranks": times.num_ranks,
        "num_steps": times.num_steps,
        "link": None if times.link is None else asdict(times.link),
        "next": None if best is None else asdict(best),
        "remedies": [asdict(remedy) for remedy in remedies],
    }


def _cluster(times: Times, num_recorded: int | None) -> list[str]:
    """Says for which cluster the times are foretold; nothing where they were recorded."""
    if times.link is None:
        return []
    text = f"Cluster: {times.num_ranks} ranks, each with a link of {times.link}"
    if num_recorded is not None and num_recorded < times.num_ranks:
        text += f"; extrapolated: {num_recorded} ranks were recorded, the others are copies of them"
    if times.num_ranks > MOST_SIMULATED:
        text += f"; strategies are simulated with {MOST_SIMULATED} of them"
    return [text]


def _passes(times: Times, told: Sequence[Remedy]) -> list[str]:
    """Says what the passes of strategies over devices' memory take; nothing without a strategy."""
    if not told:
        return []
    if times.memory_bytes_s is None:
        return [
            "Passes:  the trace does not say how fast the GPUs' memory is, so what strategies take "
            "of it is left out; record it again"
        ]
    taken = [f"{r.name} {_ms(r.passes_s)}" for r in told if r.passes_s is not None]
    taken += [f"{r.name} unknown" for r in told if r.passes_s is None]
    rate = min(times.memory_bytes_s) / 1e12
    return [f"Passes:  of a step, over the GPUs' memory ({rate:.2f} TB/s): {', '.join(taken)}"]


def _details(times: Times, found: Verdict) -> list[str]:
    said = []
    if times.are_processors_short:
        said.append(_processors(times))
    if found.ranks and not found.is_everyones and found.cause not in ("link", "network"):
        since = "" if found.since is None else f", since step {found.since}"
        said.append(f"{_ranks(found.ranks)}: last in {found.last_share:.0%} of the steps{since}")
    longer = {name: s for name, s in found.parts.items() if s > _LEAST_PART * found.late_s}
    if longer and found.late_s and not found.is_everyones:
        each = ", ".join(f"{name} +{_ms(s)}" for name, s in sorted(longer.items()))
        said.append(f"longer where a rank is late: {each}")
    if found.after_validation:
        said.append("mostly in the step after a validation")
    if found.cause == "none" and found.share > 0.01:
        said.append(f"being late by chance costs {found.share:.1%} of the time")
    return said


def _processors(times: Times) -> str:
    """Says by how much the processors are short."""
    waited_s = times.parts[PARTS.index("processor")].sum(0) / times.num_steps
    longest = _ms(float(waited_s.max()))
    text = f"processors are short: a rank is ready to run and waits, for {longest} of a step"
    known = [each for each in times.running if each is not None]
    cores = times.about.get("cores")
    if known and cores:
        text += f"; {max(known):.1f} other threads run or want to, on {cores} cores"
    return text


def _is_told(remedy: Remedy) -> bool:
    return remedy.gain >= _SHOWN or remedy.name in _ALWAYS or remedy.is_asked


def _gain(remedy: Remedy) -> str:
    return f"{remedy.gain:.2f} ({remedy.low:.2f} to {remedy.high:.2f})"


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:6]]
    if len(ranks) > 6:
        return f"ranks {', '.join(shown)} and {len(ranks) - 6} more"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
