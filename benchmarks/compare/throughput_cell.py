"""What each rank does for one cell of `throughput`: one fit, or the check of the link."""

from __future__ import annotations

import statistics
import time
from typing import Any, Final

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.compare import contestants
from benchmarks.compare.throughput import LINK_CHECK
from lightning_dsgd.lab.callbacks import StragglerInjector
from lightning_dsgd.lab.jobs.cells import Cell
from lightning_dsgd.lab.jobs.fit import Clock, Sleeper
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
