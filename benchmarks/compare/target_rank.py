"""One cell of `benchmarks target --real-ms`: the training of `target_cell`, between real processes.

A step of so many milliseconds is one second of the curve, and computation is a sleep, but for the
few milliseconds that the gradient takes; network and algorithm take what they take.  Each rank
notes its weights after each step.  When all have finished, rank 0 puts the notes in the order of
their times, and looks at the mean of all ranks' weights where the simulation does.

Weights are padded with zeros, which no gradient moves, until an all-reduce over the emulated link
takes as long as the situation says: a link is slow only to messages that are longer than the burst
which it lets through at once.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.compare.situations import SITUATIONS, Situation
from benchmarks.compare.small_tasks import TASKS, Task
from benchmarks.compare.target_cell import Training, bandwidth_bytes_s
from lightning_dsgd.agreement import everyones
from lightning_dsgd.lab.jobs.cells import Cell
from lightning_dsgd.lab.link import Link
from lightning_dsgd.transport.process_group import ProcessGroupTransport

LEAST_BYTES_S: Final = 5e6
"""The least rate of a link; slower links are made up for by more weights."""


def run(cell: Cell, settings: dict[str, Any]) -> Cell:
    """Trains on this rank; returns its steps per second, and on rank 0 the curve."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    net = ProcessGroupTransport()
    training = _RealTraining(settings, cell)
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(everyones(net, folder)[0])
        net.barrier().wait()
        training.begin_s = time.monotonic()
        rate = training.run(net)
        training.write_notes(shared, net.rank)
        net.barrier().wait()
        if net.rank == 0:
            training.look_back(shared)
        net.barrier().wait()
    net.close()
    return {"steps_per_s": rate} | (training.curve if net.rank == 0 else {})


def link_of(situation: Situation, settings: dict[str, Any]) -> Link:
    """Returns the link that connects a rank to the others."""
    x = torch.zeros(num_weights(situation, settings))
    return Link(8 * bandwidth_bytes_s(x, situation) / settings["step_s"])


def num_weights(situation: Situation, settings: dict[str, Any]) -> int:
    """Returns the number of weights, with those that only fill up the messages."""
    own = sum(p.numel() for p in TASKS[settings["task"]].make().parameters())
    least_s = situation.allreduce_s * settings["step_s"]
    sent = 2 * (situation.ranks - 1) / situation.ranks
    return max(own, int(LEAST_BYTES_S * least_s / sent / 4))


class _RealTraining(Training):
    """Trains on this rank, which learns the others' weights in `look_back`."""

    def __init__(self, settings: dict[str, Any], cell: Cell) -> None:
        task, situation = TASKS[settings["task"]], SITUATIONS[cell["situation"]]
        super().__init__(task, situation, cell, settings)
        self.num_own = self.x.shape[1]
        padding = num_weights(situation, settings) - self.num_own
        self.x = torch.nn.functional.pad(self.x, (0, padding))
        self.g = torch.zeros_like(self.x)
        self.step_s: float = settings["step_s"]
        self.begin_s = self.ends_s = 0.0
        self.notes: list[tuple[float, int, Tensor]] = []

    def compute(self, net: Any, seconds: float) -> None:
        self.ends_s = time.monotonic() + seconds * self.step_s

    def gradient(self, rank: int) -> Tensor:
        examples = self.computing.pop(rank)[None]
        batches = self.inputs[examples], self.targets[examples]
        own = self.x[rank, : self.num_own][None]
        self.g[rank, : self.num_own] = self.networks.gradients(own, [rank], batches)[0]
        return self.g[rank]

    def end_pass(self) -> None:
        time.sleep(max(0.0, self.ends_s - time.monotonic()))

    def now(self, net: Any) -> float:
        return (time.monotonic() - self.begin_s) / self.step_s

    def end_step(self, rank: int, x: Tensor, now: float, bytes_sent: int) -> None:
        self.x[rank].copy_(x)
        self.notes.append((now, bytes_sent, x[: self.num_own].clone()))

    def write_notes(self, folder: Path, rank: int) -> None:
        """Writes this rank's notes, which rank 0 reads."""
        times, sent, xs = zip(*self.notes, strict=True)
        notes = {"times": list(times), "sent": list(sent), "x": torch.stack(xs)}
        torch.save(notes, folder / f"{rank}.pt")

    def look_back(self, folder: Path) -> None:
        """Makes the curve from all ranks' notes."""
        ranks = range(self.situation.ranks)
        notes = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in ranks]
        self.x = self.x[:, : self.num_own].clone()
        events = [(now, rank, k) for rank in ranks for k, now in enumerate(notes[rank]["times"])]
        for now, rank, k in sorted(events):
            super().end_step(rank, notes[rank]["x"][k], now, notes[rank]["sent"][k])


def refuse(task: Task) -> None:
    """Raises for a network with statistics, of which a rank knows only its own."""
    if any(True for _ in task.make().buffers()):
        raise ValueError(
            "--real-ms needs a network without BatchNorm, got --task resnet; use --task digits"
        )
