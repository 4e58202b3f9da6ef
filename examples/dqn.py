"""DQN: each rank plays its own games and learns from its own replay memory.

    python examples/dqn.py [--strategy ddp]

Where games take unequal time ranks are late at random, and `adpsgd`, `wagma` and others do not wait
for them.  The target network is a moving average of the network, in a buffer; it is averaged as
byol.py's teacher is.
"""

import argparse
import random
from collections import deque
from collections.abc import Iterator

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lightning_dsgd  # noqa: F401  registers the names

PLACES = 10
Step = tuple[int, int, float, int]


class DQN(L.LightningModule):
    """The network is a table: the worth of going left or right at each place of a corridor."""

    def __init__(self) -> None:
        super().__init__()
        self.worth = nn.Embedding(PLACES, 2)
        self.register_buffer("target", self.worth.weight.detach().clone())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        place, action, reward, then = batch
        future = torch.where(reward > 0, 0.0, 0.9 * self.target[then].amax(1))
        loss = nn.functional.mse_loss(self.worth(place)[range(len(place)), action], reward + future)
        self.log("wrong_ways", float((self.worth.weight[:-1].argmax(1) == 0).sum()))
        return loss

    def on_train_batch_end(self, *args: object) -> None:
        self.target.lerp_(self.worth.weight.detach(), 0.05)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.02)


class Memories(IterableDataset[Step]):
    """Walks a corridor whose far end is worth 1, and gives random memories of it."""

    def __init__(self, model: DQN, num_samples: int) -> None:
        self.model, self.num_samples = model, num_samples
        self.memory: deque[Step] = deque(maxlen=1000)

    def __iter__(self) -> Iterator[Step]:
        draw = random.Random(self.model.global_rank)
        place = 0
        for _ in range(self.num_samples):
            greedy = int(self.model.worth.weight[place].argmax())
            action = draw.randrange(2) if draw.random() < 0.3 else greedy
            then = max(0, place + 2 * action - 1)
            done = then == PLACES - 1
            self.memory.append((place, action, float(done), then))
            place = 0 if done else then
            yield draw.choice(self.memory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--strategy", default="adpsgd")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    L.seed_everything(0)
    model = DQN()
    trainer = L.Trainer(
        strategy=args.strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, DataLoader(Memories(model, 1600), batch_size=32))
    if trainer.is_global_zero:
        right = model.worth.weight[:-1].argmax(1).sum()
        print(f"{args.strategy}: goes the right way from {right} of {PLACES - 1} places")
