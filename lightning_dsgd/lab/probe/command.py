"""What a message, a sum and a selection cost on this cluster, in about a minute.

    torchrun --nproc-per-node 8 -m lightning_dsgd probe --output cluster.json
    srun python -m lightning_dsgd probe --output cluster.json
    mpiexec -n 8 python -m lightning_dsgd probe --output cluster.json
    lightning-dsgd probe --ranks 4 --output cluster.json      # as many processes of this machine

Measures latency and bandwidth between ranks, inside a node and between nodes, of one pair and of
all at once; an all-reduce by size; and what sending, adding and selecting take of a processor.
`lightning-dsgd advise` and `lightning-dsgd simulate --cluster` read the file.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

from lightning_dsgd.lab.options import Parser
from lightning_dsgd.lab.probe import cluster
from lightning_dsgd.lab.results import provenance, text, typed, write_result

_TIMEOUT_S = 300.0


def main(argv: list[str] | None = None) -> None:
    """Probes, on every rank; rank 0 writes and prints."""
    parser = Parser("probe", __doc__)
    parser.add_argument("--output", type=Path, default=Path("cluster.json"), help="file to write")
    parser.add_argument(
        "--ranks", type=int, help="processes to start here, without a launcher; by default 2"
    )
    parser.add_argument("--network", help="of these, such as 1gbit: emulated links (needs root)")
    parser.add_argument("--accelerator", default="auto", help="where ranks compute, as in Trainer")
    parser.add_argument("--json", action="store_true", help="print the file, and no table")
    args = parser.parse_args(argv)
    command = typed("lightning-dsgd probe", argv)
    from lightning_dsgd.lab.probe import ranks  # loads torch and Lightning

    num_ranks = ranks.launched()
    if num_ranks and (args.ranks or args.network):
        parser.error(
            "--ranks and --network must be left out under a launcher, which has started "
            f"{num_ranks} ranks"
        )
    if num_ranks == 1:
        parser.error(
            "a probe needs at least 2 ranks, got 1 from the launcher; try torchrun "
            "--nproc-per-node 2, or `lightning-dsgd probe --ranks 2` without a launcher"
        )
    try:
        found = _launched(num_ranks, args.accelerator) if num_ranks else _started_here(args)
    except ValueError as error:
        parser.error(str(error))
    if found:
        _report(found, command, args.output, as_json=args.json)


def _launched(num_ranks: int, accelerator: str) -> list[dict[str, Any]]:
    """Returns what rank 0 has found; on the others, nothing."""
    from lightning_dsgd.lab.jobs.run_cells import rank_of_this_process
    from lightning_dsgd.lab.probe import ranks
    from lightning_dsgd.lab.progress import of_stages

    is_first = rank_of_this_process() == 0
    found = of_stages(ranks.stages(num_ranks, accelerator), is_shown=is_first)
    ranks.leave()
    return found if is_first else []


def _started_here(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns what ranks have found that are processes of this machine."""
    from lightning_dsgd.lab.jobs.job import Job
    from lightning_dsgd.lab.jobs.network import demanded

    num_ranks = 2 if args.ranks is None else args.ranks
    if num_ranks < 2:
        raise ValueError(f"--ranks must be at least 2, got {num_ranks}; try --ranks 2")
    if args.accelerator not in ("auto", "cpu"):
        raise ValueError(
            f"--accelerator must be cpu with --ranks, got {args.accelerator!r}; start ranks on "
            "GPUs by torchrun, srun or mpiexec"
        )
    settings = {"ranks": num_ranks}
    function = "lightning_dsgd.lab.probe.ranks:run"
    link = demanded(args.network)
    job = Job(function, settings, num_ranks, link, cell_timeout_s=_TIMEOUT_S)
    with tempfile.TemporaryDirectory() as folder:
        (result,) = job.run([{"probe": "all"}], Path(folder, "probe.json"))
    found: list[dict[str, Any]] = result["ranks"][0]["found"]
    return found


def _report(found: list[dict[str, Any]], command: str, output: Path, *, as_json: bool) -> None:
    from lightning_dsgd.lab.probe import measure

    result, busy = measure.cluster(found), measure.busy(found)
    pairs = [each for each in found if "pair" in each]
    report = {**result.to_json(), "pairs": pairs, "busy": busy, **provenance(command)}
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
        if not as_json:
            print(cluster.table(result))
        if busy:
            print(busy)
        write_result(report, output)
    if as_json:
        print(text(report), end="")
