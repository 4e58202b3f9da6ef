"""What trains for the papers' figures of quality: ranks of the simulated world, on small tasks.

The algorithms are the package's own, with `paper=True` where they have it.  What only a paper's
figure needs is a subclass here: SGP's hybrid schedule, Ok-Topk's naive parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from benchmarks import (
    ablations,  # noqa: F401 - registers them
    popsgd_least_squares,
)
from benchmarks.compare.situations import Situation
from benchmarks.compare.small_tasks import TASKS, Task
from benchmarks.compare.target_cell import LATENCY_S, Training
from benchmarks.machines import MACHINES
from benchmarks.oktopk_accuracy import train as watched
from benchmarks.text_pieces import pieces
from lightning_dsgd.algorithms import ALGORITHMS, make_algorithm
from lightning_dsgd.algorithms.oktopk import OkTopk
from lightning_dsgd.algorithms.sgp import SGP
from lightning_dsgd.hyperparameters import one_of, setting
from lightning_dsgd.lab.jobs.cells import Cell
from lightning_dsgd.lab.simulate.model import message_bytes
from lightning_dsgd.lab.simulate.processors import on_one_core
from lightning_dsgd.primitives.error_feedback import Selected, evenly
from lightning_dsgd.primitives.sparse_format import Lot
from lightning_dsgd.replica import flat
from lightning_dsgd.replica.replica import Replica
from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.tasks.control import Episodes, RecurrentPPO
from lightning_dsgd.tasks.language import CausalLanguageModel
from lightning_dsgd.transport import Transport

NUM_LOOKED_AT: Final = 8
"""Ranks whose own weights are evaluated."""


# ---- what is in a paper's figure only ----


@dataclass
class Hybrid(SGP):
    """SGP that averages over all ranks at first: the schedule of SGP's ICML version."""

    name: ClassVar[str] = "sgp_hybrid"
    dense_steps: int = setting(default=0, doc="steps with an average over all ranks")

    def after_update(self, x: Tensor) -> None:
        if self.step >= self.dense_steps:
            super().after_update(x)
            return
        self.net.all_reduce(x).wait()
        x /= self.net.world_size
        self.step += 1


ALGORITHMS[Hybrid.name] = Hybrid


# ---- accuracy ----


class PaperTraining(Training):
    """A training that can have a constant rate, and that looks at single ranks' weights too."""

    def __init__(self, task: Task, setup: Situation, cell: Cell, settings: dict[str, Any]) -> None:
        super().__init__(task, setup, cell, settings)
        self.is_constant: bool = settings["is_constant"]
        self.own_steps = [0] * setup.ranks
        self.own = self.x[:NUM_LOOKED_AT].clone()

    def share_of_lr(self, step: int) -> float:
        return 1.0 if self.is_constant else super().share_of_lr(step)

    def end_step(self, rank: int, x: Tensor, now: float, bytes_sent: int) -> None:
        self.own_steps[rank] += 1
        if self.own_steps[rank] == self.num_steps and rank < NUM_LOOKED_AT:
            self.own[rank].copy_(x)  # before the consensus
        super().end_step(rank, x, now, bytes_sent)


def train(cells: Sequence[Cell]) -> Iterator[Cell]:
    """Trains each cell in one epoch, of batches that are drawn from all examples."""
    for cell in cells:
        task = TASKS[cell["task"]]
        if cell["momentum"] is not None:
            task = replace(task, optimizer=sgd(cell["momentum"], nesterov=cell["nesterov"]))
        setup = Situation("", cell["ranks"], cell["allreduce_s"], cell["late"])
        settings = {"steps": cell["steps"], "epoch_steps": cell["steps"]}
        training = PaperTraining(task, setup, cell, settings | {"is_constant": cell["constant"]})
        num_bytes = 2 * training.x[0].nbytes * (setup.ranks - 1) / setup.ranks
        bandwidth = num_bytes / setup.allreduce_s or math.inf
        with on_one_core():
            SimulatedWorld(setup.ranks, LATENCY_S, bandwidth, timeout_s=math.inf).run(training.run)
        own = [training.networks.quality(x, *training.held_out) for x in training.own]
        yield {
            "quality": training.curve["value"][-1],
            "own": round(sum(own) / len(own), 5),
            "seconds": training.curve["seconds"][-1],
        }


def sgd(momentum: float, *, nesterov: bool) -> Callable[[list[Tensor], float], Any]:
    def made(weights: list[Tensor], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(weights, lr, momentum, nesterov=nesterov)

    return made


# ---- Ok-Topk ----


@dataclass
class Timed(OkTopk):
    """Ok-Topk that counts the seconds of its two phases, with or without their balancing.

    The naive reduce has regions of equal size; the naive gather sends entries from where they are.
    """

    naive: str = one_of("", "reduce", "gather", default="", doc="which of them is not balanced")

    def start(self, net: Transport, x: Tensor, *conditions: Any) -> None:
        super().start(net, x, *conditions)
        self.seconds = {"reduce": 0.0, "repartition": 0.0, "gather": 0.0, "direct": 0.0}
        self.is_triggered = False

    def _count(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        self.net.barrier().wait()
        begin = self.net.now()  # type: ignore[attr-defined]
        result = call(*arguments)
        self.net.barrier().wait()
        self.seconds[name] += self.net.now() - begin  # type: ignore[attr-defined]
        return result

    def space_repartition(self, indices: Tensor) -> list[int]:
        if self.naive == "reduce":
            return evenly(len(self.residual), self.net.world_size)
        found: list[int] = self._count("repartition", super().space_repartition, indices)
        return found

    def split_and_reduce(self, local: Selected, parts: list[Lot]) -> Any:
        return self._count("reduce", super().split_and_reduce, local, parts)

    def balance(self, selected: Selected, sizes: Sequence[int]) -> Any:
        self.is_triggered = True
        if self.naive == "gather":
            return selected, self.announce(*self.measure(selected))
        return self._count("gather", super().balance, selected, sizes)

    def gather(self, selected: Selected, parts: list[Lot], wire_dtype: str) -> Any:
        name = "gather" if self.is_triggered else "direct"
        self.is_triggered = False
        return self._count(name, super().gather, selected, parts, wire_dtype)


def balanced(cells: Sequence[Cell]) -> Iterator[Cell]:
    """Exchanges gradients of a language model with 1.1 million weights, on the links of BERT's."""
    machine, text = MACHINES["piz-daint-bert"], pieces("train", seq_len=32, max_chars=200_000)
    for cell in cells:
        torch.manual_seed(cell["seed"])
        model = CausalLanguageModel(dim=208, depth=2, seq_len=32)
        [weights] = flat.flatten(model.named_parameters())

        def exchange(
            net: Any, cell: Cell = cell, model: Any = model, weights: Any = weights
        ) -> dict[str, float]:
            algorithm = Timed(density=0.01, paper=True, naive=cell["naive"])
            algorithm.start(net, weights.x)
            draw = torch.Generator().manual_seed(1000 * cell["seed"] + net.rank)
            for _ in range(cell["steps"]):
                picked = torch.randint(len(text), (4,), generator=draw)
                model.zero_grad()
                nn.functional.cross_entropy(
                    *model.logits_and_targets(text[picked], None)
                ).backward()
                with torch.no_grad():
                    algorithm.before_update(weights.x, weights.gather())
            return algorithm.seconds

        world = SimulatedWorld(
            cell["ranks"],
            machine.latency_s,
            machine.bandwidth_bytes_s,
            timeout_s=math.inf,
            message_bytes=message_bytes(machine.num_params / len(weights.x)),
        )
        with on_one_core():
            yield world.run(exchange)[0]


def assumption(cells: Sequence[Cell]) -> Iterator[Cell]:
    """The paper's xi, at points of a training by Ok-Topk's rule; digits, or language."""
    for cell in cells:
        settings = {"threshold_period": 32, "batch_size": 16, "xi_every": 20, "seed": cell["seed"]}
        settings["steps"] = cell["steps"]
        world = SimulatedWorld(cell["ranks"], timeout_s=math.inf)
        with on_one_core():
            rows = world.run(watched, cell["task"], cell["density"], settings)[0]
        xi = [row["xi"] for row in rows if "xi" in row]
        later = xi[len(xi) // 2 :]
        yield {"xi": sum(later) / len(later), "largest": max(xi)}


# ---- PopSGD's rate ----


def least_squares(cells: Sequence[Cell]) -> Iterator[Cell]:
    """The squared error of the mean of the models, in the last quarter of the steps."""
    for cell in cells:
        arguments = cell["steps"], cell["lr"], cell["seed"], cell["a"] or math.inf
        descend = partial(popsgd_least_squares.descend, paper=True)
        with on_one_core():
            models = torch.stack(SimulatedWorld(cell["ranks"]).run(descend, *arguments))
        errors = ((models.mean(0) - popsgd_least_squares.BEST) ** 2).sum(1)
        yield {"error": float(errors[-cell["steps"] // 4 :].mean())}


# ---- PPO ----


class Player(RecurrentPPO):
    """A rank that collects episodes in virtual time: 0.1 s for each step of the longest."""

    def begin(self, net: Any, strategy: str) -> None:
        self.net = net
        self.inner = torch.optim.Adam(self.parameters(), 3e-3)
        self.replica = Replica(net, self, [self.inner], make_algorithm(strategy))
        self.num_steps = 0
        self.returns: list[tuple[float, float]] = []

    @property
    def trainer(self) -> Any:
        return SimpleNamespace(global_step=self.num_steps, world_size=self.net.world_size)

    @property
    def global_rank(self) -> int:
        return int(self.net.rank)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def optimizers(self, *_: Any) -> Any:
        return self

    def lr_schedulers(self) -> None:
        return None

    def manual_backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
        loss.backward()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def clip_gradients(self, _: Any, most: float, *__: Any) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_(self.parameters(), most)

    def step(self) -> None:
        """Steps, as the optimizer that `training_step` is given."""
        self.replica.before_update(self.inner)
        self.inner.step()
        self.replica.after_update(self.inner)
        self.num_steps += 1

    def collect(self, num_episodes: int, seed: int, *, greedy: bool = False) -> Episodes:
        episodes = super().collect(num_episodes, seed, greedy=greedy)
        if not greedy:
            self.net.compute(0.1 * episodes.running.shape[1])
            self.returns.append((self.net.now(), float(episodes.rewards.sum(1).mean())))
        return episodes

    def log(self, *_: Any, **__: Any) -> None:
        """What is logged stands in `returns`."""


def play(cells: Sequence[Cell]) -> Iterator[Cell]:
    """The mean return of what all ranks collect, over virtual time."""
    for cell in cells:

        def run(net: Any, cell: Cell = cell) -> list[tuple[float, float]]:
            with torch.random.fork_rng():
                torch.manual_seed(cell["seed"])
                player = Player(num_episodes=8, seed=10_000 * cell["seed"])
            player.begin(net, cell["strategy"])
            for update in range(cell["updates"]):
                player.training_step(torch.zeros(0), update)
            player.replica.settle()
            player.replica.finish()
            return player.returns

        world = SimulatedWorld(cell["ranks"], LATENCY_S, 1e8, timeout_s=math.inf)
        with on_one_core():
            ranks = world.run(run)
        yield {"returns": sorted((round(t, 1), r) for rank in ranks for t, r in rank)}
