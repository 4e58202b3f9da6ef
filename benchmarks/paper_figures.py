"""The papers' figures and tables, made again in the simulated world, beside what their texts state.

One function per figure: of speed, from the papers' machines, or of quality, from small tasks that
are trained (`paper_training.py`).  The results of the figures asked for replace those in the file.

    python benchmarks/paper_figures.py [--figures wagma_4 ...] [--shrink 4]

In figures of quality all strategies are trained with the seeds 0 to 4 and one learning rate: the
one of LRS with which the baseline ends best with the seed 100.  In wagma_5 each has a rate of its
own, of OWN_LRS, by two other seeds.  Their cells are kept in --cells, so that a command that was
interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

import matplotlib as mpl
from tqdm import tqdm

from benchmarks import paper_training
from benchmarks.machines import MACHINES
from benchmarks.simulated_rows import compare, plot
from lightning_dsgd.lab.jobs.cells import Cell, measured
from lightning_dsgd.lab.results import provenance, write_result

Rows = list[dict[str, Any]]
ROOT = Path(__file__).parents[1]
LOCAL = "local_sgd:sync_period=1"
"""What the WAGMA paper calls local SGD, unless it says otherwise."""
TUNING_SEED: Final = 100
SEEDS: Final = (0, 1, 2, 3, 4)
LRS: Final = (0.1, 0.2, 0.4, 0.8)
OWN_LRS: Final = (0.05, 0.1, 0.2, 0.4, 0.8)
OWN_TUNING_SEEDS: Final = (100, 101)
TRAINED: Final = {
    **{"task": "digits", "momentum": None, "nesterov": False, "constant": False},
    **{"allreduce_s": 0.02, "late": 0, "baseline": "allreduce"},
}
"""What is trained where a figure says nothing else."""
FITTED: Final = {
    ("oktopk_12", "oktopk, seconds per step, 32 nodes"),
    ("oktopk_dense", "BERT: oktopk / DenseOvlp, 32 nodes"),
    ("oktopk_dense", "LSTM: oktopk / DenseOvlp, 32 nodes"),
    ("hpsgd_5a", "hpsgd / SSGD, 4 workers"),
}
"""What a profile was derived from: no test of it."""


class Figure:
    """What is simulated for a figure, and how it compares with what the paper's text states."""

    cells: ClassVar[Path] = ROOT / "build" / "paper_figures"

    def __init__(self, title: str, shrink: int) -> None:
        self.title = title
        self.panels: dict[str, Rows] = {}
        self.asides: list[Rows] = []
        self.comparisons: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []
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

    def state(self, what: str, paper: float | str, ours: float) -> None:
        """What the paper states in words, or a figure that is no ratio."""
        if isinstance(paper, float):
            self.compare(what, paper, ours)
        else:
            self.comparisons.append({"what": what, "paper": paper, "ours": ours})

    def measure(self, how: Callable[[Sequence[Cell]], Iterator[Cell]], cells: Rows) -> Rows:
        """Returns the cells with their results; those that are kept are not measured again."""
        found = measured(cells, self.cells / f"{how.__name__}.json", "1", how)
        rows = [cell | result for cell, result in zip(cells, found, strict=True)]
        self.runs += [row for row in rows if row not in self.runs]
        return rows

    def train(
        self, specs: Sequence[str], seeds: Sequence[int] = SEEDS, **cell: Any
    ) -> dict[str, Rows]:
        """Returns the runs of each strategy, at the rate with which the baseline is the best."""
        every = TRAINED | cell | {"ranks": max(1, cell["ranks"] // self._shrink)}
        baseline = every.pop("baseline")
        if "lr" not in every:
            tuning = every | cell.get("tuned", {}) | {"seed": TUNING_SEED, "strategy": baseline}
            tuning.pop("tuned", None)
            tried = self.measure(paper_training.train, [tuning | {"lr": lr} for lr in LRS])
            every["lr"] = max(tried, key=lambda row: float(row["quality"]))["lr"]
        every.pop("tuned", None)
        return self._trained(dict.fromkeys(specs, every), seeds)

    def train_at_own_rates(self, specs: Sequence[str], **cell: Any) -> dict[str, Rows]:
        """Returns the runs of each strategy, at the rate with which it is the best itself."""
        every = TRAINED | cell | {"ranks": max(1, cell["ranks"] // self._shrink)}
        every.pop("baseline")
        at_best = {}
        for spec in specs:
            tried = [
                every | {"strategy": spec, "lr": lr, "seed": seed}
                for lr in OWN_LRS
                for seed in OWN_TUNING_SEEDS
            ]
            total = dict.fromkeys(OWN_LRS, 0.0)
            for row in self.measure(paper_training.train, tried):
                total[row["lr"]] += row["quality"]
            at_best[spec] = every | {"lr": max(total, key=lambda lr: total[lr])}
        return self._trained(at_best, SEEDS)

    def _trained(self, cells: dict[str, Cell], seeds: Sequence[int]) -> dict[str, Rows]:
        every = [cells[spec] | {"strategy": spec, "seed": seed} for seed in seeds for spec in cells]
        rows = self.measure(paper_training.train, every)
        return {spec: [row for row in rows if row["strategy"] == spec] for spec in cells}

    def compare_points(
        self, what: str, paper: float | str, mine: Rows, base: Rows, key: str = "quality"
    ) -> None:
        """How many points of accuracy the runs end above others with the same seeds."""
        points = [100 * (a[key] - b["quality"]) for a, b in zip(mine, base, strict=True)]
        error = statistics.stdev(points) / len(points) ** 0.5 if points[1:] else None
        self.comparisons.append(
            {"what": what, "paper": paper, "ours": statistics.mean(points), "error": error}
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


def oktopk_dense(shrink: int) -> Figure:
    figure = Figure("Ok-Topk, figures 8, 10 and 12: DenseOvlp", shrink)
    dense, density = "allreduce:overlap=true", {"vgg": 0.02, "lstm": 0.02, "bert": 0.01}
    for name, ranks, paper in (("vgg", 32, ">= 1.51"), ("lstm", 32, 1.39), ("bert", 32, 150 / 47)):
        period = 128 if name == "bert" else 32
        oktopk = f"oktopk:rule=paper:density={density[name]}:threshold_period={period}"
        rows = figure.aside([dense, oktopk], ranks, f"piz-daint-{name}", 4)
        ours = figure.rate(rows, oktopk, ranks) / figure.rate(rows, dense, ranks)
        figure.state(f"{name.upper()}: oktopk / DenseOvlp, {ranks} nodes", paper, ours)
    return figure


def wagma_5(shrink: int) -> Figure:
    figure = Figure("WAGMA-SGD, figure 5: accuracy, 64 ranks, two of them late per step", shrink)
    wagma = "wagma:paper=true"
    ablations = {
        "local_sgd:sync_period=10": ("no groups", -6.8),
        "wagma_fixed_groups:paper=true": ("fixed groups", -3.1),
        f"{wagma}:group_size=4": ("S = 4", -2.5),
        f"{wagma}:group_size={64 // shrink}": ("S = 64", "not above"),
    }
    others = {LOCAL: -0.3, wagma: -0.6, "sgp:num_peers=2": -1.1, "dpsgd": "< -1.5", "adpsgd": -5.5}
    specs = ["allreduce", *others, *ablations]
    runs = figure.train_at_own_rates(specs, ranks=64, steps=40, late=2)
    for spec, paper in others.items():
        figure.compare_points(f"{spec} - allreduce", paper, runs[spec], runs["allreduce"])
    for spec, (name, paper) in ablations.items():
        figure.compare_points(f"wagma, {name} - wagma", paper, runs[spec], runs[wagma])
    return figure


def hpsgd_4b(shrink: int) -> Figure:
    figure = Figure("HPSGD, figure 4b: accuracy with 4 and 8 workers, plain SGD", shrink)
    local = "local_sgd:sync_period=8"
    plain = {"momentum": 0.0, "constant": True}
    for ranks in (4, 8):
        more = {"steps": 960 // ranks, "allreduce_s": 1.33 * 4 * (ranks - 1) / (3 * ranks)}
        specs = ["allreduce", "hpsgd:paper=true", "hpsgd", local]
        runs = figure.train(specs, ranks=ranks, **more, **plain)
        for spec in specs[1:]:
            paper = "" if spec == "hpsgd" else "alike" if "hpsgd" in spec else "later"
            what = f"{spec} - SSGD, {ranks} workers"
            figure.compare_points(what, paper, runs[spec], runs["allreduce"])
    return figure


def sgp_4c(shrink: int) -> Figure:
    figure = Figure("SGP, figures 4c and 11: accuracy over nodes, T / n steps", shrink)
    for nodes in (4, 32):
        steps = 960 // nodes
        specs = ["allreduce", "sgp", "sgp:num_peers=2", "sgp:topology=bipartite_exponential"]
        if nodes == 32:
            specs += ["dpsgd", "sgp:overlap=1:paper=true", f"sgp_hybrid:dense_steps={steps // 3}"]
        runs = figure.train(specs, ranks=nodes, steps=steps, momentum=0.9, nesterov=True)
        stated: dict[int, float | str] = {4: "alike", 32: -1.2}
        for spec in specs[1:]:
            paper = stated[nodes] if spec == "sgp" else ""
            figure.compare_points(
                f"{spec} - allreduce, {nodes} nodes", paper, runs[spec], runs["allreduce"]
            )
    return figure


def popsgd_2(shrink: int) -> Figure:
    figure = Figure("PopSGD, figures 2 and 4: one rank's accuracy, mult T / n steps", shrink)
    steps, sequential = 960, {"ranks": 1, "steps": 960}
    [base] = figure.train(["allreduce"], **sequential).values()
    for nodes in (8,):
        same = {"ranks": nodes, "tuned": sequential}
        [runs] = figure.train(["allreduce"], steps=steps // nodes, **same).values()
        figure.compare_points(f"mini-batch SGD - SGD, n = {nodes}", "", runs, base)
        for mult in (1, 2, 4):
            [runs] = figure.train(
                ["popsgd:paper=true"], steps=mult * steps // nodes, **same
            ).values()
            what = f"popsgd - SGD, n = {nodes}, mult = {mult}"
            figure.compare_points(what, ">= 0 at a low mult", runs, base, "own")
    return figure


def popsgd_rate(shrink: int) -> Figure:
    figure = Figure("PopSGD, theorem 4.1: least squares at the rate b / (a + t)", shrink)
    steps = [750, 3000]
    for name, a in (("constant rate", None), ("b / (a + t)", 100.0)):
        errors = []
        for t in steps:
            cell = {"ranks": 8, "steps": t, "lr": 0.02, "a": a}
            cells = [cell | {"seed": seed} for seed in SEEDS]
            rows = figure.measure(paper_training.least_squares, cells)
            errors.append(statistics.mean(row["error"] for row in rows))
        slope = math.log(errors[1] / errors[0]) / math.log(steps[1] / steps[0])
        what = f"{name}: slope of log(error) over log(t), n = 8"
        figure.state(what, "" if a is None else "-1", slope)
    return figure


def oktopk_5(shrink: int) -> Figure:
    figure = Figure("Ok-Topk, figure 5: xi of assumption 1, density 1%", shrink)
    for task, steps in (("digits", 300), ("language", 160)):
        for ranks in (16, 32):
            cells = [
                {"task": task, "ranks": ranks // shrink, "steps": steps, "density": 0.01, "seed": 0}
            ]
            [row] = figure.measure(paper_training.assumption, cells)
            figure.state(f"{task}: xi, {ranks} ranks, second half", "< P", row["xi"])
    return figure


def oktopk_7(shrink: int) -> Figure:
    figure = Figure("Ok-Topk, figure 7: balancing, gradients of a language model", shrink)
    for ranks in (4, 8, 16):
        cells = [
            {"ranks": ranks // shrink, "naive": naive, "steps": 4, "seed": 0}
            for naive in ("", "reduce", "gather")
        ]
        ours, reduce, gather = figure.measure(paper_training.balanced, cells)
        in_all = ours["reduce"] + ours["repartition"] * cells[0]["steps"] / 64
        what = f"naive / balanced, {ranks} ranks"
        figure.state(f"reduce: {what}", "1.13 to 1.75", reduce["reduce"] / in_all)
        if ours["gather"]:
            ratio = gather["gather"] / ours["gather"]
            figure.state(f"all-gather: {what}", "1.12 to 1.43", ratio)
    return figure


def wagma_11(shrink: int) -> Figure:
    figure = Figure("WAGMA-SGD, figure 11: PPO's return over time, T-mazes", shrink)
    wagma = "wagma:paper=true:sync_period=8"
    stated = {wagma: "SPL 0.77", "adpsgd": "SPL 0.05", LOCAL: "below SGP"}
    stated["sgp:num_peers=4"] = "below WAGMA-SGD"
    ranks, updates = 8 // min(shrink, 4), 60
    specs = [LOCAL, "dpsgd", "sgp:num_peers=4", wagma, "adpsgd", "wagma:sync_period=8"]
    cells = [
        {"strategy": spec, "ranks": ranks, "updates": updates, "seed": seed}
        for seed in SEEDS
        for spec in specs
    ]
    rows = figure.measure(paper_training.play, cells)
    ends = [row["returns"][-1][0] for row in rows if row["strategy"] == wagma]
    for spec in specs:
        mine = [row["returns"] for row in rows if row["strategy"] == spec]
        for share in (0.5, 1.0):
            means = []
            for returns, end in zip(mine, ends, strict=True):
                seen = [value for t, value in returns if t <= share * end][-8 * ranks :]
                means.append(statistics.mean(seen))
            when = "half the time" if share < 1 else "the time"
            paper = stated.get(spec, "") if share == 1 else ""
            figure.state(f"{spec}: return after {when} of wagma", paper, statistics.mean(means))
    for row in figure.runs:  # two series instead of hundreds of pairs
        times, values = zip(*row.pop("returns"), strict=True)
        row["seconds"], row["return"] = list(times[::ranks]), list(values[::ranks])
    return figure


FIGURES: dict[str, Callable[[int], Figure]] = {
    f.__name__: f
    for f in (
        *(wagma_4, wagma_5, wagma_7, wagma_10, wagma_11),
        *(oktopk_5, oktopk_7, oktopk_8, oktopk_10, oktopk_12, oktopk_dense),
        *(sgp_4b, sgp_4c, hpsgd_4b, hpsgd_5a, popsgd_2, popsgd_rate),
    )
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--figures", nargs="*", choices=FIGURES, default=list(FIGURES), help="none: draws only"
    )
    parser.add_argument("--shrink", type=int, default=1, help="divides P, to try the script out")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "simulate")
    parser.add_argument("--cells", type=Path, default=Figure.cells, help="of trainings under way")
    options = parser.parse_args()
    Figure.cells = options.cells / str(options.shrink)
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
            "runs": figure.runs,
        }
        in_order = {name: figures[name] for name in FIGURES if name in figures}
        for each, of_it in in_order.items():
            for row in of_it["comparisons"]:
                row |= {"fitted": True} if (each, row["what"]) in FITTED else {}
        write_result(provenance() | {"figures": in_order}, path)
    for name in options.figures or figures:
        results = figures[name]
        if results["panels"]:
            draw(results, options.output / f"paper_figures_{name}.png")
        for row in results["comparisons"]:
            print(name, row)


if __name__ == "__main__":
    main()
