"""A user's script that `lightning-dsgd launch` starts: trains until it is told to end.

Its arguments: a folder, the strategy (with claimed batches: "popsgd:claimed"; on a device that is
none: "wagma:fake"; recorded by StepTrace: "local_sgd:trace"; with a model of `smooth`:
"balanced:smooth"), the ranks of a node, the nodes; and
how many ranks there may be, and from which checkpoint it goes on.  A rank writes how far it is, and
what it ends with.  Training ends with the epoch in which the file `end` is there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dsgd import StepTrace
from lightning_dsgd.trainer.named import strategy_of
from tests.support.doomed import Doomed, write_whole
from tests.support.fake_device import install, parameters_allowed
from tests.support.fits import accelerator_of
from tests.support.models import loader, trainer

BATCH_S = 0.02


class Steady(Doomed):
    """Takes its time for a batch, tells where it is, and stops all where it is told to.

    Has another parameter where the file `other` is there.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(folder, ())
        if (self.folder / "other").exists():
            self.extra = torch.nn.Linear(3, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(BATCH_S)
        view = self.trainer.strategy.session.ranks.calls.view
        where = {
            "pid": os.getpid(),
            "epoch": self.current_epoch,
            "batch": batch_idx,
            "step": self.global_step,
            "members": view.members,
        }
        write_whole(self.folder / f"at_{os.environ['RANK']}", json.dumps(where))
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        is_told = torch.tensor(float((self.folder / "end").exists()))
        if self.trainer.strategy.reduce(is_told, reduce_op="sum") > 0:
            self.trainer.should_stop = True

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def smooth() -> tuple[torch.nn.Module, Any, Any]:
    """A model in fp64 whose weights hardly follow the rounding of sums; what trains it."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    model = torch.nn.Sequential(*layers).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)


class Smooth(Steady):
    """Trains the model of `smooth`, in fp64."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.net, _, _ = smooth()

    def loss(self, batch: Any) -> Any:
        return super().loss((batch[0].double(), batch[1].double()))


def main(
    folder: str, name: str, ranks: int, nodes: int, max_ranks: int | None, resume: str | None
) -> None:
    torch.set_num_threads(1)
    name, _, option = name.partition(":")
    data = option if option == "claimed" else "equal"
    device = install(longest_pause_s=2e-4).device if option == "fake" else torch.device("cpu")
    period = {"sync_period": 4} if name == "local_sgd" else {}
    survives = {"on_loss": "continue", "timeout_s": 60.0, "heartbeat_timeout_s": 20.0}
    options = {"min_ranks": 1, "max_ranks": max_ranks, "data": data, **period}
    options["share_device"] = device.type != "cpu"
    saver = ModelCheckpoint(folder, "saved", save_last=True)
    saving: dict[str, Any] = {"callbacks": [saver], "enable_checkpointing": True}
    if device.type != "cpu":  # nobody can copy or save what is on it
        saving = {"accelerator": accelerator_of(device)}
    if option == "trace":
        saving["callbacks"] = [StepTrace(Path(folder, "trace")), saver]
    strategy = strategy_of(name, **survives, **options)
    train = trainer(strategy, ranks, num_nodes=nodes, max_epochs=1000, **saving)
    model = Smooth(folder) if option == "smooth" else Steady(folder)
    with parameters_allowed():
        train.fit(model, loader(nodes * ranks * 160), loader(32), ckpt_path=resume)
    end = {
        "weights": [p.tolist() for p in model.parameters()],
        "epoch": train.current_epoch,
        "step": -1 if data == "claimed" else train.global_step,
        "lr": train.optimizers[0].param_groups[0]["lr"],
        "num_batches": train.num_training_batches,
        "members": train.strategy.session.world_size,
    }
    write_whole(Path(folder, f"ended_{os.environ['RANK']}"), json.dumps(end))


if __name__ == "__main__":
    more = [*sys.argv[5:], "", ""]
    most, checkpoint = int(more[0]) if more[0] else None, more[1] or None
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), most, checkpoint)
