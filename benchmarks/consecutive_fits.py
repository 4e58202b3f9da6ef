"""Many short fits one after the other, with random delays: none may hang or fail.

    python benchmarks/consecutive_fits.py --strategies wagma --fits 200 --ranks 4

Every fit has steps, delays and a seed of its own, and ends with a model that is equal on all ranks
to the bit.  Strategies take turns; "wagma" stands for one of its forms after the other.
"""

from __future__ import annotations

import hashlib
import random
import time
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import script
from benchmarks.compare import contestants
from lightning_dsgd.lab.jobs.cells import Cell, finish
from lightning_dsgd.lab.jobs.job import Job

WAGMA = ("wagma", "wagma:overlap=true", "wagma:grace_s=0", "wagma:group_size=3:sync_period=3")
TIMEOUT_S = 60


class RandomPauses(L.Callback):
    """Holds each rank up as long as its own dice say."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.dice = random.Random(f"{self.seed}/{trainer.global_rank}")

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(self.dice.choice((0, 0, 0.001, 0.01, 0.05)) * self.dice.random())


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(100, 10)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run_cell(cell: Cell, settings: dict[str, Any]) -> dict[str, Any]:
    L.seed_everything(cell["fit"], verbose=False)
    model = Model()
    trainer = contestants.trainer(
        f"{cell['strategy']}:timeout_s={TIMEOUT_S}",
        settings["world_size"],
        max_steps=cell["steps"],
        max_epochs=-1,
        callbacks=[RandomPauses(cell["fit"])],
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(4000, 100)), batch_size=4))
    weights = model.net.weight.detach().numpy().tobytes()
    return {"steps": trainer.global_step, "weights": hashlib.sha256(weights).hexdigest()}


def main() -> None:
    parser = script.parser(__doc__, "docs/results/wagma/consecutive_fits.json")
    parser.add_argument("--strategies", default="wagma")
    parser.add_argument("--fits", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args()
    names = [
        s for name in args.strategies.split(",") for s in (WAGMA if name == "wagma" else [name])
    ]
    plan = [
        {
            "fit": fit,
            "strategy": names[fit % len(names)],
            "steps": random.Random(fit).randint(1, 25),
        }
        for fit in range(args.fits)
    ]
    job = Job(f"{__file__}:run_cell", {"world_size": args.ranks}, args.ranks, cell_timeout_s=120)
    results = job.run(plan, args.output)
    for result in results:
        ranks = result["ranks"]
        assert all(rank == ranks[0] for rank in ranks), f"the ranks differ: {result}"
        assert ranks[0]["steps"] == result["steps"], f"not all steps were made: {result}"
    print(f"{len(results)} fits: all ended, all ranks equal")
    report = job.provenance()
    finish(report | {"fits": len(results), "failed": 0, "strategies": names}, args.output)


if __name__ == "__main__":
    main()
