"""The plot of the README: steps per second relative to DDP, with stragglers.

    python benchmarks/headline.py docs/results/benchmarks/throughput_8.json \
        docs/results/benchmarks/throughput_16.json --output docs/images/throughput.png

The files are those of `lightning-dsgd bench throughput`; a strategy stands for itself, with the
median of its ratios to `ddp` within a round.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLOURS = ("#0072B2", "#E69F00", "#009E73")
HEIGHT = 0.8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--output", type=Path, default=Path("throughput.png"))
    args = parser.parse_args()
    results = [json.loads(path.read_text()) for path in args.files]
    names = sorted(
        {row["strategy"] for result in results for row in result["summary"]},
        key=lambda name: max(
            row["ratio"]
            for result in results
            for row in result["summary"]
            if row["strategy"] == name
        ),
    )
    figure, axes = plt.subplots(figsize=(7, 0.4 * len(names) + 1.2), layout="constrained")
    thickness = HEIGHT / len(results)
    for index, (result, colour) in enumerate(zip(results, COLOURS, strict=False)):
        rows = {row["strategy"]: row["ratio"] for row in result["summary"]}
        offset = HEIGHT / 2 - (index + 0.5) * thickness
        bars = axes.barh(
            [names.index(name) + offset for name in rows],
            list(rows.values()),
            thickness,
            color=colour,
            label=f"{len(result['cells'][0]['seconds'])} ranks",
        )
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize="small")
    axes.set_yticks(range(len(names)), names)
    axes.axvline(1, color="grey", linestyle="--", linewidth=1)
    axes.set_xlabel("steps per second, relative to ddp")
    axes.set_title("Two random ranks 320 ms late in each step of 400 ms", fontsize="medium")
    axes.margins(x=0.1)
    axes.legend(loc="lower right")
    figure.savefig(args.output, dpi=110)


if __name__ == "__main__":
    main()
