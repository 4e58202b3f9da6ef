"""Tests marked `gpu`, each in a process group of its own, and jobs as users start them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks import stuck_rank
from benchmarks.on_gpu import apart
from benchmarks.on_gpu.apart import Row
from benchmarks.on_gpu.place import Place

ROOT = Path(__file__).parents[2]
TEST_S = 20.0, 60.0
LAUNCH_S = 30.0, 90.0
"""Of a test and of a launch; the second on a CPU, which may be busy."""
TRAIN = """
import lightning as L, lightning_dsgd as dsgd
from tests.support.fits import Seeded
from tests.support.models import loader, weights
world_size = {world_size}
strategy = {strategy}
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = L.Trainer(
    accelerator="{accelerator}", devices=world_size, strategy=strategy, max_epochs=2,
    accumulate_grad_batches=2, **quiet,
)
model = Seeded()
trainer.fit(model, loader(16 * world_size), loader(32))
print("rank", trainer.global_rank, "of", trainer.world_size, "on", trainer.strategy.root_device,
      "ends with", float(trainer.callback_metrics["val_loss"]), weights(model).sum().item())
"""
BALANCED = "dsgd.BalancedStrategy(share_device=world_size > 1, timeout_s=20.0)"
WAGMA = "dsgd.DecentralizedStrategy('wagma', share_device=world_size > 1, timeout_s=20.0)"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCHES = (
    ("python", 1, BALANCED, (sys.executable,)),
    ("torchrun", 2, BALANCED, TORCHRUN),
    ("torchrun", 2, WAGMA, TORCHRUN),
    ("mpiexec", 2, BALANCED, ("mpiexec", "-n", "2", sys.executable)),
)
"""A launcher, how many ranks it starts, the strategy, and what stands before the script."""


class Heard:
    """A plugin of pytest: which tests there are, and what became of the one that ran."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.row: Row = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.nodeid for item in session.items]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.row = {"outcome": report.outcome, "seconds": round(report.duration, 1)}
            if report.failed:
                lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
                self.row["error"] = "\n".join(lines[-5:]) or report.longreprtext[-500:]


def pytest_with(*arguments: str) -> Heard:
    """Runs pytest in this process."""
    os.chdir(ROOT)
    heard = Heard()
    status = pytest.main(
        ["-p", "no:cacheprovider", "--color=no", "-m", "gpu", "-W", "default", *arguments], [heard]
    )
    if not heard.names:
        heard.row = {"error": f"pytest has found no test, and ended with {status}"}
    return heard


def tests(place: Place, names: Sequence[str]) -> Iterator[Row]:
    """A row for each test of these files, and for each of these tests.

    Args:
        place: where
        names: those of tests, and of files
    """
    limit_s = place.size(*TEST_S)
    found: list[str] = []
    for row in apart.rows(lambda: [_collected(names)], limit_s, place.log):
        if "error" in row:
            yield row
        found += row.get("tests", [])
    for name in found:
        for row in apart.rows(
            lambda name=name: [pytest_with(name).row], place.size(*TEST_S), place.log
        ):
            yield {"test": name, **row}


def _collected(names: Sequence[str]) -> Row:
    heard = pytest_with("--collect-only", "-q", *names)
    return {"tests": heard.names, **heard.row}


def launched(place: Place) -> Iterator[Row]:
    """What a job prints at its end, however a user starts it."""
    accelerator = "gpu" if place.kind == "cuda" else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        for launcher, world_size, strategy, command in place.size(LAUNCHES, LAUNCHES[:2]):
            row: Row = {"launcher": launcher, "ranks": world_size, "strategy": strategy}
            if shutil.which(command[0]) is None:
                yield row | {"skipped": f"there is no {command[0]}"}
                continue
            script, output = Path(folder, "train.py"), Path(folder, "output")
            script.write_text(
                TRAIN.format(world_size=world_size, strategy=strategy, accelerator=accelerator)
            )
            output.touch()
            for told in apart.rows(
                lambda command=(*command, str(script)), output=output: [_started(command, output)],
                place.size(*LAUNCH_S),
                place.log,
            ):
                row |= told
            lines = output.read_text().splitlines()
            row["said"] = sorted(line for line in lines if line.startswith("rank "))
            if row.pop("exit_status", 0) or len(row["said"]) < world_size:
                row = {"error": "not every rank has come to its end"} | row
                row["last"] = lines[-10:]
            yield row


def stuck(place: Place) -> Iterator[Row]:
    """What `lightning-dsgd why` says of two ranks, one of which never enters a sum."""
    with tempfile.TemporaryDirectory() as folder:
        yield from stuck_rank.watched(Path(folder, "why"), place.kind)


def _started(command: Sequence[str], output: Path) -> Row:
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env = os.environ | as_root | {"PYTHONPATH": str(ROOT)}
    with output.open("w") as into:
        ran = subprocess.run(
            command, check=False, cwd=ROOT, env=env, stdout=into, stderr=subprocess.STDOUT
        )
    return {"exit_status": ran.returncode}
