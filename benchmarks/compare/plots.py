"""Plots of result files: throughput against the number of ranks, and quality over time."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from lightning_dsgd.lab import target_rows
from lightning_dsgd.lab.drawing.style import colour

_MARKERS = "osD^vP*Xhd"
"""For prints in grey, and for settings of one strategy, which have its colour."""
_DPI = 140

Result = dict[str, Any]


def _axes(columns: int) -> tuple[Any, Any]:
    figure, rows = _grid(1, columns)
    return figure, rows[0]


def _grid(rows: int, columns: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # an extra, and slow to load: a help text needs none

    figure = Figure(figsize=(5.5 * columns, 4.2 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.grid(alpha=0.3)
    return figure, axes


def _style(index: int, spec: str) -> dict[str, Any]:
    return {
        "color": colour(spec)[0],
        "marker": _MARKERS[index % len(_MARKERS)],
        "markersize": 5,
    }


def plot_throughput(results: list[Result], path: Path) -> None:
    """Plots all ranks' steps per second and bytes per step, against the number of ranks."""
    figure, (speed, volume) = _axes(2)
    results = sorted(results, key=lambda result: result["settings"]["ranks"])
    ranks = [result["settings"]["ranks"] for result in results]
    specs = dict.fromkeys(row["strategy"] for result in results for row in result["summary"])
    ideals = [ideal_steps_per_s(result["settings"]) for result in results]
    products = [p * rate for p, rate in zip(ranks, ideals, strict=True)]
    if all(map(math.isfinite, products)):
        speed.plot(ranks, products, color="grey", linestyle="--", label="ideal")
    for index, spec in enumerate(specs):
        rows = [
            (result["settings"]["ranks"], row)
            for result in results
            for row in result["summary"]
            if row["strategy"] == spec
        ]
        xs = [p for p, _ in rows]
        speed.plot(xs, [p * r["steps_per_s"] for p, r in rows], label=spec, **_style(index, spec))
        if all(row["mb_sent_per_step"] is not None for _, row in rows):
            volume.plot(
                xs, [r["mb_sent_per_step"] for _, r in rows], label=spec, **_style(index, spec)
            )
    for ax in (speed, volume):
        ax.set_xscale("log", base=2)
        ax.set_xticks(ranks, [str(p) for p in ranks])
        ax.set_xlabel("ranks")
        ax.set_ylim(bottom=0)
    speed.set_ylabel("steps per second, all ranks together")
    volume.set_ylabel("MB sent per rank and step")
    speed.legend(fontsize="small")
    figure.savefig(path, dpi=_DPI)


def ideal_steps_per_s(settings: dict[str, Any]) -> float:
    """Returns the rate of ranks that never wait: computation, and their share of the delays."""
    delay_s = settings["delay_s"] * settings["delayed_ranks"] / settings["ranks"]
    step_s = settings["compute_s"] + delay_s
    return 1 / step_s if step_s else math.inf


def plot_convergence(result: Result, path: Path) -> None:
    """Plots the value against seconds and against steps."""
    figure, axes = _axes(2)
    for index, spec in enumerate(dict.fromkeys(cell["strategy"] for cell in result["cells"])):
        curves = [cell["rows"] for cell in result["cells"] if cell["strategy"] == spec]
        epochs = list(zip(*curves, strict=True))
        values = [[row["value"] for row in epoch] for epoch in epochs]
        for ax, key in zip(axes, ("seconds", "step"), strict=True):
            xs = [statistics.mean(row[key] for row in epoch) for epoch in epochs]
            style = _style(index, spec)
            means = [statistics.mean(seeds) for seeds in values]
            every = max(1, len(xs) // 10)
            ax.plot(xs, means, label=spec, markevery=every, **style)
            low, high = [min(seeds) for seeds in values], [max(seeds) for seeds in values]
            ax.fill_between(xs, low, high, color=style["color"], alpha=0.12)
    for ax, label in zip(axes, ("seconds of training", "optimizer steps"), strict=True):
        ax.set_xlabel(label)
        ax.set_ylabel(result["monitor"])
        ax.set_xlim(left=0)
        if result["target"] is not None:
            ax.axhline(result["target"], color="grey", linestyle=":", linewidth=1)
    last = [row["last"] for row in result["summary"]]
    if result["higher_is_better"] and min(last) > 0.8:
        for ax in axes:
            ax.set_ylim(bottom=min(last) - 0.1, top=1.0)
    axes[0].legend(fontsize="small", loc="lower right" if result["higher_is_better"] else "best")
    figure.savefig(path, dpi=_DPI)


def plot_target(result: Result, path: Path) -> None:
    """Plots the quality against seconds, steps and MB sent, one row of plots per situation."""
    curves = result["curves"]
    situations = list(dict.fromkeys(cell["situation"] for cell in curves))
    specs = list(dict.fromkeys(map(target_rows.label, curves)))
    figure, rows = _grid(len(situations), 3)
    labels = {"seconds": "virtual seconds", "step": "steps of a rank", "mb_sent": "MB sent by it"}
    for situation, axes in zip(situations, rows, strict=True):
        for index, spec in enumerate(specs):
            cells = [
                c for c in curves if (c["situation"], target_rows.label(c)) == (situation, spec)
            ]
            # A seed's points lie at times of its own: the mean of the first points, of the second.
            for ax, key in zip(axes, labels, strict=True):
                xs = [statistics.mean(each) for each in zip(*(c[key] for c in cells), strict=False)]
                ys = zip(*(c["value"] for c in cells), strict=False)
                every = max(1, len(xs) // 8)
                means = [statistics.mean(each) for each in ys]
                ax.plot(xs, means, label=spec, markevery=every, **_style(index, spec))
        for ax, label in zip(axes, labels.values(), strict=True):
            ax.set_title(situation, fontsize="medium")
            ax.set_xlabel(label)
            ax.set_ylabel("accuracy" if result["higher_is_better"] else "loss")
            if result["higher_is_better"]:
                ax.set_ylim(bottom=max(0.0, _final(result, situation) - 0.15))
            else:
                ax.set_ylim(top=_final(result, situation) * 1.3)
    rows[0][0].legend(fontsize="x-small")
    figure.savefig(path, dpi=_DPI // 2)


def _final(result: Result, situation: str) -> float:
    """Returns the final quality of all-reduce, which is the first row of a situation."""
    rows = (row for row in result["summary"] if row["situation"] == situation)
    return float(next(row["value"] for row in rows))
