"""Which strategy is fastest on your cluster, with your model's own steps.

    lightning-dsgd probe --ranks 4 --output cluster.json      # or under torchrun, srun, mpiexec
    # a short run with callbacks=[lightning_dsgd.StepTrace("run/")]
    lightning-dsgd advise cluster.json --trace run/ --ranks 64
    lightning-dsgd advise cluster.json --trace run/ --verify

Simulates every strategy, with settings that are worth a try, on the cluster that was probed, with
the step times that were recorded.  --verify then runs the first three here, for some steps.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_dsgd.lab.epochs import in_words
from lightning_dsgd.lab.probe.cluster import Cluster
from lightning_dsgd.lab.results import provenance, typed, write_result
from lightning_dsgd.lab.simulate.machines import Machine, probed
from lightning_dsgd.lab.simulate.recorded import Recorded


def main(argv: list[str] | None = None) -> None:
    """Prints the ranking and the advice."""
    parser = argparse.ArgumentParser(
        prog="lightning-dsgd advise",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cluster", type=Path, help="a file of `lightning-dsgd probe`")
    parser.add_argument(
        "--trace", type=Path, required=True, metavar="RUN", help="a folder of StepTrace"
    )
    parser.add_argument("--params", type=float, help="of the model; by default those of the trace")
    parser.add_argument("--ranks", type=int, help="by default as many as were probed")
    parser.add_argument("--steps", type=int, default=40, help="of each rank, simulated")
    parser.add_argument(
        "--epoch-steps", type=int, help="of an epoch; by default one epoch is endless"
    )
    parser.add_argument("--strategies", help="these alone, separated by commas")
    parser.add_argument("--verify", action="store_true", help="run the first three here")
    parser.add_argument("--verify-ranks", type=int, help="with so many; by default at most 8")
    parser.add_argument("--network", help="of --verify: emulated links, such as 1gbit")
    parser.add_argument("--output", type=Path, help="a result file (JSON)")
    args = parser.parse_args(argv)
    try:
        report = _advise(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if args.output:
        write_result(provenance(typed("lightning-dsgd advise", argv)) | report, args.output)


def _advise(args: argparse.Namespace) -> dict[str, Any]:
    cluster, recorded = Cluster.read(args.cluster), Recorded.read(args.trace)
    num_params = int(args.params or recorded.num_params or 0)
    if num_params < 1:
        raise ValueError("--params must be given where the trace does not say; try --params 25e6")
    num_ranks = args.ranks or cluster.ranks
    if num_ranks < 2 or args.steps < 1:
        raise ValueError(
            f"--ranks must be at least 2 and --steps at least 1, got {num_ranks} and {args.steps}"
        )
    machine = probed(cluster, num_params, 0.0, recorded)
    from lightning_dsgd.lab.advise import ranking, words  # load torch
    from lightning_dsgd.lab.progress import of_candidates

    candidates = _candidates(args.strategies)
    ranked = ranking.rank(
        candidates,
        machine,
        num_ranks,
        args.steps,
        shown=of_candidates,
        epoch_steps=args.epoch_steps,
    )
    has_nodes = cluster.between is not None
    beyond = words.warnings(num_ranks, cluster.ranks, recorded.num_ranks, has_nodes)
    print(f"{num_ranks} ranks, {num_params:,} parameters, {1e3 * recorded.mean_s:.0f} ms a step")
    print(in_words(args.epoch_steps) + "\n")
    print(words.table(ranked) + "\n\n" + words.legend(ranked) + "\n")
    for spec, why in ranked.refused.items():
        print(f"left out: {spec}: {why}")
    for text in beyond:
        print(text)
    print("\n" + words.advice(ranked))
    report: dict[str, Any] = {
        "settings": {
            "ranks": num_ranks,
            "params": num_params,
            "steps": args.steps,
            "epoch_steps": args.epoch_steps,
        },
        "situation": ranked.situation,
        "advised": ranked.advised.candidate.spec,
        "slow_ranks": ranked.slow_ranks,
        "dealt_by_speed": ranked.dealt_by_speed,
        "extrapolated": beyond,
        "rows": [_record(row) for row in ranked.rows],
    }
    if args.verify:
        report["verified"] = _verify(args, machine, ranked, cluster)
    return report


def _record(row: Any) -> dict[str, Any]:
    figures = asdict(row)
    return {"strategy": figures.pop("candidate")["spec"], **figures}


def _candidates(strategies: str | None) -> list[Any]:
    from lightning_dsgd.lab.advise.candidates import BASELINE, BOUND, CANDIDATES, Candidate

    if strategies is None:
        return list(CANDIDATES)
    known = {candidate.spec: candidate for candidate in CANDIDATES}
    by_name = {candidate.name: candidate.copies for candidate in reversed(CANDIDATES)}
    chosen = dict.fromkeys([BOUND, BASELINE, *strategies.split(",")])
    for spec in chosen:
        if spec.partition(":")[0] not in by_name:
            raise ValueError(
                f"--strategies must be among {', '.join(sorted(by_name))}, got {spec!r}"
            )
    return [known.get(spec) or Candidate(spec, by_name[spec.partition(":")[0]]) for spec in chosen]


def _verify(
    args: argparse.Namespace, machine: Machine, ranked: Any, cluster: Cluster
) -> list[dict[str, Any]]:
    from lightning_dsgd.lab.advise import verify

    num_ranks = args.verify_ranks or min(args.ranks or cluster.ranks, cluster.ranks, 8)
    print(f"\nrunning the first three on {num_ranks} ranks of this machine")
    rows = verify.verify(ranked, machine, num_ranks, args.network)
    print(verify.table(rows))
    return rows
