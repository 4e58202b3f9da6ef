"""Whether a rank needs as much memory at its peak as `num_copies` says, on CPUs.

    python benchmarks/memory_of_strategies.py

Every strategy, and all of `lab.decisions`, train for some steps on 4 real ranks.  Of a rank's
memory the kernel knows the peak (VmHWM, which is reset before each).  What is there before training
is taken off, and then what `no_sync` needs.  Periods are shortened, so that all ranks exchange;
that changes no amount.

copies   the peak, in copies of the weights: the median over the ranks
said     what `num_copies` says

A run that was interrupted goes on when it is started again.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import statistics
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.compare import contestants
from lightning_dsgd.algorithms import ALGORITHMS, make_algorithm
from lightning_dsgd.lab import decisions
from lightning_dsgd.lab.jobs.cells import Cell, finish
from lightning_dsgd.lab.jobs.fit import Sleeper
from lightning_dsgd.lab.jobs.job import Job

RANKS, PARAMS, STEPS, PERIOD = 4, 2048**2, 9, 4
BOUND = "no_sync"
MORE = ("hpsgd:wire_dtype=int8:outer_lr=0.7",)
"""Further strategies whose memory their pages tell."""


def shortened(spec: str) -> str:
    """The same, with periods that fit into the steps."""
    options = make_algorithm(spec).hyperparameters()
    name = "sync_period"
    return (
        spec
        if (options.get(name) or 0) <= PERIOD
        else (
            re.sub(f"{name}=\\d+", f"{name}={PERIOD}", spec)
            if name in spec
            else f"{spec}:{name}={PERIOD}"
        )
    )


def peak_bytes() -> int:
    """The most memory of this process since `clear_refs`."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def measure(cell: Cell, settings: dict[str, Any]) -> dict[str, Any]:
    """Trains on this rank, and returns what memory its fit took."""
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    steps = settings["steps"]
    data = DataLoader(TensorDataset(torch.zeros(steps * RANKS, 1)))
    module = Sleeper(settings["params"], 0.0)
    trainer = contestants.trainer(
        shortened(cell["strategy"]), RANKS, max_steps=steps, max_epochs=-1
    )
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    trainer.fit(module, data)
    return {"peak": peak_bytes() - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    folder = Path("docs/results/choosing")
    parser.add_argument("--output", type=Path, default=folder / "memory.json")
    args = parser.parse_args()
    # Large tensors are given back to the kernel as soon as they are freed.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    job = Job(f"{Path(__file__).resolve()}:measure", {"params": PARAMS, "steps": STEPS}, RANKS)
    decided = (
        choice.strategy
        for situation in decisions.SITUATIONS.values()
        for choice in situation.choices
        if choice.strategy not in decisions.NOT_COMPARED and choice.least_ranks <= RANKS
    )
    specs = list(dict.fromkeys((*ALGORITHMS, *decided, *MORE)))
    # A process's first fit loads what later ones have.
    cells = [{"strategy": BOUND, "warms_up": True}, *({"strategy": spec} for spec in specs)]
    _, *done = job.run(cells, args.output)
    peaks = {each["strategy"]: [rank["peak"] for rank in each["ranks"]] for each in done}
    rows = []
    for spec in specs:
        more = [own - bound for own, bound in zip(peaks[spec], peaks[BOUND], strict=True)]
        rows.append(
            {
                "strategy": spec,
                "copies": round(statistics.median(more) / (4 * PARAMS), 2),
                "said": make_algorithm(spec).num_copies(RANKS),
            }
        )
        print(rows[-1])
    finish(job.provenance() | {"rows": rows}, args.output)


if __name__ == "__main__":
    main()
