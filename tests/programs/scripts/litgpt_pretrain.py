"""litgpt's pretraining of a tiny model, with a data module of Python's own library.

    python litgpt_pretrain.py tiny

The name stands in the command as litgpt stores the command beside its checkpoints.  `pretrain` is
litgpt's module, whose strategy the environment names.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pretrain
import torch
from litgpt import Config
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data import DataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

LENGTH = 64
BATCH = 4
RANKS = 2
STEPS = 40


class Bytes(Dataset[Tensor]):
    """Bytes of a module of Python's library, from the first up to the last."""

    def __init__(self, first: int, last: int) -> None:
        raw = Path(argparse.__file__).read_bytes()[first:last]
        self.data = torch.tensor(list(raw))

    def __len__(self) -> int:
        return (len(self.data) - 1) // LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index * LENGTH : (index + 1) * LENGTH + 1]


class Library(DataModule):
    def connect(self, *args: Any, **kwargs: Any) -> None:
        pass

    def train_dataloader(self) -> Any:
        return DataLoader(Bytes(0, 60_000), BATCH, shuffle=True, drop_last=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Bytes(60_000, 64_000), BATCH, drop_last=True)


if __name__ == "__main__":
    config = Config(
        name="tiny",
        block_size=LENGTH,
        n_layer=2,
        n_head=2,
        n_embd=32,
        vocab_size=256,
        padded_vocab_size=256,
        intermediate_size=64,
    )
    train = TrainArgs(
        save_interval=20,
        log_interval=10,
        global_batch_size=16,
        micro_batch_size=BATCH,
        max_tokens=16 * LENGTH * STEPS,
        max_norm=1.0,
        min_lr=4e-5,
        lr_warmup_steps=5,
        tie_embeddings=False,
    )
    pretrain.setup(
        "tiny",
        config,
        out_dir=Path("out"),
        precision="32-true",
        data=Library(),
        train=train,
        eval=EvalArgs(interval=20, max_iters=4),
        optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 3e-3}},
        devices=RANKS,
        logger_name="csv",
    )
