"""BYOL: a teacher that follows the student and that no optimizer trains.

    python examples/byol.py [--strategy ddp]

The teacher is a moving average of the student, and while training each rank has its own.  It is
averaged over the ranks wherever a model is evaluated and saved, and at the end, as BatchNorm's
statistics are.
"""

import argparse
import copy

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.utils.data import DataLoader

import lightning_dsgd  # noqa: F401  registers the names


class BYOL(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.student.append(nn.Linear(32, 8))
        self.predictor = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        one, other = (x + 0.2 * torch.randn_like(x) for _ in range(2))  # two views of a sample
        said = self.predictor(self.student(one))
        loss = 1 - cosine_similarity(said, self.teacher(other)).mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    @torch.no_grad()
    def on_train_batch_end(self, *args: object) -> None:
        weights = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
        for mine, theirs in weights:
            mine.lerp_(theirs, 0.02)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [*self.student.parameters(), *self.predictor.parameters()]
        return torch.optim.Adam(trained, 1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--strategy", default="wagma")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    L.seed_everything(0)
    data = torch.randn(2048, 4) @ torch.randn(4, 16)
    model = BYOL()
    trainer = L.Trainer(
        strategy=args.strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=32, shuffle=True))
    if trainer.is_global_zero:
        loss = float(trainer.callback_metrics["loss"])
        print(f"{args.strategy}: student and teacher differ by {loss:.3f} (1 - cosine)")
