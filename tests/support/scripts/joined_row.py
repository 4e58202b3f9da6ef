"""A user's script that `lightning-dsgd launch` starts: trains replicas in shards, and loses ranks.

Its arguments: a folder; the algorithm; "fsdp" or "tensor"; who is killed, as JSON: of each its
rank, in which process of that rank, counted from 1, where, and at which call.  In each view a rank
writes what it begins with; at the end it writes the whole model.  Training ends with the epoch in
which the file `end` is there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dsgd import ShardedStrategy
from lightning_dsgd.elastic import handover
from lightning_dsgd.elastic.survival import Survival
from lightning_dsgd.sharded.shards import local
from lightning_dsgd.sharded.together import in_shards
from tests.sharded.trainer.test_sharded import Sharded, whole
from tests.support.doomed import write_whole
from tests.support.models import loader, trainer

BATCH_S = 0.02
RANK = int(os.environ["RANK"])


class Places:
    """Kills this process at one of them."""

    def __init__(self, folder: Path, deaths: list[list[Any]]) -> None:
        start = 1 + len(list(folder.glob(f"start_{RANK}_*")))
        (folder / f"start_{RANK}_{start}").touch()
        self._folder = folder
        self._deaths = [death[2:] for death in deaths if death[:2] == [RANK, start]]
        self._counts: dict[str, int] = {}

    def come_to(self, place: str) -> None:
        self._counts[place] = self._counts.get(place, 0) + 1
        if [place, self._counts[place]] in self._deaths:
            write_whole(self._folder / f"killed_{RANK}_{place}", "")
            os.kill(os.getpid(), signal.SIGKILL)


class Steady(Sharded):
    """Takes its time for a batch, tells where it is, and stops all where it is told to."""

    def __init__(self, folder: Path, places: Places, parallel: str) -> None:
        super().__init__(parallel)
        self.folder, self.places = folder, places
        self.views: set[int] = set()

    def configure_model(self) -> None:
        self.places.come_to("configure_model")
        super().configure_model()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.places.come_to("training_step")
        time.sleep(BATCH_S)
        ranks = self.trainer.strategy.session.ranks
        where = {
            "pid": os.getpid(),
            "epoch": self.current_epoch,
            "step": self.global_step,
            "members": ranks.members,
            "shares": self.trainer.strategy.distributed_sampler_kwargs,
            "at_s": time.monotonic(),
        }
        write_whole(self.folder / f"at_{RANK}", json.dumps(where))
        if ranks.number not in self.views:
            self.views.add(ranks.number)
            own = self.trainer.strategy.session.rank
            write_whole(self.folder / f"view_{ranks.number}_{own}", json.dumps(self.state()))
        return super().training_step(batch, batch_idx)

    def state(self) -> dict[str, Any]:
        """What this rank holds: its shard, and the optimizer's."""
        states = in_shards(self.trainer.optimizers[0].state_dict())["state"].values()
        moments = [next(iter(state["momentum_buffer"].values())).tolist() for state in states]
        weights = [local(parameter).tolist() for parameter in self.parameters()]
        return {"step": self.global_step, "weights": weights, "moments": moments}

    def on_train_epoch_end(self) -> None:
        is_told = torch.tensor(float((self.folder / "end").exists()))
        if self.trainer.strategy.reduce(is_told, reduce_op="sum") > 0:
            self.trainer.should_stop = True


def main(folder: Path, name: str, parallel: str, deaths: list[list[Any]]) -> None:
    torch.set_num_threads(1)
    places = Places(folder, deaths)
    ask, take, give = Survival.ask, handover.take, handover.give
    laid, num_ranks = ShardedStrategy._laid, int(os.environ["WORLD_SIZE"])

    def ask_and_die(*args: Any) -> None:
        ask(*args)
        places.come_to("ask")

    def take_and_die(*args: Any) -> Any:
        places.come_to("take")
        return take(*args)

    def die_and_give(*args: Any) -> None:
        places.come_to("give")
        give(*args)

    def die_and_lay(*args: Any) -> Any:
        places.come_to("mesh")
        return laid(*args)

    Survival.ask, handover.take = ask_and_die, take_and_die  # type: ignore[method-assign]
    handover.give = die_and_give
    ShardedStrategy._laid = die_and_lay  # type: ignore[method-assign]
    strategy = ShardedStrategy(
        name,
        num_replicas=num_ranks // 2,
        tensor_parallel_size=1 if parallel == "fsdp" else 2,
        timeout_s=60.0,
        heartbeat_timeout_s=20.0,
        startup_timeout_s=60.0,
        on_loss="continue",
    )
    saver = ModelCheckpoint(folder, "saved", save_last=True)
    saving: dict[str, Any] = {"callbacks": [saver], "enable_checkpointing": True}
    train = trainer(strategy, num_ranks, max_epochs=1000, gradient_clip_val=1.0, **saving)
    model = Steady(folder, places, parallel)
    train.fit(model, loader(num_ranks * 80), loader(32))
    end = {
        "weights": whole(model).tolist(),
        "epoch": train.current_epoch,
        "step": train.global_step,
        "members": strategy.session.ranks.members,
        "num_batches": train.num_training_batches,
        "val_loss": float(train.callback_metrics["val_loss"]),
    }
    write_whole(folder / f"ended_{RANK}", json.dumps(end))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
