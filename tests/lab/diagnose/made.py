"""Traces of DDP made by a model: what each rank does, who waits for whom, and twelve causes.

A step of rank i: [question to rank 0] load, forward, backward with two pieces of the gradient, the
sum, optimizer.  All ranks meet at the question and at the sum.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_dsgd.lab.timeline.recorder import FORMAT, file_of
from lightning_dsgd.lab.timeline.trace import Step, Trace

QUESTION_S = 3e-4
SUM_S = 4e-3
BYTES = 4_000_000


@dataclass
class Own:
    """What a rank does in a step, in seconds."""

    between: float = 1e-3
    validation: float = 0.0
    saving: float = 0.0
    start: float = 0.0
    """Of the workers of a loader, where an epoch begins."""
    loader: float = 5e-4
    copies: float = 0.0
    forward: float = 15e-3
    backward: float = 32e-3
    optimizer: float = 1.5e-3
    gc: float = 0.0
    items: int = 1000
    sum: float = SUM_S
    behind: float = 0.0
    """By how much the sum is over later for this rank."""
    short: float = 0.0
    """For how long it waits for a processor in its forward pass, besides."""
    bytes: int = BYTES


@dataclass
class Setting:
    """What a cause needs to know."""

    ranks: int
    steps: int
    source: random.Random
    victim: int
    drawn: dict[int, int] = field(default_factory=dict)


Cause = Callable[[Setting, int, int, Own], None]


def slow(s: Setting, step: int, rank: int, own: Own) -> None:
    if rank == s.victim:
        own.forward *= 1.5
        own.backward *= 1.5


def two(s: Setting, step: int, rank: int, own: Own) -> None:
    if rank in (s.victim, (s.victim + 1) % s.ranks):
        own.backward *= 1.7


def at_random(s: Setting, step: int, rank: int, own: Own) -> None:
    if rank == s.drawn.setdefault(step, s.source.randrange(s.ranks)):
        own.forward += 35e-3


def bursts(s: Setting, step: int, rank: int, own: Own) -> None:
    if rank == s.victim and step % 25 >= 17:
        own.forward += 45e-3


def loader(s: Setting, step: int, rank: int, own: Own) -> None:
    if rank == s.victim:
        own.loader = s.source.uniform(20e-3, 40e-3)


def copies(s: Setting, step: int, rank: int, own: Own) -> None:
    own.copies = s.source.uniform(20e-3, 40e-3)


def validation(s: Setting, step: int, rank: int, own: Own) -> None:
    if step % 20 == 0:
        own.validation = 0.6 if rank == 0 else 20e-3


def link(s: Setting, step: int, rank: int, own: Own) -> None:
    own.sum = 45e-3
    own.behind = 9e-3 if rank == s.victim else s.source.uniform(0, 2e-3)


def network(s: Setting, step: int, rank: int, own: Own) -> None:
    own.sum = s.source.uniform(40e-3, 50e-3)
    own.behind = s.source.uniform(0, 2e-3)


def garbage(s: Setting, step: int, rank: int, own: Own) -> None:
    if (step + 3 * rank) % 7 == 0:
        own.gc = s.source.uniform(30e-3, 60e-3)


def lengths(s: Setting, step: int, rank: int, own: Own) -> None:
    share = s.source.lognormvariate(0.0, 0.5)
    own.items = int(1000 * share)
    own.forward *= share
    own.backward *= share


def drift(s: Setting, step: int, rank: int, own: Own) -> None:
    if rank == s.victim:
        slower = 1 + 0.9 * max(0.0, step / s.steps - 0.2)
        own.forward *= slower
        own.backward *= slower


def none(s: Setting, step: int, rank: int, own: Own) -> None: ...


CAUSES: dict[str, tuple[Cause, str]] = {
    "one rank slow": (slow, "slow"),
    "two ranks slow": (two, "slow"),
    "random": (at_random, "random"),
    "bursts": (bursts, "bursts"),
    "a slow loader": (loader, "loader"),
    "a long validation": (validation, "validation"),
    "one slow link": (link, "link"),
    "a slow network": (network, "network"),
    "garbage collection": (garbage, "gc"),
    "uneven lengths": (lengths, "lengths"),
    "thermal drift": (drift, "drift"),
    "none": (none, "none"),
}


def ranks_of(cause: str, victim: int, ranks: int) -> tuple[int, ...]:
    """The ranks that a verdict must name."""
    if cause == "two ranks slow":
        return tuple(sorted({victim, (victim + 1) % ranks}))
    if cause == "a long validation":
        return (0,)
    everyone = ("random", "a slow network", "garbage collection", "uneven lengths", "none")
    return () if cause in everyone else (victim,)


def traces(
    cause: Cause,
    seed: int = 0,
    ranks: int = 4,
    steps: int = 200,
    jitter: float = 0.03,
    victim: int | None = None,
    about: dict[str, object] | None = None,
) -> list[Trace]:
    """The traces of one run with a cause."""
    source = random.Random(f"{seed}")
    victim = source.randrange(1, ranks) if victim is None else victim
    setting = Setting(ranks, steps, source, victim)
    made: list[list[Step]] = [[] for _ in range(ranks)]
    began = [0.0] * ranks
    for number in range(1, steps + 1):
        every = [Own() for _ in range(ranks)]
        for rank, own in enumerate(every):
            for name in ("forward", "backward", "optimizer", "between"):
                usual = getattr(own, name) * source.gauss(1.0, jitter)
                setattr(own, name, max(1e-5, usual))
            cause(setting, number, rank, own)
        paused = [began[r] + own.validation + own.saving for r, own in enumerate(every)]
        asks = [paused[r] + own.start + own.between for r, own in enumerate(every)]
        answered = max(asks) + QUESTION_S
        loaded = [answered + own.loader for own in every]
        copied = [loaded[r] + own.copies for r, own in enumerate(every)]
        forwarded = [copied[r] + own.forward + own.gc + own.short for r, own in enumerate(every)]
        first = [forwarded[r] + 0.6 * own.backward for r, own in enumerate(every)]
        ready = [forwarded[r] + own.backward for r, own in enumerate(every)]
        first_over = max(first) + every[0].sum / 2
        over_s = max(first_over, max(ready)) + every[0].sum / 2
        for rank, own in enumerate(every):
            over = over_s + own.behind
            end = over + own.optimizer
            begin = began[rank]
            validated = begin + own.validation
            made[rank].append(
                Step(
                    number,
                    begin,
                    end,
                    fetch=((validated, copied[rank]),),
                    evaluate=((begin, validated),) if own.validation else (),
                    exchange=((asks[rank], answered), (ready[rank], over)),
                    wait=((asks[rank], answered, -1), (ready[rank], over, -1)),
                    serve=(),
                    load=((answered, loaded[rank]),),
                    copy=((loaded[rank], copied[rank]),) if own.copies else (),
                    forward=((copied[rank], forwarded[rank]),),
                    backward=((forwarded[rank], over),),
                    optimizer=((over, end),),
                    gc=((copied[rank], copied[rank] + own.gc),) if own.gc else (),
                    save=((validated, paused[rank]),) if own.saving else (),
                    start=((paused[rank], paused[rank] + own.start),) if own.start else (),
                    sum=(
                        (first[rank], first_over, own.bytes // 2),
                        (ready[rank], over, own.bytes // 2),
                    ),
                    device={
                        "meet": ((asks[rank], answered),),
                        **({"copy": ((loaded[rank], copied[rank]),)} if own.copies else {}),
                        **({"evaluate": ((begin, validated),)} if own.validation else {}),
                        "forward": ((copied[rank], forwarded[rank]),),
                        "backward": ((forwarded[rank], over),),
                        "optimizer": ((over, end),),
                    },
                    items=own.items,
                    short=(0.0, own.short),
                )
            )
            began[rank] = end
    told: dict[str, object] = {
        "strategy": "ddp",
        "sums": "seen",
        "clock": "host",
        "parameters": BYTES // 4,
    }
    told |= {"host": "here", "cores": 16, "processors": "seen"}
    return [Trace(r, ranks, {**told, **(about or {})}, tuple(made[r]), "") for r in range(ranks)]


def write(folder: Path, every: list[Trace]) -> None:
    """Writes the files of a run, as the ranks' recorders do."""
    names = (
        *("fetch", "evaluate", "exchange", "wait", "load", "forward", "backward", "optimizer"),
        *("copy", "save", "start"),
    )
    for trace in every:
        head = {"format": FORMAT, "rank": trace.rank, "world_size": trace.world_size}
        lines: list[dict[str, Any]] = [head | {"origin_s": 0.0} | trace.about]
        for step in trace.steps:
            line = {"step": step.number, "span": whole((step.begin_s, step.end_s))}
            line |= {name: [whole(span) for span in getattr(step, name)] for name in names}
            line |= {"gc": [whole(span) for span in step.gc], "items": step.items}
            for span, waited in zip(line["exchange"], step.short, strict=True):
                if waited:
                    span.append(round(1e6 * waited))
            for part, spans in step.device.items():
                line[f"device_{part}"] = [[*whole(span), step.number] for span in spans]
            line["sum"] = [[*whole(span), step.number] for span in step.sum]
            lines.append(line)
        folder.mkdir(exist_ok=True)
        file_of(folder, trace.rank).write_text("".join(json.dumps(line) + "\n" for line in lines))


def whole(span: tuple[float, ...]) -> list[int]:
    """A span in microseconds."""
    begin, end, *figures = span
    return [round(1e6 * begin), round(1e6 * end), *map(int, figures)]
