"""With which strategy training ends soonest on your cluster, with your model's own steps.

    lightning-dsgd probe --ranks 4 --output cluster.json      # or under torchrun, srun, mpiexec
    # a short run with callbacks=[lightning_dsgd.StepTrace("run/")]
    lightning-dsgd advise cluster.json --trace run/ --ranks 64
    lightning-dsgd advise cluster.json --trace run/ --verify

Simulates every strategy, with settings that are worth a try, on the cluster that was probed, with
the step times that were recorded.  All ranks stand still after each epoch; in rows with "claimed"
they claim its batches.  --verify then runs the first three here, for some steps.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from lightning_dsgd.lab import epochs
from lightning_dsgd.lab.options import Parser
from lightning_dsgd.lab.probe.cluster import Cluster
from lightning_dsgd.lab.results import provenance, text, typed, write_result
from lightning_dsgd.lab.simulate.machines import Machine, probed
from lightning_dsgd.lab.simulate.recorded import Recorded

RECORDED: Final = "recorded"
"""Stands for an epoch as long as in the trace."""
ENDLESS: Final = "endless"


def main(argv: list[str] | None = None) -> None:
    """Prints the ranking and the advice."""
    parser = Parser("advise", __doc__)
    parser.add_argument("cluster", type=Path, help="a file of `lightning-dsgd probe`")
    parser.add_argument(
        "--trace", type=Path, required=True, metavar="RUN", help="a folder of StepTrace"
    )
    parser.add_argument("--params", type=float, help="of the model; by default those of the trace")
    parser.add_argument("--ranks", type=int, help="by default as many as were probed")
    parser.add_argument("--steps", type=int, default=40, help="to simulate, about as many")
    parser.add_argument(
        "--epoch-steps",
        type=_epoch_steps,
        default=RECORDED,
        metavar="STEPS",
        help=f"of each rank in an epoch, or {ENDLESS}; by default as in the trace, with as many "
        f"samples, and {ENDLESS} where the trace does not say",
    )
    parser.add_argument("--strategies", help="these alone, separated by commas")
    parser.add_argument("--verify", action="store_true", help="run the first three here")
    parser.add_argument("--verify-ranks", type=int, help="with so many; by default at most 8")
    parser.add_argument("--network", help="of --verify: emulated links, such as 1gbit")
    parser.add_argument("--output", type=Path, help="a result file (JSON)")
    parser.add_argument("--json", action="store_true", help="print the file, and no table")
    args = parser.parse_args(argv)
    with contextlib.redirect_stdout(io.StringIO() if args.json else sys.stdout):
        try:
            report = provenance(typed("lightning-dsgd advise", argv)) | _advise(args)
        except (ValueError, OSError) as error:
            parser.error(str(error))
        if args.output:
            write_result(report, args.output)
    if args.json:
        print(text(report))


def _advise(args: argparse.Namespace) -> dict[str, Any]:
    cluster, recorded = Cluster.read(args.cluster), Recorded.read(args.trace)
    num_params = int(args.params or recorded.num_params or 0)
    if num_params < 1:
        raise ValueError("--params must be given where the trace does not say; try --params 25e6")
    num_ranks = args.ranks or cluster.ranks
    is_recorded = args.epoch_steps == RECORDED
    epoch_steps = recorded.epoch_steps_of(num_ranks) if is_recorded else args.epoch_steps
    epochs.check(epoch_steps, epochs.EQUAL)
    if num_ranks < 2 or args.steps < 1:
        raise ValueError(
            f"--ranks must be at least 2 and --steps at least 1, got {num_ranks} and {args.steps}"
        )
    machine = probed(cluster, num_params, 0.0, recorded)
    from lightning_dsgd.lab.advise import ranking, words  # load torch
    from lightning_dsgd.lab.progress import of_candidates

    num_steps = _whole_epochs(args.steps, epoch_steps)
    candidates = _candidates(args.strategies, num_ranks)
    ranked = ranking.rank(
        candidates,
        machine,
        num_ranks,
        num_steps,
        shown=of_candidates,
        epoch_steps=epoch_steps,
        on_device=cluster.device != "cpu",
    )
    has_nodes = cluster.between is not None
    beyond = words.warnings(num_ranks, cluster.ranks, recorded.num_ranks, has_nodes)
    print(f"{num_ranks} ranks, {num_params:,} parameters, {1e3 * recorded.mean_s:.0f} ms a step")
    print(words.setting(epoch_steps, num_steps, recorded if is_recorded else None) + "\n")
    print(words.table(ranked) + "\n\n" + words.legend(ranked) + "\n")
    for spec, why in ranked.refused.items():
        print(f"left out: {spec}: {why}")
    for line in beyond:
        print(line)
    print("\n" + words.advice(ranked))
    report: dict[str, Any] = {
        "settings": {
            "ranks": num_ranks,
            "params": num_params,
            "steps": num_steps,
            "epoch_steps": epoch_steps,
        },
        "situation": ranked.situation,
        "advised": ranked.advised.label,
        "slow_ranks": ranked.slow_ranks,
        "extrapolated": beyond,
        "rows": [_record(row) for row in ranked.rows],
    }
    if args.verify:
        report["verified"] = _verify(args, machine, ranked, cluster)
    return report


def _epoch_steps(text: str) -> int | str | None:
    if text == RECORDED:
        return text
    try:
        return None if text == ENDLESS else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be such as 500, or {ENDLESS}, got {text}") from None


def _whole_epochs(num_steps: int, epoch_steps: int | None) -> int:
    """Returns about as many steps that fill whole epochs; as many where an epoch has more."""
    if epoch_steps is None or epoch_steps > num_steps:
        return num_steps
    return epoch_steps * round(num_steps / epoch_steps)


def _record(row: Any) -> dict[str, Any]:
    figures = asdict(row)
    del figures["candidate"]
    return {"strategy": row.label, **figures}


def _candidates(strategies: str | None, num_ranks: int) -> list[Any]:
    from lightning_dsgd.lab.advise.candidates import BASELINE, BOUND, Candidate, all_for

    known = all_for(num_ranks)
    if strategies is None:
        return known
    names = {candidate.name for candidate in known}
    chosen = dict.fromkeys([BOUND, BASELINE, *strategies.split(",")])
    for spec in chosen:
        if spec.partition(":")[0] not in names:
            raise ValueError(f"--strategies must be among {', '.join(sorted(names))}, got {spec!r}")
    return [Candidate(spec) for spec in chosen]


def _verify(
    args: argparse.Namespace, machine: Machine, ranked: Any, cluster: Cluster
) -> list[dict[str, Any]]:
    from lightning_dsgd.lab.advise import verify

    num_ranks = args.verify_ranks or min(args.ranks or cluster.ranks, cluster.ranks, 8)
    print(f"\nrunning the first three on {num_ranks} ranks of this machine")
    rows = verify.verify(ranked, machine, num_ranks, args.network)
    print(verify.table(rows))
    return rows
