"""The papers' scaling figures, drawn again from the simulation, beside what their texts state.

One function per figure.  The results of the figures asked for replace those in the file; plots and
table are of all that are in it.

    python benchmarks/paper_figures.py [--figures wagma_4 ...] [--shrink 4]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
from tqdm import tqdm

from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.lab.simulate.comparison import compare, plot
from lightning_dsgd.lab.simulate.machines import MACHINES

Rows = list[dict[str, Any]]
ROOT = Path(__file__).parents[1]
LOCAL = "local_sgd:sync_period=1"
"""What the WAGMA paper calls local SGD, unless it says otherwise."""


class Figure:
    """What is simulated for a figure, and how it compares with what the paper's text states."""

    def __init__(self, title: str, shrink: int) -> None:
        self.title = title
        self.panels: dict[str, Rows] = {}
        self.asides: list[Rows] = []
        self.comparisons: list[dict[str, Any]] = []
        self._shrink = shrink

    def draw(self, specs: Sequence[str], ranks: Sequence[int], profile: str, steps: int) -> Rows:
        """Simulates a panel, or more points of it."""
        rows = compare(specs, self._shrunk(ranks), profile, MACHINES[profile], steps, seed=0)
        self.panels.setdefault(profile, []).extend(rows)
        return self.panels[profile]

    def aside(
        self, specs: Sequence[str], ranks: int, profile: str, steps: int, **changes: Any
    ) -> Rows:
        """Simulates what is compared, and not drawn."""
        changed = replace(MACHINES[profile], **changes)
        rows = compare(specs, self._shrunk([ranks]), f"{profile} {changes}", changed, steps, 0)
        self.asides.append(rows)
        return rows

    def _shrunk(self, ranks: Sequence[int]) -> list[int]:
        return sorted({max(2, p // self._shrink) for p in ranks})

    def rate(self, rows: Rows, spec: str, ranks: int) -> float:
        """Steps a second."""
        at = spec, *self._shrunk([ranks])
        return next(row["steps_per_s"] for row in rows if (row["algorithm"], row["ranks"]) == at)

    def compare(self, what: str, paper: float, ours: float) -> None:
        self.comparisons.append(
            {"what": what, "paper": paper, "ours": ours, "ours/paper": ours / paper}
        )

    def compare_rates(
        self, rows: Rows, spec: str, others: dict[str, tuple[str, float]], ranks: int, nodes: str
    ) -> None:
        """How much faster `spec` is than others, given as {the paper's name: (spec, factor)}."""
        ours = self.rate(rows, spec, ranks)
        for name, (other, paper) in others.items():
            what = f"{spec.split(':')[0]} / {name}, {ranks:,} {nodes}"
            self.compare(what, paper, ours / self.rate(rows, other, ranks))


def wagma_4(shrink: int) -> Figure:
    figure = Figure("WAGMA-SGD, figure 4: ResNet-50, two ranks per step 320 ms late", shrink)
    sgp = "sgp:num_peers=2"
    others = {
        "local SGD": (LOCAL, 1.25),
        "Allreduce-SGD": ("allreduce", 1.26),
        "D-PSGD": ("dpsgd", 1.23),
        "SGP (2n)": (sgp, 1.25),
        "eager-SGD": ("eager_sgd", 1.13),
    }
    wagma = "wagma:sync_period=10"
    specs = ["allreduce", LOCAL, "dpsgd", sgp, "eager_sgd", wagma, "adpsgd"]
    rows = figure.draw(specs, [4, 16, 64, 256], "piz-daint", 50)
    figure.compare_rates(rows, wagma, others, 64, "nodes")
    slowest = min(figure.rate(rows, spec, 256) for spec, _ in others.values())
    ours = figure.rate(rows, wagma, 256) / slowest
    figure.compare("wagma / the slowest, 256 nodes", 1.37, ours)
    whole = f"{wagma}:group_size={64 // shrink}"
    rows = figure.aside([wagma, whole], 64, "piz-daint", 50)
    figure.compare_rates(rows, wagma, {"wagma with S = 64": (whole, 1.24)}, 64, "nodes")
    rows = figure.aside([wagma, "dpsgd", sgp], 64, "piz-daint", 50, delay_s=0.0)
    for spec, paper in ((wagma, 1.55), ("dpsgd", 1.57), (sgp, 1.51)):
        what = f"{spec}, steps/s, 64 nodes without delays"
        figure.compare(what, paper, figure.rate(rows, spec, 64))
    return figure


def wagma_7(shrink: int) -> Figure:
    figure = Figure("WAGMA-SGD, figure 7: Transformer, sentences of different lengths", shrink)
    wagma, sgp = "wagma:sync_period=8", "sgp:num_peers=2"
    whole = f"{wagma}:group_size={16 // shrink}"
    specs = ["allreduce", LOCAL, "dpsgd", "sgp", sgp, wagma, "adpsgd"]
    rows = figure.draw(specs, [4, 16, 64], "piz-daint-transformer", 48)
    others = {"SGP (2n)": (sgp, 1.48), "AD-PSGD": ("adpsgd", 1.10), "local SGD": (LOCAL, 1.39)}
    figure.compare_rates(rows, wagma, others, 16, "nodes")
    rows = figure.aside([wagma, whole], 16, "piz-daint-transformer", 48)
    figure.compare_rates(rows, wagma, {"wagma with S = 16": (whole, 1.28)}, 16, "nodes")
    return figure


def wagma_10(shrink: int) -> Figure:
    figure = Figure("WAGMA-SGD, figure 10: PPO in Habitat, steps of 1.7 to 43.5 s", shrink)
    wagma, sgp = "wagma:sync_period=8", "sgp:num_peers=4"
    rows = figure.draw(
        [LOCAL, "dpsgd", sgp, wagma, "adpsgd"], [16, 64, 256, 1024], "piz-daint-habitat", 24
    )
    others = {"local SGD": (LOCAL, 2.33), "D-PSGD": ("dpsgd", 1.88), "SGP (4n)": (sgp, 2.10)}
    figure.compare_rates(rows, wagma, others, 1024, "nodes")
    return figure


def oktopk_8(shrink: int) -> Figure:
    figure = Figure("Ok-Topk, figure 8: VGG-16, density 2%", shrink)
    compare_sparse(figure, "piz-daint-vgg", [16, 32], 0.02, 32, (1.51, 8.83))
    return figure


def oktopk_10(shrink: int) -> Figure:
    figure = Figure("Ok-Topk, figure 10: LSTM, density 2%", shrink)
    compare_sparse(figure, "piz-daint-lstm", [32, 64], 0.02, 32, (1.34, 7.71))
    return figure


def oktopk_12(shrink: int) -> Figure:
    figure = Figure("Ok-Topk, figure 12: BERT, density 1%", shrink)
    ranks = [32, 64, 128, 256]
    rows, oktopk = compare_sparse(figure, "piz-daint-bert", ranks, 0.01, 128, (3.29, 12.95))
    first, last = figure.rate(rows, oktopk, 32), figure.rate(rows, oktopk, 256)
    figure.compare("oktopk, efficiency of 256 nodes, with 32 as 100%", 0.763, last / first)
    gaussian = {"Gaussiank": ("gaussian_topk:density=0.01", 1.30)}
    figure.compare_rates(rows, oktopk, gaussian, 32, "nodes")
    figure.compare("oktopk, seconds per step, 32 nodes", 47 * 3600 / 400_000, 1 / first)
    return figure


def compare_sparse(
    figure: Figure,
    profile: str,
    ranks: list[int],
    density: float,
    period: int,
    paper: tuple[float, float],
) -> tuple[Rows, str]:
    """The sparse all-reduces and the dense one, at the largest P."""
    oktopk = f"oktopk:rule=paper:density={density}:threshold_period={period}"
    names = ("topk_allgather", "topk_dsa", "gtopk", "gaussian_topk")
    others = ["allreduce", *(f"{name}:density={density}" for name in names)]
    for p in ranks:
        rows = figure.draw([*others, oktopk], [p], profile, 4 if p < 128 else 2)
    rates = [figure.rate(rows, spec, ranks[-1]) for spec in others]
    ours = figure.rate(rows, oktopk, ranks[-1])
    for which, factor, other in zip(("fastest", "slowest"), paper, (max, min), strict=True):
        what = f"oktopk / the {which} other, {ranks[-1]} nodes"
        figure.compare(what, factor, ours / other(rates))
    return rows, oktopk


def sgp_4b(shrink: int) -> Figure:
    figure = Figure("SGP, figures 4b and B.17: ResNet-50 on DGX-1 servers", shrink)
    specs, ranks = ["allreduce", "dpsgd", "sgp"], [4, 8, 16, 32]
    for profile, efficiency in (("dgx-ethernet", 0.886), ("dgx-infiniband", 0.924)):
        rows = figure.draw(specs, ranks, profile, 40)
        ours = figure.rate(rows, "sgp", 32) / figure.rate(rows, "sgp", 4)
        figure.compare(f"sgp, {profile}, efficiency of 32 nodes, with 4 as 100%", efficiency, ours)
    rows = figure.panels["dgx-ethernet"]
    gap = 1 / figure.rate(rows, "dpsgd", 32) - 1 / figure.rate(rows, "sgp", 32)
    figure.compare("dpsgd - sgp, dgx-ethernet, seconds per step, 32 nodes", 0.2, gap)
    return figure


def hpsgd_5a(shrink: int) -> Figure:
    figure = Figure("HPSGD, figure 5a: ResNet-101 on one DGX station", shrink)
    local = "local_sgd:sync_period=8"
    rows = figure.draw(["allreduce", local, "hpsgd"], [4, 8, 12, 16], "dgx-station", 96)
    for ranks, ssgd, lsgd in ((4, 2.33, 1.0), (16, 3.5, 1.75)):
        others = {"SSGD": ("allreduce", ssgd), "local SGD": (local, lsgd)}
        figure.compare_rates(rows, "hpsgd", others, ranks, "workers")
    return figure


FIGURES: dict[str, Callable[[int], Figure]] = {
    f.__name__: f
    for f in (wagma_4, wagma_7, wagma_10, oktopk_8, oktopk_10, oktopk_12, sgp_4b, hpsgd_5a)
}


def draw(figure: dict[str, Any], path: Path) -> None:
    """The panels of a figure side by side."""
    mpl.use("Agg")
    from matplotlib import pyplot

    panels = figure["panels"]
    drawn, axes = pyplot.subplots(1, len(panels), figsize=(8 * len(panels), 5), squeeze=False)
    for axis, (name, rows) in zip(axes[0], panels.items(), strict=True):
        plot(axis, rows)
        axis.set_title(name if len(panels) > 1 else figure["title"])
    if len(panels) > 1:
        drawn.suptitle(figure["title"])
    drawn.tight_layout()
    drawn.savefig(path, dpi=100)
    pyplot.close(drawn)


def table(figures: dict[str, dict[str, Any]]) -> str:
    """All comparisons, in Markdown."""
    lines = ["| figure | what | paper | simulated | ours/paper |", "|---|---|---|---|---|"]
    for name, figure in figures.items():
        lines += [
            f"| `{name}` | {row['what']} | {row['paper']:.3g} | {row['ours']:.3g} | "
            f"{row['ours/paper']:.2f} |"
            for row in figure["comparisons"]
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--figures", nargs="*", choices=FIGURES, default=list(FIGURES), help="none: draws only"
    )
    parser.add_argument("--shrink", type=int, default=1, help="divides P, to try the script out")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "simulate")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "paper_figures.json"
    figures = json.loads(path.read_text())["figures"] if path.exists() else {}
    for name in tqdm(options.figures, unit="figure"):
        begin = time.perf_counter()
        figure = FIGURES[name](options.shrink)
        figures[name] = {
            "title": figure.title,
            "seconds": round(time.perf_counter() - begin, 1),
            "panels": figure.panels,
            "asides": figure.asides,
            "comparisons": figure.comparisons,
        }
        in_order = {name: figures[name] for name in FIGURES if name in figures}
        write_result(provenance() | {"figures": in_order}, path)
    for name, results in figures.items():
        draw(results, options.output / f"paper_figures_{name}.png")
    print(table({name: figures[name] for name in FIGURES if name in figures}))


if __name__ == "__main__":
    main()
