"""SimCLR: negatives from all ranks, with `all_gather` in the step.

    python examples/simclr.py [--strategy ddp]

An `all_gather` in a step is for ranks that step together: `ddp`, `allreduce`, `oktopk` and the
other sparse strategies.  With any other, every rank would wait there for all ranks in every step,
and compare with what other weights have made: negatives are then taken from a rank's own batch.
"""

import argparse

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader

import lightning_dsgd  # noqa: F401  registers the names


class SimCLR(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))

    def setup(self, stage: str) -> None:
        algorithm = getattr(self.trainer.strategy, "algorithm", None)  # ddp has none
        self.steps_together = algorithm is None or algorithm.traits.lockstep

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        views = (x + 0.1 * torch.randn_like(x) for _ in range(2))
        one, other = (normalize(self.encoder(view)) for view in views)
        mine = torch.arange(len(x))
        if self.steps_together:
            other = self.all_gather(other, sync_grads=True).flatten(0, 1)
            mine += self.global_rank * len(x)
        loss = cross_entropy(one @ other.T / 0.1, mine)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("candidates", float(len(other)))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 3e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--strategy", default="allreduce")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    L.seed_everything(0)
    model = SimCLR()
    trainer = L.Trainer(
        strategy=args.strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, DataLoader(torch.randn(2048, 16), batch_size=64, shuffle=True))
    if trainer.is_global_zero:
        loss, candidates = (float(trainer.callback_metrics[n]) for n in ("loss", "candidates"))
        print(f"{args.strategy}: loss {loss:.3f} among {candidates:.0f} candidates")
