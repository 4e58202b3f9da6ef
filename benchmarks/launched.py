"""Ranks of `Trainer.fit` under `lightning-dsgd launch`, that a storm strikes.

They learn a teacher network of 10 classes, and claim their batches.  Each process writes what it
has done after each step: the time, the epoch, the share of the ranks that took part, its number,
the view and its members, the samples.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

SCRIPT: Final = """
import json, os, sys, time
from pathlib import Path
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from lightning_dsgd import DecentralizedStrategy

folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
ranks, rank = settings["ranks"], os.environ["RANK"]
torch.set_num_threads(1)
(folder / f"begun_{rank}_{os.getpid()}").write_text(str(time.monotonic()))


def network(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 10))


class Samples(Dataset):
    def __init__(self, begin, count):
        self.begin, self.count, self.teacher = begin, count, network(1).requires_grad_(False)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        x = torch.randn(16, generator=torch.Generator().manual_seed(self.begin + index))
        return x, int(self.teacher(5 * x).argmax()), index


class Learner(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network(2)
        self.steps = (folder / f"{rank}_{os.getpid()}").open("w")
        self.counts = 0, 0

    def training_step(self, batch, batch_idx):
        time.sleep(settings["step_s"])
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def in_time(self, session):
        # The share of the contributions since the last step that were; each view counts anew.
        counts = dict(getattr(session.training.replica.parts[0].algorithm, "staleness", {}))
        now, before = (sum(counts.values()), counts.get(0, 0)), self.counts
        self.counts = now
        number, own = (a - b for a, b in zip(now, before if now[0] >= before[0] else (0, 0)))
        return own / number if number else 1.0

    def on_train_batch_end(self, outputs, batch, batch_idx):
        said, session = self.trainer.strategy.communication(), self.trainer.strategy.session
        part = said["num_members"] / ranks * self.in_time(session)
        view = session.rank, int(said["view"]), ",".join(map(str, session.ranks.members))
        print(time.monotonic(), self.current_epoch, round(part, 4), *view, *batch[2].tolist(),
              file=self.steps, flush=True)

    def on_train_epoch_end(self):
        is_told = torch.tensor(float((folder / "end").exists()))
        if self.trainer.strategy.reduce(is_told, reduce_op="sum") > 0:
            self.trainer.should_stop = True

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=settings["lr"], momentum=0.9)


trainer = L.Trainer(
    strategy=DecentralizedStrategy(
        settings["strategy"],
        on_loss="continue", min_ranks=1 if ranks == 2 else None, data="claimed",
        heartbeat_timeout_s=settings["heartbeat_s"], timeout_s=300.0,
    ),
    accelerator="cpu", devices=ranks, max_epochs=settings["epochs"], logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
model = Learner()
samples = Samples(0, settings["epoch_samples"])
trainer.fit(model, DataLoader(samples, settings["batch"], shuffle=True))
held_out = next(iter(DataLoader(Samples(10**9, 4096), 4096)))
with torch.no_grad():
    loss = float(nn.functional.cross_entropy(model.net(held_out[0]), held_out[1]))
number = trainer.strategy.session.rank
(folder / f"result_{number}").write_text(json.dumps([loss, trainer.current_epoch]))
"""


class Job:
    """The ranks of one training.

    Args:
        folder: for what they write
        settings: of the script
        text: the script, which gets the folder and the settings
    """

    def __init__(self, folder: Path, settings: dict[str, Any], text: str = SCRIPT) -> None:
        self.folder, self.ranks = folder, int(settings["ranks"])
        script = folder / "train.py"
        script.write_text(text)
        command = [sys.executable, "-m", "lightning_dsgd", "launch", "--ranks", str(self.ranks)]
        command += ["--max-restarts", "100000", "--end-s", "60", "--logs", str(folder / "logs")]
        command += ["--", str(script), str(folder), json.dumps(settings)]
        with (folder / "said").open("w") as said:
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)

    def look_until(self, at: float) -> None:
        """Waits until a time, while the job goes on."""
        while time.monotonic() < at:
            if self.process.poll() is not None:
                raise RuntimeError(f"the job has ended:\n{(self.folder / 'said').read_text()}")
            time.sleep(0.05)

    def training(self) -> list[int]:
        """Returns the processes that have made a step, and live."""
        made = [pid for (_, pid), lines in said_of_steps(self.folder).items() if lines]
        return [pid for pid in made if is_alive(pid)]

    def end(self, within_s: float) -> tuple[float, int]:
        """Waits for the end; returns the loss, and how many epochs there were."""
        try:
            if self.process.wait(within_s):
                raise RuntimeError(f"the job has failed:\n{(self.folder / 'said').read_text()}")
        finally:
            self.stop()
        ends = [json.loads(file.read_text()) for file in self.folder.glob("result_*")]
        if not ends or any(end != ends[0] for end in ends):
            raise RuntimeError(f"all ranks must end with the same loss and epoch, got {ends}")
        return ends[0][0], ends[0][1]

    def stop(self) -> None:
        """Ends the job, if it has not ended."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(120)
            finally:
                self.process.kill()


def said_of_steps(folder: Path) -> dict[tuple[int, int], list[list[str]]]:
    """Returns the words that each process has written of each of its steps: by place and process.

    A line that is not whole yet is left out.
    """
    found = {}
    for file in folder.glob("[0-9]*_[0-9]*"):
        place, _, pid = file.name.partition("_")
        lines = file.read_text().splitlines(keepends=True)
        found[int(place), int(pid)] = [line.split() for line in lines if line[-1] == "\n"]
    return found


def is_alive(pid: int) -> bool:
    """Returns whether a process is there and has not ended."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
