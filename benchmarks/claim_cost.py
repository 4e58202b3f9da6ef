"""What a claim of a batch costs the thread that trains.

    python benchmarks/claim_cost.py

4 real ranks claim an epoch's batches, as a loader without workers does.  A step is a sleep, or
plain Python, which holds the interpreter all the time.  Timed are the calls between two steps: the
batch begins, ends, and the next is secured.  The rounds of all cells alternate.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch.distributed as dist

from benchmarks import script, thread_cost
from lightning_dsgd.data.claims.claims import Epoch
from lightning_dsgd.data.claims.dealing import ClaimDealing
from lightning_dsgd.lab.jobs.cells import Cell, finish
from lightning_dsgd.lab.jobs.job import Job
from lightning_dsgd.transport.process_group import ProcessGroupTransport

NUM_RANKS = 4


def run_cell(cell: Cell, settings: dict[str, Any]) -> dict[str, Any]:
    """One epoch on this rank: the seconds of the calls between two steps."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    net = ProcessGroupTransport()
    dealing = ClaimDealing(net.sub("claims"))
    dealing.begin_epoch(Epoch(0, settings["batches"] * NUM_RANKS))
    seconds, position = [], 0
    dealing.secure(0, is_urgent=True)
    while True:
        begin = time.perf_counter()
        dealing.begin(position)
        middle = time.perf_counter()
        thread_cost.take(cell["step"], settings["step_s"])
        after = time.perf_counter()
        dealing.end()
        position += 1
        has_more = dealing.secure(position, is_urgent=True)
        if not has_more:  # the end of the epoch, where it asks again
            break
        seconds.append(middle - begin + time.perf_counter() - after)
    net.barrier().wait()
    dealing.close()
    net.barrier().wait()
    net.close()
    return {"seconds": seconds}


def summarize(results: list[Cell], step_s: float) -> list[dict[str, Any]]:
    """A row for each kind of step."""
    rows = []
    for kind in dict.fromkeys(result["step"] for result in results):
        ranks = [rank["seconds"] for r in results if r["step"] == kind for rank in r["ranks"]]
        every = [seconds for mine in ranks for seconds in mine]
        rows.append(
            {
                "step": kind,
                **thread_cost.figures(every),
                "share_of_step": statistics.median(every) / step_s,
                "claims": len(every),
            }
        )
    return rows


def main() -> None:
    parser = script.parser(__doc__, "docs/results/claimed_batches/claim_cost.json")
    parser.add_argument("--batches", type=int, default=100, help="of each rank")
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    settings = {"batches": args.batches, "step_s": args.step_s}
    job = Job(f"{__file__}:run_cell", settings, NUM_RANKS)
    results = job.run(thread_cost.cells("step", args.rounds), args.output)
    rows = summarize(results, args.step_s)
    for row in rows:
        print(
            f"{row['step']:14} {thread_cost.in_words(row)}, "
            f"{row['share_of_step']:.2%} of a step of {1e3 * args.step_s:g} ms"
        )
    finish(job.provenance() | {"rows": rows}, args.output)


if __name__ == "__main__":
    main()
