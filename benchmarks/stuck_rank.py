"""What `lightning-dsgd why` says of two ranks that share a GPU, of which one never enters a sum.

    python benchmarks/stuck_rank.py         # on a GPU, over NCCL
    python benchmarks/stuck_rank.py --cpu   # over gloo

Rank 1 waits for a file in its eleventh step.  Does `why` name that rank, its line and the
collective?
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))  # before what is installed, if anything is

from tests.support.worlds import share_a_gpu

ROOT = Path(__file__).parents[1]
STUCK_AFTER_S = 5
WITHIN_S = 120


def wait_for_a_file() -> None:
    time.sleep(1000)


def train(kind: str) -> None:
    """What a rank does."""
    rank = int(os.environ["RANK"])
    if kind == "cuda":
        share_a_gpu(rank)
    device = torch.device(kind)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 4).to(device))
    for step in range(1000):
        if rank == 1 and step == 10:
            wait_for_a_file()
        model(torch.ones(2, 4, device=device)).sum().backward()


def watched(to: Path, kind: str) -> Generator[dict[str, Any]]:
    """Yields one row: what is printed of such a job, and whether that names the rank.

    Args:
        to: a new folder for the records
        kind: the type of the ranks' device
    """
    why = [sys.executable, "-m", "lightning_dsgd", "why", "--end", "--only-stuck"]
    why += ["--stuck-after", str(STUCK_AFTER_S), "--to", str(to), "--"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*why, *torchrun, "--nproc-per-node", "2", __file__, "--as-rank", kind]
    row: dict[str, Any] = {"ranks": 2, "stuck_after_s": STUCK_AFTER_S}
    begin = time.monotonic()
    try:
        ran = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=WITHIN_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        yield row | {"error": str(error)}
        return
    lines = (ran.stdout + ran.stderr).splitlines()
    row |= {"seconds": round(time.monotonic() - begin, 1), "exit_status": ran.returncode}
    row["said"] = [line for line in lines if line.startswith("why: ")]
    said = "\n".join(row["said"])
    if "rank 1 never entered all_reduce" not in said or "in wait_for_a_file" not in said:
        row["error"] = f"the rank, its line and the collective were not named: {lines[-20:]}"
    yield row


def main() -> None:
    if "--as-rank" in sys.argv:
        train(sys.argv[-1])
        return
    kind = "cpu" if "--cpu" in sys.argv else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        for row in watched(Path(folder, "why"), kind):
            print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
