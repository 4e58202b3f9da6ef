"""What each rank does for one cell of `advise --verify`: one fit, with the recorded steps."""

from __future__ import annotations

import os
import time
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_dsgd.lab.jobs import fit
from lightning_dsgd.lab.jobs.cells import Cell
from lightning_dsgd.lab.jobs.fit import Clock, Sleeper
from lightning_dsgd.lab.jobs.run_cells import rank_of_this_process


class Replayer(Sleeper):
    """Sleeps as long as each recorded step took."""

    def __init__(self, params: int, times: list[float]) -> None:
        super().__init__(params, 0.0)
        self.times = times

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.times[batch_idx % len(self.times)])  # a fast rank claims more
        return self.loss()


def run(cell: Cell, settings: dict[str, Any]) -> dict[str, Any]:
    """Makes one fit of one strategy on this rank."""
    os.environ["OMP_NUM_THREADS"] = "1"
    steps, ranks = settings["steps"], settings["ranks"]
    times = settings["times"][cell["round"]][rank_of_this_process()]
    clock = Clock(steps)
    L.seed_everything(cell["round"], verbose=False)
    strategy = fit.strategy(cell["strategy"])
    trainer = fit.trainer(strategy, ranks, max_steps=steps, max_epochs=-1, callbacks=[clock])
    data = DataLoader(TensorDataset(torch.zeros(steps * ranks, 1)))
    trainer.fit(Replayer(settings["params"], times), data)
    return {"seconds": clock.end - clock.begin, "core_s": clock.core_s}
