"""What `lightning-dsgd simulate` computes: strategies on a machine that is not here.

The algorithms are the package's own, on `transport.simulated`: every message is sent, in the order
in which the real one would be, and takes latency + bytes / bandwidth of links that carry one
message at a time.  Weights and gradients are small tensors that stand for large ones: messages of
weights, gradients and selected entries count for as many bytes as the large ones would have,
control messages for what they are.  Collectives are the package's own too, so their time follows
from that of their messages.

Not simulated: what a step costs besides (`Profile.compute_s` holds it, and for the sparse
algorithms the selection), the processor's share in sending, and links inside the network.

Legend: P ranks, n elements of the stand-in, k selected ones.
"""

from __future__ import annotations

import copy
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms.oktopk import OkTopk
from lightning_dsgd.algorithms.sparse_baselines import GaussianTopk, GTopk
from lightning_dsgd.bench.contestants import parse
from lightning_dsgd.bench.profiles import Profile
from lightning_dsgd.error_feedback import ErrorFeedback
from lightning_dsgd.strategy import STRATEGIES
from lightning_dsgd.transport.simulated import SimulatedTransport, SimulatedWorld

LEAST_ELEMENTS: Final = 256
"""Of a stand-in: small enough that its contents cost nothing, and one at least for each rank."""
LEAST_SPARSE_ELEMENTS: Final = 1 << 14
PER_REGION: Final = 4
"""How many selected entries of a sparse stand-in there are for each rank's region."""
HEADER_BYTES: Final = 24
"""Of a message of selected entries (`sparse.pack`), whatever their number."""
MODEL_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Run:
    """A simulated run.

    Attributes:
        algorithm: as on the command line
        compute_s: what each rank computed in each step: [rank, step]
        done_s: when each rank had done each step, from the start of the run
        bytes_sent: by a rank, a step, on average
    """

    algorithm: str
    compute_s: Tensor
    done_s: Tensor
    bytes_sent: float

    @property
    def num_steps(self) -> int:
        """Of every rank."""
        return self.done_s.shape[1]

    @property
    def steps_per_s(self) -> float:
        """The mean over the ranks: what all process together, as if all were equally fast."""
        return float((self.num_steps / self.done_s[:, -1]).mean())

    @property
    def slowest_steps_per_s(self) -> float:
        """Until the slowest rank has done its last step, as `bench throughput` measures it."""
        return self.num_steps / float(self.done_s[:, -1].max())

    @property
    def ideal_steps_per_s(self) -> float:
        """If nobody waited for anything."""
        return float((self.num_steps / self.compute_s.sum(1)).mean())


def simulate(
    spec: str, world_size: int, profile: Profile, num_steps: int = 50, seed: int = 0
) -> Run:
    """Runs one algorithm.

    Args:
        spec: its name and hyperparameters, as in `wagma:overlap=true`
        world_size: P
        profile: the machine and the task
        num_steps: of each rank
        seed: of the step times and of the stragglers

    Raises:
        ValueError: for names and hyperparameters that cannot work
    """
    if world_size < 1 or num_steps < 1:
        raise ValueError(
            "the number of ranks and of steps must be at least 1, got "
            f"{world_size} ranks and {num_steps} steps"
        )
    algorithm = make_algorithm(spec)
    algorithm.check(world_size)
    compute_s = profile.step_times(world_size, num_steps, seed)
    num_elements = stand_in(algorithm, world_size, profile.num_params)
    world = SimulatedWorld(
        world_size,
        profile.latency_s,
        profile.bandwidth_bytes_s,
        profile.shared_link,
        timeout_s=math.inf,
        message_bytes=message_bytes(profile.num_params / num_elements),
        strict=False,  # what is under way when all have made their steps is nobody's any more
    )
    select_s = selection_s(algorithm, profile, world_size)
    with _on_one_core():
        ranks = world.run(_run_rank, algorithm, num_elements, compute_s, select_s)
    return Run(
        spec,
        torch.tensor(compute_s, dtype=torch.float64),
        torch.tensor([done_s for done_s, _ in ranks], dtype=torch.float64),
        statistics.mean(num_bytes for _, num_bytes in ranks) / num_steps,
    )


@contextmanager
def _on_one_core() -> Iterator[None]:
    """Only one rank runs at a time, and the baton passes faster within one core."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[os.getpid() % len(before)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _run_rank(
    net: SimulatedTransport,
    pattern: Algorithm,
    num_elements: int,
    compute_s: list[list[float]],
    select_s: float,
) -> tuple[list[float], float]:
    """When this rank had done each step, and the bytes that it sent for them."""
    algorithm, x = copy.copy(pattern), torch.zeros(num_elements)
    source = torch.Generator().manual_seed(net.rank)
    algorithm.start(net, x)
    net.barrier().wait()
    begin_s, before = net.now(), net.counters.bytes_sent
    done_s = []
    for seconds in compute_s[net.rank]:
        g = x[:0]
        if isinstance(algorithm, ErrorFeedback):  # which entries are large decides what is sent
            g = torch.randn(num_elements, generator=source)
        elif algorithm.uses_gradient:
            g = torch.zeros(num_elements)
        net.compute(seconds + select_s)
        algorithm.before_update(x, g)
        algorithm.after_update(x)
        done_s.append(net.now() - begin_s)
    sent = net.counters.bytes_sent - before
    net.sub("end").barrier().wait()  # until here, lanes serve those that still make steps
    algorithm.stop()
    return done_s, sent


def make_algorithm(spec: str) -> Algorithm:
    """The algorithm of a strategy, with hyperparameters."""
    name, options = parse(spec)
    if name not in STRATEGIES:
        raise ValueError(
            f"an algorithm must be one of {', '.join(STRATEGIES)}, "
            f"with hyperparameters as in wagma:overlap=true, got {spec!r}"
        )
    try:
        return STRATEGIES[name](**options).algorithm
    except TypeError as err:
        raise ValueError(f"{spec!r}: {err}; see `lightning-dsgd strategies`") from err


def stand_in(algorithm: Algorithm, world_size: int, num_params: int) -> int:
    """How many elements stand for all: each rank has equally many in collectives.

    With a sparse algorithm, some are selected in each rank's region.
    """
    least = LEAST_ELEMENTS
    if isinstance(algorithm, ErrorFeedback):
        per_rank = math.ceil(PER_REGION / algorithm.density)
        least = max(LEAST_SPARSE_ELEMENTS, per_rank * world_size)
    return min(num_params, world_size * math.ceil(least / world_size))


def message_bytes(scale: float) -> Callable[[Tensor], float]:
    """What messages count for where each element stands for `scale` of them.

    Weights and gradients are fp32, or halves on the wire; selected entries are packed in bytes,
    after a header; integers and fp64 are counts, indices of regions, activations, push weights.
    """

    def count(x: Tensor) -> float:
        if x.dtype in MODEL_DTYPES:
            return x.nbytes * scale
        if x.dtype == torch.uint8 and x.nbytes > HEADER_BYTES:
            return HEADER_BYTES + (x.nbytes - HEADER_BYTES) * scale
        return x.nbytes

    return count


def selection_s(algorithm: Algorithm, profile: Profile, world_size: int) -> float:
    """What a rank computes in a step to select its largest entries, on average."""
    n, exact, by_threshold = profile.num_params, profile.exact_topk_s, profile.threshold_s
    if isinstance(algorithm, OkTopk):
        return n * (by_threshold + exact / algorithm.threshold_period)
    if isinstance(algorithm, GaussianTopk):
        return 2 * n * by_threshold  # one pass for the mean and the deviation, one to select
    if isinstance(algorithm, GTopk):
        merged = 2 * algorithm.density * n * math.ceil(math.log2(world_size))
        return exact * (n + merged)
    return n * exact if isinstance(algorithm, ErrorFeedback) else 0.0


# ---- tables and plots ----


def summarize(run: Run, profile: str, baseline: float | None) -> dict[str, Any]:
    """One row of the table; `baseline`: steps a second of the all-reduce."""
    return {
        "algorithm": run.algorithm,
        "ranks": len(run.done_s),
        "profile": profile,
        "steps_per_s": run.steps_per_s,
        "slowest_steps_per_s": run.slowest_steps_per_s,
        "ideal_steps_per_s": run.ideal_steps_per_s,
        "of_ideal": run.steps_per_s / run.ideal_steps_per_s,
        "ratio": run.steps_per_s / baseline if baseline else None,
        "mb_sent_per_step": run.bytes_sent / 1e6,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """In Markdown."""
    lines = [
        "| algorithm | ranks | steps/s | ideal | of ideal | x allreduce | MB sent a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        lines.append(
            f"| `{row['algorithm']}` | {row['ranks']} | {row['steps_per_s']:.3f} | "
            f"{row['ideal_steps_per_s']:.3f} | {row['of_ideal']:.0%} | {ratio} | "
            f"{row['mb_sent_per_step']:.1f} |"
        )
    return "\n".join(lines)


def plot(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Bars of throughput, a cluster for each P, under what would be ideal there."""
    everyone = sorted({row["ranks"] for row in rows})
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    width = 0.84 / len(names)
    for index, name in enumerate(names):
        mine = {row["ranks"]: row["steps_per_s"] for row in rows if row["algorithm"] == name}
        places = [everyone.index(p) + (index + 0.5) * width - 0.42 for p in mine]
        axes.bar(places, mine.values(), 0.94 * width, label=name, color=f"C{index}")
    for place, p in enumerate(everyone):
        ideal = max(row["ideal_steps_per_s"] for row in rows if row["ranks"] == p)
        label = "ideal" if place == 0 else None
        axes.hlines(ideal, place - 0.45, place + 0.45, "k", "dashed", label=label)
    axes.set_xticks(range(len(everyone)), [f"{p:,}" for p in everyone])
    axes.set(xlabel="ranks", ylabel="steps a second, of each rank")
    axes.set_ylim(0, 1.45 * max(row["ideal_steps_per_s"] for row in rows))
    axes.legend(fontsize="small", ncols=2, loc="upper center")


def run_all(
    specs: Sequence[str], ranks: Sequence[int], name: str, profile: Profile, steps: int, seed: int
) -> list[dict[str, Any]]:
    """All rows; the all-reduce first, where it is among them, as the others are compared to it."""
    for spec in specs:  # before the first of them takes minutes
        for world_size in ranks:
            make_algorithm(spec).check(world_size)
    rows = []
    for world_size in ranks:
        baseline = None
        for spec in sorted(specs, key=lambda spec: spec != "allreduce"):
            begin = time.perf_counter()
            run = simulate(spec, world_size, profile, steps, seed)
            baseline = run.steps_per_s if spec == "allreduce" else baseline
            rows.append(summarize(run, name, baseline))
            took = time.perf_counter() - begin
            print(f"{spec}, {world_size} ranks: {took:.1f} s", file=sys.stderr, flush=True)
    return rows


# ---- the check against real runs ----


def predict(
    spec: str,
    world_size: int,
    profile: Profile,
    num_steps: int,
    rounds: Sequence[int] = (0, 1, 2),
) -> float:
    """Steps a second as `bench throughput` measures them: the median over the rounds.

    A round's index is the seed of its stragglers.  `ddp` is predicted by the all-reduce.
    """
    name = "allreduce" if spec == "ddp" else spec
    return statistics.median(
        simulate(name, world_size, profile, num_steps, seed).slowest_steps_per_s for seed in rounds
    )


def check(report: dict[str, Any]) -> tuple[list[dict[str, Any]], float]:
    """Measured and predicted steps a second of each strategy of a result file.

    What a step takes on this machine besides the sleep is added to the computation: as long as
    `no_sync`, which sends nothing, was slower than its stragglers explain.

    Returns:
        The rows, and that time in seconds.
    """
    try:
        settings = report["settings"]
        network = settings["network"]
        rate = network["rate_bit_s"]
        profile = Profile(
            latency_s=network["latency_s"] or 0.0,
            bandwidth_bytes_s=rate / 8 if rate else math.inf,
            compute_s=settings["compute_s"],
            num_params=int(float(settings["params"])),
            delay_s=settings["delay_s"],
            delayed_ranks=settings["delayed_ranks"],
        )
        world_size, steps = settings["ranks"], settings["steps"]
        rounds = sorted({cell["round"] for cell in report["cells"]})
        measured = {row["strategy"]: row["steps_per_s"] for row in report["summary"]}
    except KeyError as err:
        raise ValueError(
            "a result file must be one of `lightning-dsgd bench throughput` with its settings, "
            f"got one without {err}"
        ) from err
    overhead_s = 0.0
    if "no_sync" in measured:
        bare = predict("no_sync", world_size, profile, steps, rounds)
        overhead_s = max(0.0, 1 / measured["no_sync"] - 1 / bare)
        profile = replace(profile, compute_s=profile.compute_s + overhead_s)
    rows = []
    for spec, steps_per_s in measured.items():
        row: dict[str, Any] = {"strategy": spec, "measured": steps_per_s, "predicted": None}
        if spec == "ddp" or parse(spec)[0] in STRATEGIES:
            row["predicted"] = predict(spec, world_size, profile, steps, rounds)
        rows.append(row)
    return rows, overhead_s


def check_table(rows: Sequence[dict[str, Any]]) -> str:
    """In Markdown."""
    lines = ["| strategy | measured, steps/s | predicted | ratio |", "|---|---|---|---|"]
    for row in rows:
        measured, predicted = row["measured"], row["predicted"]
        figures = f"{predicted:.3f} | {predicted / measured:.2f}" if predicted else "not ours |"
        lines.append(f"| `{row['strategy']}` | {measured:.3f} | {figures} |")
    return "\n".join(lines)
