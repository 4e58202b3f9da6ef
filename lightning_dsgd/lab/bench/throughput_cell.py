"""What each rank does for one cell of `bench throughput`: one fit, or the check of the link."""

from __future__ import annotations

import statistics
import time
from typing import Any, Final

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dsgd.devices import port_of
from lightning_dsgd.lab.bench import contestants
from lightning_dsgd.lab.bench.contestants import communication
from lightning_dsgd.lab.bench.throughput import LINK_CHECK
from lightning_dsgd.lab.callbacks import StragglerInjector
from lightning_dsgd.lab.jobs.cells import Cell
from lightning_dsgd.transport.process_group import ProcessGroupTransport

_MOST_CHECKED_PARAMS: Final = 10_000_000
_CHECKED_S: Final = 0.6
"""How long an all-reduce should take that checks the link."""


def run(cell: Cell, settings: dict[str, Any]) -> dict[str, Any]:
    """Makes one fit of one strategy on this rank, or checks the link."""
    if cell["strategy"] == LINK_CHECK:
        return measure_link(settings)
    steps, ranks = settings["steps"], settings["world_size"]
    clock = Clock(steps)
    straggler = StragglerInjector(
        settings["delay_s"], settings["delayed_ranks"], cell["round"], on=settings["delay_on"]
    )
    L.seed_everything(cell["round"], verbose=False)
    trainer = contestants.trainer(
        cell["strategy"],
        ranks,
        device=settings["device"],
        shares_device=settings["shares_device"],
        max_steps=steps,
        max_epochs=-1,
        callbacks=[clock, straggler],
    )
    data = DataLoader(TensorDataset(torch.zeros(steps * ranks, 1)))
    trainer.fit(Sleeper(settings["params"], settings["compute_s"]), data)
    result = {"seconds": clock.end - clock.begin, "finished_s": time.perf_counter() - clock.begin}
    return result | clock.communication_per_step()


class Sleeper(L.LightningModule):
    """Has so many parameters, and a step that takes so long and computes next to nothing.

    Gradients are noise, with other large entries in each step and on each rank.
    """

    def __init__(self, params: int, compute_s: float) -> None:
        super().__init__()
        side = int(params**0.5)  # a matrix, as PowerSGD compresses only those
        self.weight = nn.Parameter(torch.zeros(side, side))
        self.source, self.noise = torch.Generator(), torch.randn(2 * side * side)
        self.compute_s = compute_s

    def on_fit_start(self) -> None:
        self.source.manual_seed(self.global_rank)
        self.noise = self.noise.to(self.device)

    def loss(self) -> Tensor:
        """Returns a loss whose gradient is a piece of the noise."""
        n = self.weight.numel()
        begin = int(torch.randint(n, (1,), generator=self.source))
        return (self.weight * self.noise[begin : begin + n].view_as(self.weight)).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.compute_s)
        return self.loss()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Clock(L.Callback):
    """Notes when the first of so many steps began and the last ended, and what was communicated."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.begin = self.end = 0.0
        self.core_begin_s = self.core_s = 0.0  # of the processor, all threads
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        dist.barrier()
        self.before = communication(trainer)
        self.begin, self.core_begin_s = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.steps:
            port_of(trainer.strategy.root_device).finish()
        self.end, self.core_s = time.perf_counter(), time.process_time() - self.core_begin_s
        if trainer.global_step == self.steps:
            self.after = communication(trainer)

    def communication_per_step(self) -> dict[str, float]:
        """Returns a step's waits and bytes, and the strategy's other figures; may be empty."""
        if not self.after:
            return {}
        waited_s, sent = (self.after[k] - self.before[k] for k in ("wait_s", "bytes_sent"))
        return {
            "wait_s_per_step": waited_s / self.steps,
            "mb_sent_per_step": sent / self.steps / 1e6,
            **{k: v for k, v in self.after.items() if k not in self.before},
        }


def measure_link(settings: dict[str, Any]) -> dict[str, Any]:
    """Measures an all-reduce on the link: it sends 2n(P-1)/P elements in each direction."""
    world_size, link_bit_s = settings["world_size"], settings["link_bit_s"]
    device, shares = settings["device"], settings["shares_device"]
    if not dist.is_initialized():
        # Lightning's own opens the process group, whatever the launcher, and nothing besides.
        ddp = "ddp:process_group_backend=gloo" if shares else "ddp"
        made = contestants.trainer(ddp, world_size, device=device, shares_device=shares)
        made.strategy.setup_environment()
    num_params = _MOST_CHECKED_PARAMS
    if link_bit_s:
        num_params = min(num_params, int(_CHECKED_S * link_bit_s / 64))
    net, x, times = ProcessGroupTransport(), torch.zeros(num_params), []
    for _ in range(4):
        net.barrier().wait()
        begin = time.perf_counter()
        net.all_reduce(x).wait()
        times.append(time.perf_counter() - begin)
    net.barrier().wait()
    net.close()
    sent_bits = 32 * 2 * num_params * (world_size - 1) / world_size
    return {"rate_bit_s": sent_bits / statistics.median(times[1:])}
