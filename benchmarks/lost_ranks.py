"""A rank is killed at a random moment of a training on the digits: how good is the rest's model?

    python benchmarks/lost_ranks.py --kills 20

For each strategy: undisturbed trainings of 4 real ranks through `Trainer.fit`, and as many in which
one rank gets SIGKILL (rank 0, 1, 2, 3 in turn) before it has ended.  The ranks are forked from one
interpreter.  The sparse strategies send a tenth of the entries: their default, 1%, needs more
steps than these to train such a small network.

    ended       trainings in which all ranks that were left came to the end with the same weights
    accuracy    on 720 held-out images, the mean: undisturbed, and after a loss
    difference  of the two means, in points
    pause       from the kill, the longest time without a step of a rank that was left

After each training there must be no process of it, no new file in the temporary folder or in
shared memory, and no socket that listens.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from benchmarks import script
from lightning_dsgd import DecentralizedStrategy
from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.primitives.error_feedback import ErrorFeedback
from lightning_dsgd.tasks.digits import DigitsData

RANKS = 4
SETTINGS: dict[str, dict[str, Any]] = {
    name: {"density": 0.1} for name, kind in ALGORITHMS.items() if issubclass(kind, ErrorFeedback)
}
FOLDERS = (Path("/tmp"), Path("/dev/shm"))


class Digits(L.LightningModule):
    """A network for the digits that notes when each of its steps has ended."""

    def __init__(self, lr: float, folder: Path) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.lr, self.folder = lr, folder
        self.ended: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, digits = batch
        time.sleep(0.005)  # so that ranks are in every phase of a step when one is killed
        return nn.functional.cross_entropy(self.net(images), digits)

    def on_train_batch_end(self, *_: Any) -> None:
        self.ended.append(time.monotonic())
        if len(self.ended) == 1:
            (self.folder / f"begun_{self.global_rank}").touch()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def run_rank(rank: int, folder: Path, name: str, seed: int, epochs: int, lr: float) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE=str(RANKS), TORCHELASTIC_RUN_ID="kills", MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
    )  # fmt: skip
    store = dist.FileStore(str(folder / "store"), RANKS)
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    L.seed_everything(seed, verbose=False)
    data = DigitsData(split=(1077, 720, 0))
    data.setup("fit")
    model = Digits(lr, folder)
    trainer = L.Trainer(
        strategy=DecentralizedStrategy(
            ALGORITHMS[name](**SETTINGS.get(name, {})),
            on_loss="continue",
            timeout_s=120,
            heartbeat_timeout_s=10,
        ),
        accelerator="cpu",
        devices=RANKS,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    begin = time.monotonic()
    trainer.fit(model, DataLoader(data.splits["train"], 16, shuffle=True))
    trained_s = time.monotonic() - begin
    images, digits = next(iter(DataLoader(data.splits["val"], 720)))
    with torch.no_grad():
        right = model.net(images).argmax(1) == digits
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    result = {
        "accuracy": float(right.float().mean()),
        "weights": float(weights.double().sum()),
        "trained_s": trained_s,
        "ended": model.ended,
    }
    (folder / f"{rank}.json").write_text(json.dumps(result))


def fork_rank(rank: int, folder: Path, *args: Any) -> int:
    pid = os.fork()
    if pid == 0:
        with (folder / f"{rank}.log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            try:
                run_rank(rank, folder, *args)
            except BaseException:
                traceback.print_exc()
                log.flush()
                os._exit(1)
        os._exit(0)
    return pid


def left_behind(before: set[Path]) -> list[str]:
    """What a training has left: processes, files, sockets that listen."""
    mine = psutil.Process()
    found = [str(child) for child in mine.children(recursive=True)]
    found += [str(path) for path in set(files()) - before]
    return found + [str(c) for c in mine.net_connections() if c.status == psutil.CONN_LISTEN]


def files() -> set[Path]:
    """Those that torch, Lightning and this package might leave."""
    marks = ("torch", "dsgd", "lightning", "psm_", "gloo")
    return {p for folder in FOLDERS for p in folder.iterdir() if p.name.startswith(marks)}


def train(
    name: str, seed: int, epochs: int, lr: float, kill: tuple[int, float] | None
) -> dict[str, Any]:
    """One training; `kill` says whom to kill, and how long after all have made a step."""
    before, killed_at = files(), 0.0
    with tempfile.TemporaryDirectory(prefix="kills") as temporary:
        folder = Path(temporary)
        pids = [fork_rank(rank, folder, name, seed, epochs, lr) for rank in range(RANKS)]
        if kill is not None:
            while not all((folder / f"begun_{rank}").exists() for rank in range(RANKS)):
                time.sleep(0.001)  # between two looks
            time.sleep(kill[1])
            killed_at = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[kill[0]], signal.SIGKILL)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        was_killed = kill is not None and statuses[kill[0]] == signal.SIGKILL
        rest = [rank for rank in range(RANKS) if not (was_killed and kill and rank == kill[0])]
        failed = [rank for rank in rest if statuses[rank] != 0]
        for rank in failed:
            print((folder / f"{rank}.log").read_text(), file=sys.stderr)
        if failed and not was_killed:
            raise SystemExit(f"{name}, seed {seed}: ranks {failed} failed and nobody was killed")
        if failed:
            return {"seed": seed, "killed": True, "ended": False}
        rows = [json.loads((folder / f"{rank}.json").read_text()) for rank in rest]
    pauses = []
    for row in rows if was_killed else []:
        times = [killed_at, *(t for t in row["ended"] if t > killed_at)]
        if len(times) > 1:  # else it had made its last step
            pauses.append(max(b - a for a, b in pairwise(times)))
    return {
        "seed": seed,
        "killed": was_killed,
        "ended": len({row["weights"] for row in rows}) == 1,
        "accuracy": rows[0]["accuracy"],
        "trained_s": rows[0]["trained_s"],
        "pause_s": max(pauses) if pauses else None,
        "left_behind": left_behind(before),
    }


def measure(name: str, kills: int, epochs: int, lr: float) -> dict[str, Any]:
    chance = random.Random(name)
    undisturbed = tqdm(range(kills), f"{name}, undisturbed", leave=False)
    alone = [train(name, seed, epochs, lr, None) for seed in undisturbed]
    took_s = statistics.median(run["trained_s"] for run in alone)
    lost: list[dict[str, Any]] = []
    for seed in tqdm(range(kills), f"{name}, with a loss", leave=False):
        while len([run for run in lost if run["killed"]]) == seed:  # till a kill has struck
            kill = (seed % RANKS, chance.uniform(0.0, took_s))
            lost.append(train(name, seed, epochs, lr, kill))
    struck = [run for run in lost if run["killed"]]
    pauses = [run["pause_s"] for run in struck if run.get("pause_s") is not None]
    mean, after = (
        statistics.mean(run["accuracy"] for run in runs if run["ended"]) for runs in (alone, struck)
    )
    return {
        "strategy": name,
        "kills": len(struck),
        "ended": sum(run["ended"] for run in struck),
        "accuracy": mean,
        "accuracy_after_loss": after,
        "worst_after_loss": min(run["accuracy"] for run in struck if run["ended"]),
        "pause_median_s": statistics.median(pauses),
        "pause_worst_s": max(pauses),
        "left_behind": [
            what for run in alone + lost if run["ended"] for what in run["left_behind"]
        ],
    }


def main() -> None:
    parser = script.parser(__doc__, "docs/results/survival/lost_ranks.json")
    parser.add_argument("--strategies", default=",".join(ALGORITHMS))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # without a thread, as ranks are forked
    rows = []
    print("| strategy | ended | accuracy | after a loss | difference | pause | left |")
    print("|---" * 7 + "|")
    for name in args.strategies.split(","):
        row = measure(name, args.kills, args.epochs, args.lr)
        rows.append(row)
        gain = 100 * (row["accuracy_after_loss"] - row["accuracy"])
        print(
            f"| `{name}` | {row['ended']} of {row['kills']} | {row['accuracy']:.1%} "
            f"| {row['accuracy_after_loss']:.1%} | {gain:+.1f} "
            f"| {row['pause_median_s']:.2f} s, {row['pause_worst_s']:.2f} s "
            f"| {len(row['left_behind'])} |",
            flush=True,
        )
    settings = {"kills": args.kills, "epochs": args.epochs, "lr": args.lr, "ranks": RANKS}
    specs = [
        name + "".join(f":{key}={value}" for key, value in SETTINGS.get(name, {}).items())
        for name in args.strategies.split(",")
    ]
    made = provenance() | {"hyperparameters": in_force(specs, [RANKS])}
    write_result(made | {"settings": settings | SETTINGS, "rows": rows}, args.output)


if __name__ == "__main__":
    main()
