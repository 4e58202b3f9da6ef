"""Trains under torchrun; rank 1 dies while all connect, until torchrun starts the ranks again."""

import os
import signal
import sys

import torch

from lightning_dsgd.trainer.named import strategy_of
from lightning_dsgd.transport import processes
from tests.support.models import Regression, loader, trainer

torch.set_num_threads(1)
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if is_first and os.environ["RANK"] == "1":
    processes._gather_json = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
strategy = strategy_of("dpsgd", startup_timeout_s=60.0)
trainer(strategy, 2, max_steps=2).fit(Regression(), loader())
sys.stdout.write(f"trained as rank {os.environ['RANK']}\n")  # at once: the other rank writes too
