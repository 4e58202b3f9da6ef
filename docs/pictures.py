"""Draws the pictures of the documents, from result files and from the code.

python docs/pictures.py             # all
python docs/pictures.py seconds     # one of them, into docs/images/
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lightning_dsgd.algorithms.written import as_code
from lightning_dsgd.lab import decisions
from lightning_dsgd.lab.decisions import DDP, OWN_RATE, SAME_LOSS, Choice
from lightning_dsgd.lab.drawing import chart
from lightning_dsgd.lab.drawing.chart import Dots, Series
from lightning_dsgd.lab.drawing.style import INK, OTHER, SPANS, Picture, colour
from lightning_dsgd.lab.target_rows import label
from lightning_dsgd.primitives import topology

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
IMAGES = ROOT / "docs/images"
EPOCHS = "choosing/target_epochs.json"
SLOW_LINK = "choosing/target_epochs_slow_link.json"
IN_EPOCHS = {
    "random": ("Ranks late at random", EPOCHS),
    "slow-rank": ("One of 8 ranks twice as slow", EPOCHS),
    "heavy-tail": ("Step times with a heavy tail", EPOCHS),
    "slow-link": ("A slow link", SLOW_LINK),
}


def result(name: str) -> dict[str, Any]:
    """Reads a result file of docs/results."""
    return json.loads((RESULTS / name).read_text())  # type: ignore[no-any-return]


def row_of(of: dict[str, Any], situation: str, name: str) -> dict[str, Any]:
    """What was measured of a strategy in a situation."""
    return next(
        row for row in of["summary"] if (row["situation"], row["strategy"]) == (situation, name)
    )


def percent(value: float) -> str:
    """Writes a share as the label of an axis."""
    return f"{100 * value:.0f}%"


# ---- what was measured ----


def seconds() -> str:
    """Accuracy against seconds, in each situation, with the first choice and the next one."""
    firsts = {name: decisions.measured_as(name).first for name in IN_EPOCHS}
    shares = [
        row_of(result(file), name, firsts[name].label)["to_target"]["0.99"]["share"]
        for name, (_, file) in IN_EPOCHS.items()
    ]
    picture = Picture(
        f"99% of all-reduce's accuracy is there after {min(shares):.2f} to {max(shares):.2f} of "
        "its time",
        "Digits, 8 simulated ranks, epochs of 30 steps, 10 seeds: mean and range. Each strategy "
        "has its best learning rate; batches are claimed, but for the slow link.",
    )
    for name, (words, file) in IN_EPOCHS.items():
        measured = result(file)
        base = measured["settings"]["baseline"]
        shown = [(base, "all-reduce"), (firsts[name].label, firsts[name].name)]
        if name == "slow-link":
            shown = [(base, "all-reduce, int8"), (firsts[name].label, "wagma, int8")]
        share = row_of(measured, name, firsts[name].label)["to_target"]["0.99"]["share"]
        series = []
        for of, called in shown:
            cells = [
                (each["seconds"], each["value"])
                for each in measured["curves"]
                if each["situation"] == name and label(each) == of
            ]
            series.append(Series(of, called, *chart.mean_of(cells)))
        final = row_of(measured, name, base)["value"]
        chart.lines(
            picture,
            f"{words}: {firsts[name].name} after {share:.2f}",
            series,
            104,
            (0.85, 0.98),
            percent,
            "seconds",
            (0.99 * final, "99%"),
        )
    return picture.svg()


def times() -> str:
    """Times to 99% and to all of all-reduce's quality, with intervals."""
    picture = Picture(
        "99% of the quality comes in about half the time; all of it comes later, and not for sure",
        "Share of all-reduce's time, digits, 8 simulated ranks, 10 seeds, each with its best rate; "
        "local_sgd has a period of 8. Filled: to 99%, with its 95% interval. Hollow: to all of it; "
        "how many seeds get there.",
    )
    names = {
        "random": ("hpsgd", "adpsgd", "popsgd", "wagma:overlap=true", "local_sgd:sync_period=8"),
        "slow-link": (
            "wagma:overlap=true:sync_period=10:wire_dtype=int8",
            "popsgd:wire_dtype=int8",
            "hpsgd:wire_dtype=int8",
        ),
    }
    for situation, (words, file) in IN_EPOCHS.items():
        measured, rows = result(file), []
        of_link = situation == "slow-link"
        for spec in names.get(situation, names["random"]):
            row = row_of(measured, situation, spec if of_link else f"{spec}, claimed")
            at_99, all_of_it = row["to_target"]["0.99"], row["to_target"]["1"]
            rows.append(
                Dots(
                    spec,
                    spec.partition(":")[0] + (", overlap" if spec == "wagma:overlap=true" else ""),
                    at_99["share"],
                    tuple(at_99["interval"]),
                    all_of_it["share"],
                    f"{all_of_it['reached']} of {row['seeds']}",
                )
            )
        rows.sort(key=lambda each: each.share)
        how = "one byte an entry for all" if of_link else "claimed batches"
        chart.dots(picture, f"{words}, {how}", rows, 124, 1.25, "of its time")
    return picture.svg()


SITUATIONS = {
    "alike": "All ranks alike",
    "slow": "One rank twice as slow",
    "late": "A random rank late by 0.8 of a step",
    "stalls": "Stalls, a heavy tail",
}


def balanced() -> str:
    """The time of `balanced` beside DDP's, at the same final loss."""
    measured = result("balanced/real.json")
    rows = {row["situation"]: row for row in measured["rows"] if row["k"] == 8}
    shares = [row["share_of_ddp"] for name, row in rows.items() if name != "alike"]
    picture = Picture(
        f"balanced takes {min(shares):.2f} to {max(shares):.2f} of DDP's time where ranks are "
        "late, at DDP's loss",
        f"{measured['ranks']} real ranks on {measured['cores']} cores, AdamW, 8 micro-batches of "
        "40 ms, mostly a sleep; medians of 5 pairs of runs, whose final losses are equal.",
    )
    left, right = 92.0, picture.width - 56.0
    for name, words in SITUATIONS.items():
        picture.paragraph(words, "b")
        for called, share in (("ddp", 1.0), ("balanced", rows[name]["share_of_ddp"])):
            colours = colour(called) if called == "balanced" else OTHER
            y, width = picture.height + 4, share * (right - left)
            picture.text(left - 8, y + 13, called, "e")
            picture.path(f"M{left} {y:.1f}h{width:.1f}v17H{left}z", picture.of(colours))
            picture.text(left + width + 6, y + 13, f"{share:.2f}", "b")
            picture.height += 22
        picture.height += 6
    return picture.svg()


def kept() -> str:
    """The share of the updates that the consensus contains."""
    samples = result("wagma/updates_kept.json")["samples"]
    situations = {
        "random": "ranks late at random",
        "one slow": "one slow rank",
        "heavy": "heavy tail",
    }

    def share(spec: str, name: str) -> float:
        return statistics.mean(each["kept"] for each in samples[spec][name])

    least = min(share("wagma:rule=paper", name) for name in situations)
    picture = Picture(
        f"The paper's rule for late ranks loses up to {1 - least:.0%} of all updates; the default "
        "loses none",
        "Share of all ranks' updates that the mean model contains: wagma, 8 simulated ranks, 100 "
        "steps, mean of 3 seeds.",
    )
    left, right = 110.0, picture.width - 56.0
    for name, words in situations.items():
        picture.paragraph(words, "b")
        for spec, called in (("wagma", "default"), ("wagma:rule=paper", "paper's rule")):
            value, y = share(spec, name), picture.height + 4
            colours = colour("wagma") if spec == "wagma" else OTHER
            picture.text(left - 8, y + 13, called, "e")
            picture.path(
                f"M{left} {y:.1f}h{value * (right - left):.1f}v17H{left}z", picture.of(colours)
            )
            picture.text(left + value * (right - left) + 6, y + 13, f"{value:.2f}", "b")
            picture.height += 22
        picture.height += 6
    return picture.svg()


def demo() -> str:
    """The demo: loss against epochs, and against the seconds of real ranks."""
    jobs = result("getting_started/demo.json")["jobs"]
    of = {name: [job for job in jobs if job["strategy"] == name] for name in ("ddp", "balanced")}

    def curves(strategy: str, axis: str) -> Series:
        rows = [job["rows"] for job in of[strategy]]
        points = [([r[axis] for r in job], [r["loss"] for r in job]) for job in rows]
        return Series(strategy, strategy, *chart.mean_of(points))

    share = statistics.median(
        mine["rows"][-1]["seconds"] / ddps["rows"][-1]["seconds"]
        for mine, ddps in zip(of["balanced"], of["ddp"], strict=True)
    )
    picture = Picture(
        f"make demo: balanced has DDP's loss after {share:.2f} of its time",
        "Digits, 4 real ranks on 2 cores, one twice as slow; a sleep of 80 ms in each micro-batch; "
        "3 seeds: mean and range.",
    )
    top = max(job["rows"][0]["loss"] for job in jobs)
    for axis, words in (("epoch", "epochs"), ("seconds", "seconds")):
        series = [curves(strategy, axis) for strategy in of]
        title = f"Validation loss against {words}"
        chart.lines(picture, title, series, 110, (0.0, top), "{:.1f}".format, words)
    return picture.svg()


# ---- how it works ----

STEP = 4
"""How many micro-batches each rank has in a step of DDP."""
UNITS_S = (1.0, 2.0, 1.0, 1.0)
"""How long each rank takes for a micro-batch: rank 1 is twice as slow."""
SUM_S = 0.5
END_S = 2 * (STEP * max(UNITS_S) + SUM_S)
Spans = list[tuple[float, float, str]]
"""From when to when a rank does what."""


def of_rounds(shares: Callable[[], list[int]]) -> list[Spans]:
    """The spans of ranks that sum once all have computed their share of a step."""
    spans: list[Spans] = [[] for _ in UNITS_S]
    begin = 0.0
    while begin < END_S:
        ends = [begin + n * unit_s for n, unit_s in zip(shares(), UNITS_S, strict=True)]
        last = max(ends)
        for mine, end, unit_s in zip(spans, ends, UNITS_S, strict=True):
            num_units = round((end - begin) / unit_s)
            mine += [
                (begin + i * unit_s, begin + (i + 1) * unit_s, "compute") for i in range(num_units)
            ]
            mine += [(end, last, "late wait"), (last, last + SUM_S, "exchange")]
        begin = last + SUM_S
    return spans


def shared() -> list[int]:
    """How many micro-batches each rank computes, where each goes to who finishes it first."""
    counts = [0] * len(UNITS_S)
    for _ in range(STEP * len(UNITS_S)):
        ends = [(n + 1) * unit_s for n, unit_s in zip(counts, UNITS_S, strict=True)]
        counts[ends.index(min(ends))] += 1
    return counts


def unawaited() -> list[Spans]:
    """The spans of ranks that average in pairs; one that computes gives older weights."""
    spans: list[Spans] = [[] for _ in UNITS_S]
    for mine, unit_s in zip(spans, UNITS_S, strict=True):
        begin = 0.0
        while begin < END_S:
            units = [begin + i * unit_s for i in range(STEP)]
            mine += [(at, at + unit_s, "compute") for at in units]
            begin += STEP * unit_s + SUM_S
            mine.append((begin - SUM_S, begin, "exchange"))
    late = max(range(len(UNITS_S)), key=UNITS_S.__getitem__)
    for begin, end, what in spans[0]:
        computes = any(a < end and begin < b for a, b, each in spans[late] if each == "compute")
        if what == "exchange" and computes:
            spans[late].append((begin, end, "serve"))
    return spans


def steps() -> str:
    """What ranks do in the same time, where one is late: ddp, balanced and wagma."""
    picture = Picture(
        "A late rank: ddp waits for it, balanced shares its work, wagma goes on",
        "A drawing, not a measurement: 4 ranks, rank 1 takes twice as long for a micro-batch; a "
        "step has 4 of each rank. With wagma all wait for each other every 100 steps.",
    )
    left, right = 60.0, picture.width - 12.0

    def x_of(time_s: float) -> float:
        return left + (right - left) * min(time_s, END_S) / END_S

    for name, spans in (
        ("ddp", of_rounds(lambda: [STEP] * len(UNITS_S))),
        ("balanced", of_rounds(shared)),
        ("wagma", unawaited()),
    ):
        nums = [
            sum(end <= END_S for _, end, what in mine if what == "exchange") for mine in spans[:2]
        ]
        made = f"{nums[0]} steps" if nums[0] == nums[1] else f"{nums[0]} steps, rank 1: {nums[1]}"
        picture.paragraph(f"{name}: {made}", "b")
        for rank, mine in enumerate(spans):
            y = picture.height + 3
            picture.text(left - 8, y + 11, f"rank {rank}", "a e")
            for begin, end, what in mine:
                if begin >= END_S or begin == end:
                    continue
                top, tall = (y + 9, 5) if what == "serve" else (y, 14)
                x, wide = x_of(begin), x_of(end) - x_of(begin)
                d = f"M{x:.1f} {top:.1f}h{max(wide - 1, 0.5):.1f}v{tall}H{x:.1f}z"
                picture.path(d, picture.of(SPANS[what]))
            picture.height += 18
        picture.height += 8
    for what, words in (
        ("compute", "computes a micro-batch"),
        ("late wait", "waits for other ranks"),
        ("exchange", "sums gradients, or averages weights"),
        ("serve", "gives older weights, while it computes"),
    ):
        y = picture.height + 4
        picture.path(f"M12 {y:.1f}h11v11H12z", picture.of(SPANS[what]))
        picture.text(30, y + 10, words, "a")
        picture.height += 17
    return picture.svg()


def talks() -> str:
    """Who talks to whom in three steps on end."""
    picture = Picture(
        "Who waits for whom: all for all, a group, a partner, or nobody",
        "8 ranks, three steps on end. A line: these two average. Dashed: neither waits for it.",
    )
    everyone = [(a, b) for a in range(8) for b in range(a)]

    def in_groups(step: int) -> list[tuple[int, int]]:
        found = topology.groups(step, 8, 4)
        return [(a, b) for group in found for a in group for b in group if a > b]

    def pairs(step: int) -> list[tuple[int, int]]:
        return [(a, b) for a, b in enumerate(topology.random_partners(step, 8)) if a < b]

    def along(graph: str) -> Callable[[int], list[tuple[int, int]]]:
        return lambda step: [
            (rank, peer) for rank in range(8) for peer in topology.out_peers(graph, step, rank, 8)
        ]

    ring = [(a, b) for a in range(8) for b in topology.neighbours("ring", a, 8) if a < b]
    rows: list[tuple[str, str, Callable[[int], list[tuple[int, int]]], bool]] = [
        ("allreduce", "all, in every step", lambda _: everyone, False),
        ("local_sgd", "all, every 2 steps", lambda step: everyone if step == 1 else [], False),
        ("wagma", "a group; late ranks are not awaited", in_groups, True),
        ("popsgd", "a random partner", pairs, True),
        ("adpsgd", "a neighbour", along("bipartite_exponential"), True),
        ("hpsgd", "all, in the background", lambda step: everyone if step != 1 else [], True),
        ("sgp", "the next one, in turn", along("exponential"), False),
        ("dpsgd", "both neighbours on a ring", lambda _: ring, False),
    ]
    top = picture.height
    for place, (name, words, talk, is_free) in enumerate(rows):
        x, y = 12 + 236 * (place % 2), top + 126 * (place // 2)
        picture.text(x, y + 16, name, "b", picture.of(colour(name)))
        picture.text(x, y + 33, words, "a")
        for step in range(3):
            centre = (x + 34 + 72 * step, y + 76)
            spots = [
                (
                    centre[0] + 28 * math.sin(math.pi * (rank + 0.5) / 4),
                    centre[1] - 28 * math.cos(math.pi * (rank + 0.5) / 4),
                )
                for rank in range(8)
            ]
            d = "".join(
                f"M{spots[a][0]:.1f} {spots[a][1]:.1f}L{spots[b][0]:.1f} {spots[b][1]:.1f}"
                for a, b in talk(step)
            )
            if d:
                more = 'stroke-width="1.3"' + (' stroke-dasharray="3 3"' if is_free else "")
                picture.path(d, "s" + picture.of(colour(name)), more)
            for at in spots:
                picture.parts.append(
                    f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="3.6" class="{picture.of(INK)}"/>'
                )
    picture.height = top + 126 * math.ceil(len(rows) / 2) - 8
    return picture.svg()


QUESTIONS = {
    "slow-link": "Do the sums take most of the time?",
    "slow-rank": "Is the same rank always slower?",
    "random": "Are ranks late at random, or with a heavy tail?",
    "memory": "Is no memory left, or the model in shards?",
}


def tree() -> str:
    """From questions to a choice, as `decisions` has it."""
    picture = Picture(
        "Four questions lead to a strategy",
        "lightning-dsgd why answers the first three for your own job. Bold: DDP's learning rate "
        "stays. With Adam take balanced, allreduce or ddp.",
    )
    left, wide, y = 12.0, 186.0, picture.height + 2
    for name, question in QUESTIONS.items():
        here = decisions.SITUATIONS[name]
        same, own_rate = here.choice(SAME_LOSS), here.choice(OWN_RATE)
        kept = same or own_rate or here.first
        other = "another loss curve: " if same else "another learning rate: "
        bold = wrapped(spelled(kept), 26)
        plain = wrapped(other + spelled(here.first), 31) if kept != here.first else []
        lines = [*bold, *plain]
        height = max(50, 18 * len(lines) + 14)
        picture.box(left, y, wide, height, "\n".join(wrapped(question, 25)))
        right = left + wide + 42
        picture.path(f"M{left + wide} {y + height / 2:.0f}H{right}", "s" + picture.of(INK))
        picture.text(left + wide + 21, y + height / 2 - 5, "yes", "a m")
        colours = colour(kept.strategy)
        picture.parts.append(
            f'<rect x="{right}" y="{y:g}" width="{picture.width - right - 12:g}" '
            f'height="{height:g}" rx="6" class="k s{picture.of(colours)}" stroke-width="1.5"/>'
        )
        for place, line in enumerate(lines):
            at = y + height / 2 + 5 + 18 * (place - (len(lines) - 1) / 2)
            picture.text(right + 12, at, line, "b" if place < len(bold) else "a")
        picture.path(f"M{left + wide / 2} {y + height:g}v24", "s" + picture.of(INK))
        picture.text(left + wide / 2 + 8, y + height + 17, "no", "a")
        y += height + 24
    picture.box(left, y, wide, 34, "*stay with ddp")
    picture.height = y + 38
    return picture.svg()


def spelled(choice: Choice) -> str:
    """A choice as its class is called."""
    if choice.strategy == DDP:
        return DDP
    name, given = decisions.options(choice.strategy, choice.data)
    settings = (f"{key}={as_code(value)}" for key, value in given.items())
    return ", ".join([name, *settings])


def wrapped(text: str, width: int) -> list[str]:
    """Lines of so many letters."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return lines


def architecture() -> str:
    """Draws the packages, each above those that it stands on."""
    picture = Picture(
        "An algorithm knows no Lightning, no threads and no sockets, so it runs in simulation too"
    )
    rows: list[list[tuple[str, int]]] = [
        [("*Trainer\ntrainer/", 1), ("*Fabric\nfabric/", 1), ("*plain PyTorch\nplain/", 1)],
        [("*session/\nset-up, stops, checkpoints, metrics", 1)],
        [("*replica/\none flat tensor x", 1), ("*algorithms/\none paper a file", 1)],
        [("*transport/ and lanes\nsend, recv, all_reduce", 1)],
        [("*TCP, NCCL", 1), ("*MPI", 1), ("*simulated\nvirtual clock", 1)],
    ]
    y, inner = picture.height, picture.width - 24
    for row in rows:
        wide = (inner - 8 * (len(row) - 1)) / len(row)
        for place, (text, _) in enumerate(row):
            picture.box(12 + place * (wide + 8), y, wide, 48, text)
        y += 62
    picture.height = y - 4
    picture.paragraph(
        "Beside it, loaded on demand: lab/ (measures, predicts, draws), sharded/, elastic/ (lost "
        "ranks).",
        "n",
        12.5,
    )
    return picture.svg()


PICTURES: dict[str, Callable[[], str]] = {
    each.__name__: each
    for each in (balanced, seconds, times, kept, demo, steps, talks, tree, architecture)
}


def main(names: Iterable[str]) -> None:
    """Draws the pictures with these names; all pictures, if there are none."""
    for name in names or PICTURES:
        (IMAGES / f"{name}.svg").write_text(PICTURES[name]())


if __name__ == "__main__":
    main(sys.argv[1:])
