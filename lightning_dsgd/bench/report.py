"""Tables and plots of result files that `throughput` and `convergence` have written.

    lightning-dsgd bench report throughput_4.json throughput_8.json --output report

Throughput files give one table each, and over all of them steps a second of all ranks together
against the number of ranks, with the ideal line (what `no_sync` would do with ranks that never wait
at the end), and the bytes sent in a step.  A convergence file gives its table, and its values
against seconds and against steps: a line a strategy, the mean over the seeds, with the range.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from lightning_dsgd.bench import convergence, throughput

# Okabe and Ito's colours, which the colour-blind tell apart, and markers for prints in grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#F0E442")
_MARKERS = "osD^vP*Xhd"

Result = dict[str, Any]


def main(argv: list[str] | None = None) -> None:
    """Writes the report."""
    parser = argparse.ArgumentParser(
        prog="lightning-dsgd bench report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--output", type=Path, default=Path("report"), help="a folder")
    args = parser.parse_args(argv)
    try:
        results = [(path, json.loads(path.read_text())) for path in args.files]
    except (OSError, ValueError) as err:
        parser.error(f"a result file must be one that `lightning-dsgd bench` has written: {err}")
    args.output.mkdir(parents=True, exist_ok=True)
    throughputs = [result for _, result in results if _is_throughput(result)]
    sections = [_section(path, result, args.output) for path, result in results]
    if throughputs:
        image = args.output / "throughput.png"
        plot_throughput(throughputs, image)
        sections.insert(0, f"![Throughput]({image.name})")
    report = args.output / "report.md"
    report.write_text("\n\n".join(sections) + "\n")
    print(f"written: {report}")


def _is_throughput(result: Result) -> bool:
    return "steps_per_s" in result["summary"][0]


def _section(path: Path, result: Result, folder: Path) -> str:
    settings, summary = result["settings"], result["summary"]
    lines = [f"## {path.stem}", f"`{result['command']}`"]
    lines += [f"{settings['ranks']} ranks on {result['cores']} cores, {result['network']}."]
    if _is_throughput(result):
        lines.append(throughput.table(summary, summary[0]["strategy"]))
    else:
        percent = "accuracy" in result["monitor"]
        lines.append(convergence.table(summary, percent=percent, target=result["target"]))
        image = folder / f"{path.stem}.png"
        plot_convergence(result, image)
        lines.append(f"![{result['monitor']}]({image.name})")
    return "\n\n".join(lines)


def _axes(columns: int) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=(5.5 * columns, 4.2), layout="constrained")
    for ax in axes:
        ax.grid(alpha=0.3)
    return figure, axes


def _style(index: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "markersize": 5,
    }


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure.savefig(path, dpi=140)
    plt.close(figure)


def plot_throughput(results: list[Result], path: Path) -> None:
    """Steps a second of all ranks together, and bytes a step, against the number of ranks."""
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
        speed.plot(xs, [p * r["steps_per_s"] for p, r in rows], label=spec, **_style(index))
        if all(row["mb_sent_per_step"] is not None for _, row in rows):
            volume.plot(xs, [r["mb_sent_per_step"] for _, r in rows], label=spec, **_style(index))
    for ax in (speed, volume):
        ax.set_xscale("log", base=2)
        ax.set_xticks(ranks, [str(p) for p in ranks])
        ax.set_xlabel("ranks")
        ax.set_ylim(bottom=0)
    speed.set_ylabel("steps a second, all ranks together")
    volume.set_ylabel("MB sent by a rank in a step")
    speed.legend(fontsize="small")
    _save(figure, path)


def ideal_steps_per_s(settings: dict[str, Any]) -> float:
    """Of ranks that never wait: computation, and their share of the delays."""
    delay_s = settings["delay_s"] * settings["delayed_ranks"] / settings["ranks"]
    step_s = settings["compute_s"] + delay_s
    return 1 / step_s if step_s else math.inf


def plot_convergence(result: Result, path: Path) -> None:
    """The value against seconds and against steps."""
    figure, axes = _axes(2)
    for index, spec in enumerate(dict.fromkeys(cell["strategy"] for cell in result["cells"])):
        curves = [cell["rows"] for cell in result["cells"] if cell["strategy"] == spec]
        epochs = list(zip(*curves, strict=True))
        values = [[row["value"] for row in epoch] for epoch in epochs]
        for ax, key in zip(axes, ("seconds", "step"), strict=True):
            xs = [statistics.mean(row[key] for row in epoch) for epoch in epochs]
            style = _style(index)
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
    _save(figure, path)


if __name__ == "__main__":
    main()
