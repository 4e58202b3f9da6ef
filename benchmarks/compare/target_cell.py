"""One cell of `benchmarks target`: a strategy trains a task in the simulated world.

Each rank computes real gradients; only time and the network are simulated.  The quality is that of
the mean of all ranks' weights, as they are at a moment of the virtual time: looking costs nothing.

With epochs all ranks stand still after each, as Lightning does: they settle, make the consensus and
validate it.  Batches are dealt equally, or claimed: a rank takes the epoch's next batch while there
is one, so all ranks together train on each batch once, each on as many as it has time for.  The
learning rate follows what all have claimed (`lab/epochs.py`).

At the end what a strategy has held back of the gradients is applied, as a replica does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.compare.situations import SITUATIONS, Situation
from benchmarks.compare.small_tasks import BATCH, TASKS, Networks, Task
from lightning_dsgd.algorithm import Conditions
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.lab.epochs import EQUAL, Epochs
from lightning_dsgd.lab.jobs.cells import Cell
from lightning_dsgd.lab.simulate.model import passes
from lightning_dsgd.lab.simulate.processors import on_one_core
from lightning_dsgd.primitives import step_scaling
from lightning_dsgd.replica.held_back import apply_held_back, unclipped
from lightning_dsgd.simulated import SimulatedWorld

LATENCY_S: Final = 1e-3


def run(cell: Cell, settings: dict[str, Any]) -> Cell:
    """Trains, and returns the quality over virtual seconds, steps of a rank and MB sent by it."""
    task, situation = TASKS[settings["task"]], SITUATIONS[cell["situation"]]
    training = Training(task, situation, cell, settings)
    return training.curve | figures(training, train(training))


def train(training: Training) -> list[float]:
    """Trains all ranks of a run; returns the steps per second of each."""
    situation = training.situation
    bandwidth = bandwidth_bytes_s(training.x[0], situation)
    # The fastest ranks wait at the end for as long as the slowest one is behind.
    world = SimulatedWorld(situation.ranks, LATENCY_S, bandwidth, timeout_s=math.inf)
    with on_one_core():
        rates: list[float] = world.run(training.run)
    return rates


def figures(training: Training, rates: Sequence[float]) -> dict[str, float]:
    """Returns the job's steps per second, the mean of the ranks' own, and the slowest rank's.

    The job has made a step once all ranks together have trained on as many batches as there are
    ranks.
    """
    return {
        "job_steps_per_s": training.num_steps / training.curve["seconds"][-1],
        "steps_per_s": sum(rates) / len(rates),
        "slowest_steps_per_s": min(rates),
    }


def bandwidth_bytes_s(x: Tensor, situation: Situation) -> float:
    """Returns the bandwidth of a rank's link: an all-reduce sends 2 |x| (P-1)/P."""
    return 2 * x.nbytes * (situation.ranks - 1) / situation.ranks / situation.allreduce_s


class Training:
    """Trains all ranks of one simulated run.

    Ranks take turns, and only the one whose turn it is touches this.  A gradient is computed when
    the first rank has finished a computation: for all ranks that are computing, in one call.

    Args:
        task: what is trained
        situation: what slows the ranks down
        cell: the strategy, its learning rate, the seed, for how many times the steps it trains, and
            how batches are dealt
        settings: the steps of every rank, with the schedule of the learning rate over them, and the
            steps of an epoch with the seconds of a validation, if there are epochs
    """

    def __init__(
        self, task: Task, situation: Situation, cell: Cell, settings: dict[str, Any]
    ) -> None:
        self.task = task
        self.situation = situation
        self.lr: float = cell["lr"]
        self.seed: int = cell["seed"]
        num_steps: int = round(settings["steps"] * cell.get("stretch", 1.0))
        self.num_steps = num_steps
        self.validation_s: float = settings.get("validation_s", 0.0)
        self.epochs = Epochs(
            num_steps, situation.ranks, settings.get("epoch_steps"), cell.get("data", EQUAL)
        )
        self.algorithms = [make_algorithm(cell["strategy"]) for _ in range(situation.ranks)]
        torch.manual_seed(self.seed)
        self.networks = Networks(task, situation.ranks)
        self.inputs, self.targets, *self.held_out = _examples(task, self.seed)
        self.x = self.networks.weights().repeat(situation.ranks, 1)  # after each rank's last step
        self.g = torch.zeros_like(self.x)
        self.computing: dict[int, Tensor] = {}  # which examples, by rank
        self.num_done = 0
        self.every = max(1, num_steps // 60) * situation.ranks
        self.bytes_sent = [0] * situation.ranks
        self.curve: dict[str, list[float]] = {"seconds": [], "step": [], "mb_sent": [], "value": []}

    def run(self, net: Any) -> float:
        """Trains one rank; returns its steps per second."""
        rank = net.rank
        algorithm = self.algorithms[rank]
        weights, g = torch.nn.Parameter(self.x[rank].clone()), torch.zeros_like(self.x[rank])
        x = weights.detach()  # the same memory
        optimizer = self.task.optimizer([weights], self.lr)
        draw = torch.Generator().manual_seed(1000 * self.seed + rank)
        num_own = 0
        weights.grad = g
        with torch.no_grad():
            claims = self.epochs.is_claimed
            conditions = Conditions(
                claims_batches=claims,
                optimizer=optimizer,
                parameters_in=lambda flat: [(weights, flat)],
            )
            algorithm.start(net, x, conditions)
            scaling = step_scaling.made_for(algorithm, net.sub("steps"), x)
            for batch in self.epochs.batches(rank):
                if batch is None:
                    algorithm.settle(x)
                    scaling.settle()
                    algorithm.consensus(x)
                    self.compute(net, self.validation_s)
                    self.end_pass()
                    continue
                self.computing[rank] = self.examples(batch, rank, draw)
                seconds = self.situation.step_s(self.seed, num_own, rank)
                for place, (pass_s, begin) in enumerate(passes(algorithm, len(g), seconds)):
                    self.compute(net, pass_s)
                    if not place:
                        g.copy_(self.gradient(rank))
                    self.end_pass()
                    if algorithm.traits.takes_pieces:
                        algorithm.gradient_made(g, begin)
                algorithm.before_update(x, g if algorithm.traits.uses_gradient else g[:0])
                for group in optimizer.param_groups:
                    group["lr"] = self.lr * self.share_of_lr(self.epochs.step_of(batch))
                scaling.update_begins(x)
                optimizer.step()
                scaling.update_ends(x)
                algorithm.after_update(x)
                self.end_step(rank, x, self.now(net), net.counters.bytes_sent)
                num_own += 1
            steps_per_s = num_own / self.now(net)
            algorithm.settle(x)
            scaling.settle()
            settled_s = self.now(net)
            own = SimpleNamespace(g=g, scatter=partial(setattr, weights, "grad", g))
            part: Any = SimpleNamespace(x=x, algorithm=algorithm, weights=own)
            apply_held_back(optimizer, [part], unclipped)
            algorithm.finish(x)
            self.end_step(rank, x, settled_s, net.counters.bytes_sent)
        return float(steps_per_s)

    def examples(self, batch: int, rank: int, draw: torch.Generator) -> Tensor:
        """Returns the places of a batch's examples; an epoch's are the same for all strategies."""
        size = len(self.x)
        if self.epochs.epoch_steps is None:
            mine = torch.arange(rank, len(self.inputs), size)
            return mine[torch.randint(len(mine), (BATCH,), generator=draw)]
        step, place = divmod(batch, size)
        begin = step - step % self.epochs.epoch_steps
        num = min(self.epochs.epoch_steps, self.num_steps - begin)
        return _epoch(len(self.inputs), self.seed, begin, num, size)[step - begin, place]

    def compute(self, net: Any, seconds: float) -> None:
        """Lets the time of a step's computation pass."""
        net.compute(seconds)

    def end_pass(self) -> None:
        """Waits until that time has passed."""

    def now(self, net: Any) -> float:
        """Returns the time since the beginning, where a step takes a second."""
        return float(net.now())

    def end_step(self, rank: int, x: Tensor, now: float, bytes_sent: int) -> None:
        """Counts a rank's step, or its end; adds a point to the curve after every so many."""
        self.x[rank].copy_(x)
        self.bytes_sent[rank] = bytes_sent
        self.num_done += 1
        num_all = (self.num_steps + 1) * len(self.x)
        if self.num_done == num_all or (
            self.num_done % self.every == 0 and self.num_done <= self.num_steps * len(self.x)
        ):
            self.look(now)

    def gradient(self, rank: int) -> Tensor:
        """Returns the gradient at the weights after the rank's last step."""
        if rank in self.computing:
            ranks = list(self.computing)
            examples = torch.stack(list(self.computing.values()))
            batches = self.inputs[examples], self.targets[examples]
            self.g[ranks] = self.networks.gradients(self.x[ranks], ranks, batches)
            self.computing.clear()
        return self.g[rank]

    def share_of_lr(self, step: int) -> float:
        """Returns the learning rate's factor, as the task has it."""
        return self.task.share_of_lr(step, self.num_steps)

    def look(self, seconds: float) -> None:
        """Adds a point to the curve."""
        num_ranks = len(self.x)
        self.curve["seconds"].append(round(seconds, 2))
        self.curve["step"].append(round(min(self.num_done / num_ranks, self.num_steps), 2))
        self.curve["mb_sent"].append(round(sum(self.bytes_sent) / num_ranks / 1e6, 4))
        value = self.networks.quality(self.x.mean(0), *self.held_out)
        self.curve["value"].append(round(value, 5))


@lru_cache(maxsize=2)
def _epoch(num_examples: int, seed: int, begin: int, num_steps: int, num_ranks: int) -> Tensor:
    """Returns the examples of each batch of an epoch: [step, place, example]."""
    draw = torch.Generator().manual_seed(1000 * seed + begin)
    return torch.randint(num_examples, (num_steps, num_ranks, BATCH), generator=draw)


@cache
def _examples(task: Task, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return task.examples(seed)
