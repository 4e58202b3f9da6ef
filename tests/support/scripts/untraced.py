"""A user's script that `lightning-dsgd launch` starts: `balanced`, some of whose ranks are killed.

Its arguments: a folder, the number of ranks, the options of `Balanced`, and the moments at which
the first process of each rank is killed, the second, ...; those of a process that has joined the
others count from its first step.  Each process writes its weights after each step.  Training ends
with the epoch in which the file `end` is there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_dsgd import BalancedStrategy
from tests.elastic.test_balanced import (
    NUM_SLOTS,
    SURVIVES,
    Doomed,
    Fitted,
    Moment,
    algorithm_until,
    loader_of,
)
from tests.support.models import trainer


class Untraced(Fitted):
    """Writes its weights to a file after each step."""

    def __init__(self, file: Path, algorithm: Doomed, moment: Moment | None) -> None:
        super().__init__(algorithm)
        self.folder, self.moment, self.num_written = file.parent, moment, 0
        self.steps = file.open("w")

    def on_train_start(self) -> None:
        if self.moment is not None:
            self.algorithm.moment = self.global_step + self.moment[0], self.moment[1]

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        for step, weights in [*self.seen.items()][self.num_written :]:
            members = self.trainer.strategy.session.ranks.members
            print(json.dumps([step, len(members), weights]), file=self.steps, flush=True)
            self.num_written += 1

    def on_train_epoch_end(self) -> None:
        is_told = torch.tensor(float((self.folder / "end").exists()))
        if self.trainer.strategy.reduce(is_told, reduce_op="sum") > 0:
            self.trainer.should_stop = True


def main(folder: Path, num_ranks: int, options: dict[str, Any], moments: list[Moment]) -> None:
    torch.set_num_threads(1)
    number = len([*folder.glob(f"steps_{os.environ['RANK']}_*")])  # of this rank's processes
    file = folder / f"steps_{os.environ['RANK']}_{number}"
    algorithm = algorithm_until(None, **options)
    moment = moments[number] if number < len(moments) else None
    strategy = BalancedStrategy(algorithm, min_ranks=2, **SURVIVES)
    train = trainer(strategy, num_ranks, max_epochs=1000, accumulate_grad_batches=NUM_SLOTS)
    model = Untraced(file, algorithm, moment)
    train.fit(model, loader_of(num_ranks, int(os.environ["RANK"])))
    end = {"epochs": train.current_epoch, "members": train.strategy.session.world_size}
    (folder / f"ended_{os.environ['RANK']}").write_text(json.dumps(end))


if __name__ == "__main__":
    every = json.loads(sys.argv[4])
    main(
        Path(sys.argv[1]),
        int(sys.argv[2]),
        json.loads(sys.argv[3]),
        [(step, place) for step, place in every.get(os.environ["RANK"], [])],
    )
