"""What a micro-batch of `balanced` costs the thread that trains, beside its gradient.

    python benchmarks/unit_cost.py

4 real ranks go through steps of k micro-batches each.  A micro-batch is a sleep, or plain Python,
which holds the interpreter all the time.  Timed are the calls between two of them: one is finished,
the next is begun, which the dealer has granted meanwhile.  Micro-batches for which a rank had to
wait are counted, and not timed.  The rounds of all cells alternate.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch.distributed as dist

from benchmarks import script, thread_cost
from lightning_dsgd.data.units.dealing import UnitDealing
from lightning_dsgd.data.units.protocol import NONE
from lightning_dsgd.lab.jobs.cells import Cell, finish
from lightning_dsgd.lab.jobs.job import Job
from lightning_dsgd.transport.process_group import ProcessGroupTransport

NUM_RANKS = 4


def run_cell(cell: Cell, settings: dict[str, Any]) -> dict[str, Any]:
    """All steps on this rank: the seconds of the calls between two micro-batches."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    net, num_steps = ProcessGroupTransport(), settings["steps"]
    dealing = UnitDealing(net.sub("units"), backups=True, on_closed=lambda step: None)
    homes = [rank for _ in range(settings["k"]) for rank in range(NUM_RANKS)]
    dealing.know(0, [homes] * num_steps)
    seconds: list[float] = []
    num_waits = 0
    for step in range(num_steps):
        dealing.begin_step(step)
        unit = dealing.take(waits=True)
        while unit != NONE:
            thread_cost.take(cell["unit"], settings["unit_s"])
            is_granted = dealing.has_next
            begin = time.perf_counter()
            dealing.finish(lambda: None)
            unit = dealing.take(waits=True)
            if is_granted and unit != NONE:
                seconds.append(time.perf_counter() - begin)
            else:
                num_waits += 1
        net.barrier().wait()  # in the place of the sum
    dealing.close()
    net.barrier().wait()
    net.close()
    return {"seconds": seconds, "waits": num_waits, "load": os.getloadavg()[0]}


def summarize(results: list[Cell], unit_s: float) -> list[dict[str, Any]]:
    """A row for each kind of micro-batch."""
    rows = []
    for kind in dict.fromkeys(result["unit"] for result in results):
        ranks = [rank for r in results if r["unit"] == kind for rank in r["ranks"]]
        every = [seconds for rank in ranks for seconds in rank["seconds"]]
        rows.append(
            {
                "unit": kind,
                **thread_cost.figures(every),
                "share_of_unit": statistics.median(every) / unit_s,
                "timed": len(every),
                "waited_for": sum(rank["waits"] for rank in ranks),
                "load": round(statistics.median(rank["load"] for rank in ranks), 1),
            }
        )
    return rows


def main() -> None:
    parser = script.parser(__doc__, "docs/results/balanced/unit_cost.json")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--k", type=int, default=8, help="micro-batches of each rank in a step")
    parser.add_argument("--unit-s", type=float, default=0.04)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    settings = {"steps": args.steps, "k": args.k, "unit_s": args.unit_s}
    job = Job(f"{__file__}:run_cell", settings, NUM_RANKS)
    results = job.run(thread_cost.cells("unit", args.rounds), args.output)
    rows = summarize(results, args.unit_s)
    for row in rows:
        print(
            f"{row['unit']:14} {thread_cost.in_words(row)}, "
            f"{row['share_of_unit']:.2%} of a micro-batch of {1e3 * args.unit_s:g} ms, "
            f"{row['timed']} timed, {row['waited_for']} waited for, load {row['load']}"
        )
    finish(job.provenance() | {"rows": rows}, args.output)


if __name__ == "__main__":
    main()
