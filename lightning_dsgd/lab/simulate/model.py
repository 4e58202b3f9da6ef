"""A training run on a machine that is not here: the algorithms on a virtual clock.

The algorithms are the package's own, on `simulated`: every message is sent, in the same
order as on a real network, and takes latency + bytes / bandwidth of links that carry one message at
a time.  Weights and gradients are small tensors that stand for large ones: messages of weights,
gradients and selected entries count for as many bytes as those of the large ones; control messages
count for what they are.  Collectives are the package's own too, so their time follows from that of
their messages.

With `Machine.costs` sending, adding and unpacking take processor time, for which the ranks of a
machine compete.  The learning rate, which a growing period follows, falls as a cosine.  Not
simulated: other costs of a step (`Machine.compute_s` includes them), and links inside the network.

Legend: P ranks, n elements of the stand-in, k selected ones.
"""

from __future__ import annotations

import copy
import math
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from lightning_dsgd.algorithm import Algorithm, Conditions
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.algorithms.allreduce import AllReduce
from lightning_dsgd.algorithms.oktopk import OkTopk
from lightning_dsgd.algorithms.sparse_baselines import GaussianTopk, GTopk
from lightning_dsgd.lab import epochs
from lightning_dsgd.lab.epochs import EQUAL, Epochs
from lightning_dsgd.lab.simulate.machines import Machine
from lightning_dsgd.lab.simulate.processors import SharedProcessors, on_one_core
from lightning_dsgd.lab.timeline.recorder import Recorder
from lightning_dsgd.primitives import rounding, step_scaling
from lightning_dsgd.primitives.error_feedback import ErrorFeedback, evenly
from lightning_dsgd.primitives.periodic import PeriodicAverage
from lightning_dsgd.simulated import SimulatedTransport, SimulatedWorld
from lightning_dsgd.simulated.baton import Baton
from lightning_dsgd.simulated.links import Processors
from lightning_dsgd.transport.counters import exchanging

LEAST_ELEMENTS: Final = 256
"""Elements of a stand-in: so few that they cost nothing, and at least one for each rank."""
LEAST_SPARSE_ELEMENTS: Final = 1 << 14
PER_REGION: Final = 4
"""How many selected entries of a sparse stand-in there are for each rank's region."""
BACKWARD: Final = 2 / 3
"""The share of the backward pass in a step's computation."""
PIECES: Final = 8
"""The number of pieces of the gradient that a backward pass makes, one after the other."""
MODEL_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


@dataclass(frozen=True)
class Run:
    """Holds a simulated run.

    Attributes:
        algorithm: the algorithm as on the command line
        compute_s: what each rank computed in each step: [rank, step]
        done_s: when each rank had done each step, from the start of the run
        bytes_sent: per rank and step, on average
        num_own: the number of steps of each rank; where they differ, the rows of `compute_s` end
            with zeros, and those of `done_s` repeat their last step
    """

    algorithm: str
    compute_s: Tensor
    done_s: Tensor
    bytes_sent: float
    num_own: Tensor

    @property
    def num_steps(self) -> float:
        """The number of steps of each rank, in the mean."""
        return float(self.num_own.mean())

    @property
    def steps_per_s(self) -> float:
        """The mean of the ranks' steps per second."""
        return float((self.num_own / self.done_s[:, -1]).mean())

    @property
    def slowest_steps_per_s(self) -> float:
        """Steps per second until the slowest rank's last step, as in `benchmarks throughput`.

        It is the job's rate: as many batches as there are ranks, on whichever rank.
        """
        return self.num_steps / float(self.done_s[:, -1].max())

    @property
    def ideal_steps_per_s(self) -> float:
        """Steps per second if nobody waited for anything."""
        return float((self.num_own / self.compute_s.sum(1)).mean())


def run(
    spec: str,
    world_size: int,
    machine: Machine,
    num_steps: int,
    seed: int = 0,
    trace: Path | None = None,
    on_step: Callable[[], object] = lambda: None,
    epoch_steps: int | None = None,
    data: str = EQUAL,
) -> Run:
    """Simulates one algorithm.

    Args:
        spec: the algorithm's name and hyperparameters, as in `wagma:overlap=true`
        world_size: P
        machine: the machine and what trains on it
        num_steps: the number of steps of each rank
        seed: the seed of the step times and of the stragglers
        trace: a folder for what each rank did, as `StepTrace` records it
        on_step: is called after each step of each rank, to show how far the run is
        epoch_steps: the steps of an epoch, after which all ranks stand still; None: never
        data: how an epoch's batches are dealt, "equal" or "claimed"

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
    epochs.check(epoch_steps, data, lockstep=algorithm.traits.lockstep)
    dealt = Epochs(num_steps, world_size, epoch_steps, data)
    compute_s = machine.step_times(world_size, num_steps, seed)
    num_elements = stand_in(algorithm, world_size, machine.num_params)
    world = SimulatedWorld(
        world_size,
        machine.latency_s,
        machine.bandwidth_bytes_s,
        machine.shared_link,
        timeout_s=math.inf,
        message_bytes=message_bytes(machine.num_params / num_elements),
        strict=False,  # nobody receives what is under way when all have made their steps
        processors=_processors(machine),
    )
    own_s = selection_s(algorithm, machine, world_size)
    core_s = own_s / 2, own_s / 2 + machine.step_core_s
    record = None
    if trace is not None:
        shared = _of_this_run() | ({} if epoch_steps is None else {"epoch_steps": epoch_steps})
        record = partial(_recorder, trace, algorithm, shared)
    with on_one_core():
        work = algorithm, num_elements, dealt, compute_s, core_s, record, on_step
        ranks = world.run(_run_rank, *work)
    num_own = [len(done_s) for done_s, _ in ranks]
    most = max(num_own)
    computed = [
        [_cyclic(of_rank, step) if step < num else 0.0 for step in range(most)]
        for of_rank, num in zip(compute_s, num_own, strict=True)
    ]
    done = [done_s + done_s[-1:] * (most - len(done_s)) for done_s, _ in ranks]
    return Run(
        spec,
        torch.tensor(computed, dtype=torch.float64),
        torch.tensor(done, dtype=torch.float64),
        statistics.mean(num_bytes for _, num_bytes in ranks) / num_steps,
        torch.tensor(num_own, dtype=torch.float64),
    )


def _cyclic(of_rank: Sequence[float], step: int) -> float:
    """Returns the time of a rank's step; one that makes more than its share has them again."""
    return of_rank[step % len(of_rank)]


def _run_rank(
    net: SimulatedTransport,
    pattern: Algorithm,
    num_elements: int,
    dealt: Epochs,
    compute_s: list[list[float]],
    core_s: tuple[float, float],
    record: Callable[[SimulatedTransport], Recorder] | None,
    on_step: Callable[[], object],
) -> tuple[list[float], float]:
    """Returns when this rank had done each step, and the bytes that it sent for them."""
    algorithm, x = copy.copy(pattern), torch.zeros(num_elements)
    source = torch.Generator().manual_seed(net.rank)
    # Ranks move apart: what is sent may depend on how far, as with popsgd's one byte per weight.
    update = torch.randn(num_elements, generator=torch.Generator().manual_seed(net.rank))
    rate: Any = SimpleNamespace(param_groups=[{"lr": 1.0}])
    algorithm.start(net, x, Conditions(claims_batches=dealt.is_claimed, optimizer=rate))
    scaling = step_scaling.made_for(algorithm, net.sub("steps"), x)
    net.barrier().wait()
    begin_s, before = net.now(), net.counters.bytes_sent
    recorder = None if record is None else record(net)
    net.counters.watch = recorder
    done_s: list[float] = []
    for batch in dealt.batches(net.rank):
        if batch is None:
            with exchanging(recorder, net.now):
                algorithm.settle(x)
                scaling.settle()
            continue
        seconds = _cyclic(compute_s[net.rank], len(done_s))
        done = dealt.step_of(batch) / dealt.num_steps
        rate.param_groups[0]["lr"] = (1 + math.cos(math.pi * done)) / 2
        g = x[:0]
        if isinstance(algorithm, ErrorFeedback):  # which entries are large decides what is sent
            g = torch.randn(num_elements, generator=source)
        elif algorithm.traits.uses_gradient:
            g = torch.zeros(num_elements)
        for pass_s, begin in passes(algorithm, num_elements, seconds):
            net.compute(pass_s)
            if algorithm.traits.takes_pieces:
                algorithm.gradient_made(g, begin)
        with exchanging(recorder, net.now):
            # A gradient is selected before its exchange, and put in its place behind it, where the
            # optimizer works too.
            net.work(core_s[0])
            algorithm.before_update(x, g if algorithm.traits.uses_gradient else x[:0])
            net.work(core_s[1])
            scaling.update_begins(x)
            if len(g) and not algorithm.traits.uses_gradient:
                x -= g  # the algorithm looks at what local steps have changed
            elif algorithm.traits.averages_weights:
                x += update
            scaling.update_ends(x)
            algorithm.after_update(x)
        done_s.append(net.now() - begin_s)
        if recorder is not None:
            recorder.end_step(len(done_s))
        on_step()
    sent = net.counters.bytes_sent - before
    if recorder is not None:
        recorder.close("the simulation has ended")
    net.counters.watch = None
    algorithm.settle(x)  # serves those that still make steps
    scaling.settle()
    algorithm.stop()
    return done_s, sent


def passes(algorithm: Algorithm, num_elements: int, seconds: float) -> list[tuple[float, int]]:
    """Returns how a step's computation is divided, for an algorithm that takes pieces.

    The backward pass takes two thirds of the time, and makes equal pieces of the gradient.

    Returns:
        Seconds, and the element from which on the gradient is there after these.
    """
    if not algorithm.traits.takes_pieces:
        return [(seconds, 0)]
    piece_s, begins = BACKWARD * seconds / PIECES, evenly(num_elements, PIECES)[-2::-1]
    first_s = seconds - piece_s * (PIECES - 1)
    return [(piece_s if place else first_s, begin) for place, begin in enumerate(begins)]


def _processors(machine: Machine) -> Callable[[Baton], Processors]:
    return Processors if machine.costs is None else partial(SharedProcessors, machine.costs)


def _of_this_run() -> dict[str, Any]:
    """Returns what the traces of all ranks have in common."""
    return {"run": secrets.token_hex(8), "began_unix_s": time.time(), "simulated": True}


def _recorder(
    folder: Path, algorithm: Algorithm, shared: dict[str, Any], net: SimulatedTransport
) -> Recorder:
    options = {name: str(value) for name, value in algorithm.hyperparameters().items()}
    about = {**shared, "strategy": algorithm.name, "hyperparameters": options, "waits": "by rank"}
    return Recorder(folder, net.rank, net.world_size, net.now, about=about)


def stand_in(algorithm: Algorithm, world_size: int, num_params: int) -> int:
    """Returns how many elements stand for all: each rank has equally many in collectives.

    With a sparse algorithm, some are selected in each rank's region; rounded sums need a whole
    block for each rank.
    """
    least, per_region = LEAST_ELEMENTS, PER_REGION
    block = rounding.BLOCKS.get(getattr(algorithm, "wire_dtype", "float32"))
    if block is not None:
        per_region = 8 * block  # the last of these is filled up
        num_pieces = algorithm.num_fragments if isinstance(algorithm, PeriodicAverage) else 1
        if isinstance(algorithm, AllReduce) and algorithm.overlap:
            num_pieces = algorithm.num_buckets
        least = max(least, block * num_pieces * world_size)
    if isinstance(algorithm, ErrorFeedback):
        per_rank = math.ceil(per_region / algorithm.share)
        least = max(LEAST_SPARSE_ELEMENTS, per_rank * world_size)
    return min(num_params, world_size * math.ceil(least / world_size))


def message_bytes(scale: float) -> Callable[[Tensor], float]:
    """Returns what a message counts for where each element stands for `scale` of them.

    Weights and gradients are fp32, or halves or rounded to int8 on the wire; selected entries are
    packed in bytes; integers and fp64 are heads of these, counts, indices of regions, activations,
    push weights.
    """

    def count(x: Tensor) -> float:
        is_data = x.dtype in MODEL_DTYPES or x.dtype == torch.uint8
        return x.nbytes * scale if is_data else x.nbytes

    return count


def selection_s(algorithm: Algorithm, machine: Machine, world_size: int) -> float:
    """Returns how long a rank takes in a step to select its largest entries, on average."""
    if not isinstance(algorithm, ErrorFeedback):
        return 0.0
    n, exact = machine.num_params / algorithm.local_steps, machine.exact_topk_s
    by_threshold = machine.threshold_s
    if isinstance(algorithm, OkTopk):
        return n * (by_threshold + exact / algorithm.threshold_period)
    if isinstance(algorithm, GaussianTopk):
        return 2 * n * by_threshold  # one pass for the mean and the deviation, one to select
    if isinstance(algorithm, GTopk):
        merged = 2 * algorithm.share * n * math.ceil(math.log2(world_size))
        return exact * (n + merged)
    return n * exact
