r"""Steps, seconds and bytes that strategies need to train a task, seed by seed, in one job.

    python -m benchmarks convergence --task digits --strategies allreduce,wagma,wagma:group_size=1 \
        --ranks 4 --epochs 20 --seeds 3 --compute-ms 20 --delay-ms 16 --delayed-ranks 2 \
        --target 0.97 --output FILE.json

Every strategy trains once per seed, on the same data and from the same weights, in an order that
changes from seed to seed.  After each epoch the consensus model is evaluated on the validation
data; the time this takes does not count.  With `--compute-ms` a step takes at least that long;
`--delay-ms` delays random ranks in every step, the same ones for every strategy.  Options of the
model and the data can be changed: `--model '{"lr": 0.01}' --data '{"batch_size": 32}'`.

best      the best value over all epochs, mean over the seeds
last      the value after the last epoch, mean over the seeds
to target when the value first reaches the target: optimizer steps, seconds, MB sent by a rank; the
          median over the seeds, and how many of them got there
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.compare import job_arguments
from benchmarks.compare.workloads import WORKLOADS
from lightning_dsgd.lab.jobs.cells import Cell, finish, in_turn
from lightning_dsgd.lab.options import Parser
from lightning_dsgd.lab.results import typed


def flatten(result: Cell) -> dict[str, Any]:
    """Returns one curve per cell: the seconds of the slowest rank, the means of other figures."""
    curves = [rank["rows"] for rank in result["ranks"]]
    rows = []
    for epoch in zip(*curves, strict=True):
        row = {key: statistics.mean(rank[key] for rank in epoch) for key in epoch[0]}
        rows.append(row | {"seconds": max(rank["seconds"] for rank in epoch)})
    return {"strategy": result["strategy"], "seed": result["seed"], "rows": rows}


def summarize(
    cells: list[dict[str, Any]], baseline: str, target: float | None, *, higher_is_better: bool
) -> list[dict[str, Any]]:
    """Returns one row per strategy, over its seeds; each seed is compared to the baseline's."""
    sign = 1.0 if higher_is_better else -1.0
    last = {(cell["strategy"], cell["seed"]): cell["rows"][-1]["value"] for cell in cells}
    summary = []
    for spec in dict.fromkeys(cell["strategy"] for cell in cells):
        mine = [cell for cell in cells if cell["strategy"] == spec]
        values = [cell["rows"][-1]["value"] for cell in mine]
        differences = [last[spec, cell["seed"]] - last[baseline, cell["seed"]] for cell in mine]
        row: dict[str, Any] = {
            "strategy": spec,
            "last": statistics.mean(values),
            "last_range": [min(values), max(values)],
            "best": statistics.mean(
                sign * max(sign * entry["value"] for entry in cell["rows"]) for cell in mine
            ),
            "difference": statistics.mean(differences),
            "seconds": statistics.median(cell["rows"][-1]["seconds"] for cell in mine),
            "mb_sent": statistics.median(cell["rows"][-1]["mb_sent"] for cell in mine),
        }
        for key in ("late_share", "staleness", "consensus_distance"):
            if all(key in cell["rows"][-1] for cell in mine):
                row[key] = statistics.mean(cell["rows"][-1][key] for cell in mine)
        if target is not None:
            reached = [
                next((r for r in cell["rows"] if sign * r["value"] >= sign * target), None)
                for cell in mine
            ]
            there = [entry for entry in reached if entry is not None]
            row["reached"] = len(there)
            for key in ("step", "seconds", "mb_sent"):
                figures = [entry[key] for entry in there]
                row[f"{key}_to_target"] = statistics.median(figures) if figures else None
        summary.append(row)
    return summary


def table(summary: list[dict[str, Any]], *, percent: bool, target: float | None) -> str:
    """Returns the summary in Markdown."""
    scale, unit = (100, " %") if percent else (1, "")
    baseline = summary[0]["strategy"]
    head = ["strategy", f"last{unit}", f"- {baseline}", f"best{unit}", "seconds", "MB sent", "late"]
    if target is not None:
        head += ["reached", "steps to target", "seconds to target", "MB to target"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in summary:
        low, high = row["last_range"]
        cells = [
            f"`{row['strategy']}`",
            f"{scale * row['last']:.2f} ({scale * low:.2f} to {scale * high:.2f})",
            f"{scale * row['difference']:+.2f}",
            f"{scale * row['best']:.2f}",
            f"{row['seconds']:.1f}",
            f"{row['mb_sent']:.1f}" if row["mb_sent"] >= 0 else "",
            f"{row['late_share']:.0%}" if "late_share" in row else "",
        ]
        if target is not None:
            cells.append(str(row["reached"]))
            for key, form in (("step", ".0f"), ("seconds", ".1f"), ("mb_sent", ".1f")):
                value = row[f"{key}_to_target"]
                cells.append("" if value is None or value < 0 else format(value, form))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _json(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError(f"must be such as '{{\"lr\": 0.01}}', got {text!r}")
    return given


def main(argv: list[str] | None = None) -> None:
    """Runs the job and writes the result file."""
    parser = Parser("convergence", __doc__, prog="python -m benchmarks convergence")
    parser.add_argument("--task", choices=WORKLOADS, default="digits", help="what is trained")
    job_arguments.add_to(
        parser,
        strategies="allreduce,ddp_bf16,ddp_powersgd,allreduce:wire_dtype=int8:overlap=true,"
        "local_sgd,wagma",
        compute_ms=0.0,
        delay_ms=0.0,
        delayed_ranks=0,
    )
    parser.add_argument("--epochs", type=int, default=20, help="epochs of a training")
    parser.add_argument("--val-every", type=int, default=1, help="epochs between evaluations")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each strategy")
    for name in ("model", "data"):
        parser.add_argument(
            f"--{name}", type=_json, default={}, metavar="JSON", help=f"options of the {name}"
        )
    parser.add_argument(
        "--target", type=float, help="the monitored value to be reached; by default none"
    )
    parser.add_argument(
        "--wandb",
        metavar="PROJECT",
        help="log to W&B too, offline unless WANDB_MODE says otherwise",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("convergence.json"), help="file to write"
    )
    args = parser.parse_args(argv)
    job_arguments.refuse(parser, args)
    for package in ("wandb", "matplotlib") if args.wandb is not None else ():
        if importlib.util.find_spec(package) is None:
            parser.error(
                f"--wandb needs the package {package}, which is not installed; "
                f"install it (pip install {package}), or leave --wandb out"
            )
    link, network = job_arguments.chosen_link(args.network)
    print(f"{args.task}, {args.ranks} ranks, {network}")
    workload, specs = WORKLOADS[args.task], args.strategies.split(",")
    job = job_arguments.job(
        "benchmarks.compare.convergence_cell:run",
        args,
        link,
        {
            "task": args.task,
            "epochs": args.epochs,
            "val_every": args.val_every,
            "model": args.model,
            "data": args.data,
        },
    )
    results = job.run(in_turn(specs, "seed", args.seeds), args.output)
    cells = [flatten(result) for result in results]
    cells.sort(key=lambda cell: (specs.index(cell["strategy"]), cell["seed"]))
    from lightning_dsgd.lab.in_force import in_force  # loads torch

    report = job.provenance(typed("python -m benchmarks convergence", argv))
    report["hyperparameters"] = in_force(args.strategies.split(","), [args.ranks])
    report |= {"network": network, "monitor": workload.monitor, "target": args.target}
    report["higher_is_better"] = workload.higher_is_better
    report["summary"] = summarize(
        cells, specs[0], args.target, higher_is_better=workload.higher_is_better
    )
    report["cells"] = cells
    percent = "accuracy" in workload.monitor
    print("\n" + table(report["summary"], percent=percent, target=args.target))
    finish(report, args.output)
    if args.wandb is not None:
        from benchmarks.compare import tracking  # loads wandb, which a help text does without

        tracking.log_comparison(report, args.output, args.wandb)


if __name__ == "__main__":
    main()
