"""What happens inside WAGMA while it trains: staleness, distance of the ranks, and waiting.

    python benchmarks/wagma_traces.py

A two-layer network on scikit-learn's digits; 8 ranks in the simulated world, groups of 4, a global
average every 10 steps; 400 ms of computation per step, two random ranks 320 ms late in each,
messages of 1M parameters over links of 10 Gbit/s.  Three panels:

1. how many versions old the contributions to group averages were;
2. the distance of the ranks from their mean, over its norm, after each step;
3. how long training threads were held up in a step, mean over the ranks.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from torch import Tensor, nn

from benchmarks import script, simulated_digits
from benchmarks.ablations import FixedGroups
from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms.local_sgd import LocalSGD
from lightning_dsgd.algorithms.wagma import WAGMA
from lightning_dsgd.lab.callbacks import StragglerInjector
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.simulated import SimulatedWorld

RANKS, PERIOD, COMPUTE_S = 8, 10, 0.4
PARAMS = 1_000_000
FORMS: dict[str, Any] = {
    "wagma, grace_s=0": lambda: WAGMA(4, PERIOD, grace_s=0.0),
    "wagma": lambda: WAGMA(4, PERIOD),
    "wagma, overlap": lambda: WAGMA(4, PERIOD, overlap=True),
    "wagma, fixed groups": lambda: FixedGroups(4, PERIOD),
    "no groups (local SGD)": lambda: LocalSGD(PERIOD),
    "all-reduce": lambda: LocalSGD(1),
}


def run_rank(net: Any, form: str, num_steps: int) -> dict[str, Any]:
    straggler = StragglerInjector(0.32, num_ranks=2)
    algorithm: Algorithm = FORMS[form]()

    def seen(k: int, model: nn.Module, x: Tensor) -> tuple[Tensor, float]:
        return x.detach().clone(), net.counters.wait_s

    def compute_s(k: int, rank: int) -> float:
        late = rank in straggler.delayed_ranks(k, net.world_size)
        return COMPUTE_S + (straggler.delay_s if late else 0.0)

    rows = simulated_digits.train(net, algorithm, num_steps, 0.02, seen, compute_s, 0)
    staleness = dict(getattr(algorithm, "staleness", Counter()))
    return {"x": [x for x, _ in rows], "wait_s": [w for _, w in rows], "staleness": staleness}


def trace(form: str, num_steps: int) -> dict[str, Any]:
    num_weights = 64 * 64 + 64 + 640 + 10
    world = SimulatedWorld(
        RANKS,
        latency_s=1e-4,
        bandwidth_bytes_s=1.25e9,
        size_scale=PARAMS / num_weights,
    )
    ranks = world.run(run_rank, form, num_steps)
    staleness: Counter[int] = Counter()
    for rank in ranks:
        staleness.update(rank["staleness"])
    distances = []
    for step in zip(*(rank["x"] for rank in ranks), strict=True):
        xs = torch.stack(step).double()
        mean = xs.mean(0)
        distances.append(float((xs - mean).square().sum(1).mean().sqrt() / mean.norm()))
    waits = torch.tensor([rank["wait_s"] for rank in ranks]).diff(
        dim=1, prepend=torch.zeros(RANKS, 1)
    )
    return {
        "staleness": {str(k): staleness[k] for k in sorted(staleness)},
        "consensus_distance": distances,
        "wait_s": waits.mean(0).tolist(),
    }


def plot(traces: dict[str, dict[str, Any]], path: Path) -> None:
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (ages, distance, waits) = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    colours = dict(
        zip(traces, ("#56B4E9", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "grey"), strict=True)
    )
    forms = [form for form in traces if traces[form]["staleness"]][:3]
    for index, form in enumerate(forms):
        counts = {int(k): n for k, n in traces[form]["staleness"].items()}
        total = sum(counts.values())
        xs = [k + 0.27 * (index - 1) for k in counts]
        ages.bar(xs, [n / total for n in counts.values()], 0.27, color=colours[form], label=form)
    ages.set(xlabel="versions old", ylabel="share of contributions", title="Staleness")
    for form, values in traces.items():
        if form == "all-reduce":
            continue
        steps = range(1, len(values["consensus_distance"]) + 1)
        distance.plot(steps, values["consensus_distance"], color=colours[form], label=form)
    distance.set(
        xlabel="step", ylabel="distance from the mean / norm", title="Distance of the ranks"
    )
    means = {form: 1e3 * sum(t["wait_s"]) / len(t["wait_s"]) for form, t in traces.items()}
    bars = waits.barh(list(means), list(means.values()), color=[colours[form] for form in means])
    waits.bar_label(bars, fmt="%.0f", padding=3)
    waits.invert_yaxis()
    waits.set(xlabel="ms per step", title="Waiting")
    distance.set_ylim(top=1.35 * distance.get_ylim()[1])  # the legend lies above the curves
    for axes, columns in ((ages, 1), (distance, 2)):
        axes.legend(fontsize="small", loc="upper right", ncols=columns)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = script.parser(__doc__, "docs/results/wagma/wagma_traces.json")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    traces = {form: trace(form, args.steps) for form in FORMS}
    plot(traces, args.output.with_suffix(".png"))
    write_result(provenance() | {"traces": traces}, args.output)


if __name__ == "__main__":
    main()
