"""GAN: two optimizers with manual optimization, each with its own algorithm.

    python examples/gan.py [--strategy ddp_find_unused_parameters_true]

A generator learns to put points on a circle.  What an optimizer has stepped is averaged then: the
discriminator's weights after its step, the generator's after its own.
"""

import argparse

import lightning as L
import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader

import lightning_dsgd  # noqa: F401  registers the names


def network(num_inputs: int, num_outputs: int) -> nn.Sequential:
    layers = nn.Linear(num_inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2)
    return nn.Sequential(*layers, nn.Linear(64, num_outputs))


class GAN(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = network(4, 2), network(2, 1)

    def training_step(self, real: torch.Tensor, batch_idx: int) -> None:
        of_generator, of_discriminator = self.optimizers()
        fake = self.generator(torch.randn(len(real), 4))

        of_discriminator.zero_grad()
        said = self.discriminator(torch.cat([real, fake.detach()])).chunk(2)
        self.manual_backward(softplus(-said[0]).mean() + softplus(said[1]).mean())
        of_discriminator.step()

        self.toggle_optimizer(of_generator)
        of_generator.zero_grad()
        self.manual_backward(softplus(-self.discriminator(fake)).mean())
        of_generator.step()
        self.untoggle_optimizer(of_generator)

    def on_train_epoch_end(self) -> None:
        off = self.generator(torch.randn(1000, 4)).norm(dim=1).sub(1).abs().mean()
        self.log("off_the_circle", off, sync_dist=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        networks = self.generator, self.discriminator
        return [torch.optim.Adam(n.parameters(), 2e-3, betas=(0.5, 0.9)) for n in networks]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--strategy", default="wagma")
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()

    L.seed_everything(0)
    circle = nn.functional.normalize(torch.randn(4096, 2))
    model = GAN()
    trainer = L.Trainer(
        strategy=args.strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, DataLoader(circle, batch_size=64, shuffle=True))
    if trainer.is_global_zero:
        off = float(trainer.callback_metrics["off_the_circle"])
        print(f"{args.strategy}: points lie {off:.3f} off the circle on average")
