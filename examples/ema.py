"""EMA: Lightning's moving average of the weights is evaluated and saved instead of them.

    python examples/ema.py [--strategy ddp]

The callback follows the weights of its rank.  What is saved is the mean of the ranks' averages.
"""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dsgd  # noqa: F401  registers the names


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--strategy", default="wagma")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--decay", type=float, default=0.97, help="0: no moving average")
    args = parser.parse_args()

    L.seed_everything(0)
    x = torch.randn(2048, 8)
    y = x.sum(1, keepdim=True)
    train = TensorDataset(x[:1024], y[:1024] + torch.randn(1024, 1))  # noisy
    model = Regression()
    trainer = L.Trainer(
        strategy=args.strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        callbacks=[EMAWeightAveraging(decay=args.decay)],
    )
    val = DataLoader(TensorDataset(x[1024:], y[1024:]), batch_size=256)
    trainer.fit(model, DataLoader(train, batch_size=16, shuffle=True), val)
    if trainer.is_global_zero:
        loss = float(trainer.callback_metrics["val_loss"])
        print(f"{args.strategy}: validation loss {loss:.3f}, moving average over {args.decay}")
