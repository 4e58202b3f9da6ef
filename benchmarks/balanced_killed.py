"""How long `balanced` takes if a rank is killed and replaced, and whether its loss stays the same.

    python benchmarks/balanced_killed.py

`lightning-dsgd launch` starts 4 ranks of `Trainer.fit` with `on_loss="continue"`, which accumulate
4 micro-batches for a step.  A micro-batch is a small network's forward and backward pass and a
sleep.  In every other training one rank, drawn by chance, gets SIGKILL after a quarter of the
steps; it is started again, and joins.  The clock runs from the third step to the last.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks import script
from benchmarks.launched import Job, said_of_steps
from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.results import provenance, write_result

_WITHIN_S: Final = 1200.0
SCRIPT: Final = """
import json, os, sys, time
from pathlib import Path
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning_dsgd import BalancedStrategy

folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
ranks, k, num_steps = settings["ranks"], settings["k"], settings["steps"]
torch.set_num_threads(1)


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        L.seed_everything(1, verbose=False)
        self.net = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 1))
        self.steps = (folder / f"{os.environ['RANK']}_{os.getpid()}").open("w")

    def training_step(self, batch, batch_idx):
        time.sleep(settings["unit_s"])
        return nn.functional.mse_loss(self.net(batch[0]).squeeze(-1), batch[1])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if (batch_idx + 1) % k == 0:
            members = self.trainer.strategy.communication()["num_members"]
            print(time.monotonic(), self.trainer.global_step, members, file=self.steps, flush=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


draw = torch.Generator().manual_seed(settings["seed"])
x = torch.randn(8 * ranks * k * num_steps, 32, generator=draw)
data = TensorDataset(x, x.square().sum(1).sqrt())
model = Model()
trainer = L.Trainer(
    strategy=BalancedStrategy(on_loss="continue", timeout_s=120.0),
    accelerator="cpu", devices=ranks, max_epochs=1, accumulate_grad_batches=k, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(model, DataLoader(data, batch_size=8))
with torch.no_grad():
    loss = nn.functional.mse_loss(model.net(x[:2048]).squeeze(-1), data.tensors[1][:2048])
number = trainer.strategy.session.rank
(folder / f"result_{number}").write_text(json.dumps([float(loss), trainer.current_epoch]))
"""


def steps_of(folder: Path) -> list[tuple[float, int, float, int]]:
    """Returns all steps of all processes: when, its number, among how many ranks, whose."""
    return sorted(
        (float(words[0]), int(words[1]), float(words[2]), pid)
        for (_, pid), lines in said_of_steps(folder).items()
        for words in lines
    )


def train(settings: dict[str, Any], *, kills: bool) -> dict[str, Any]:
    """Trains once; returns the seconds, the loss and, after a kill, how long the rank was away."""
    with tempfile.TemporaryDirectory(prefix="killed") as temporary:
        folder, killed_at = Path(temporary), None
        job = Job(folder, settings, SCRIPT)
        try:
            if kills:
                while not (steps := steps_of(folder)) or steps[-1][1] < settings["steps"] // 4:
                    job.look_until(time.monotonic() + 0.05)
                victim = random.Random(settings["seed"]).choice(sorted({pid for *_, pid in steps}))
                os.kill(victim, signal.SIGKILL)
                killed_at = time.monotonic()
            loss, _ = job.end(_WITHIN_S)
        finally:
            job.stop()
        steps = steps_of(folder)
    begin = min(at for at, number, *_ in steps if number >= 3)
    found = {"killed": kills, "seconds": round(steps[-1][0] - begin, 2), "loss": loss}
    if killed_at is not None:
        # The last step without the rank, or the kill itself where the others made none.
        without = [t for t, _, members, _ in steps if t > killed_at and members < settings["ranks"]]
        last = max(without, default=killed_at)
        found["away_s"] = round(min(t for t, *_ in steps if t > last) - killed_at, 2)
    return found


def main() -> None:
    parser = script.parser(__doc__, "docs/results/balanced/killed.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("--unit-s", type=float, default=0.08)
    args = parser.parse_args()
    cells = []
    settings = {key: getattr(args, key) for key in ("ranks", "k", "steps", "unit_s")}
    for seed in range(args.rounds):
        for kills in (False, True) if seed % 2 == 0 else (True, False):
            cells.append(train({**settings, "seed": seed}, kills=kills) | {"round": seed})
            print(cells[-1], flush=True)
    alone, killed = (
        sorted((cell for cell in cells if cell["killed"] is is_so), key=lambda cell: cell["round"])
        for is_so in (False, True)
    )
    pairs = list(zip(alone, killed, strict=True))
    ratios = [theirs["seconds"] / own["seconds"] for own, theirs in pairs]
    apart = max(abs(theirs["loss"] / own["loss"] - 1) for own, theirs in pairs)
    found = {
        "of_undisturbed": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
        "away_s": statistics.median(cell["away_s"] for cell in killed),
        "undisturbed_s": statistics.median(cell["seconds"] for cell in alone),
        "loss_apart": float(f"{apart:.1e}"),
    }
    print(found)
    told = {"hyperparameters": in_force(["balanced"], [args.ranks])}
    made = {**provenance(), **told, "settings": settings}
    write_result({**made, "rows": [found], "cells": cells}, args.output)


if __name__ == "__main__":
    main()
