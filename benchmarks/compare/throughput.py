r"""Steps per second of several strategies, in one job, with simulated computation and stragglers.

    python -m benchmarks throughput --strategies ddp,wagma,wagma:overlap=true,no_sync --ranks 8 \
        --network 1gbit --compute-ms 400 --delay-ms 320 --delayed-ranks 2 --params 1e6 --steps 30 \
        --output FILE.json

All ranks are started once; then they run one `Trainer.fit` after another, each strategy once per
round, in an order that changes from round to round.  Computation is a sleep, so that many ranks fit
on few cores, and the same random ranks are delayed for every strategy of a round.

steps_per_s        steps / (time until the slowest rank has done its last step)
mean_steps_per_s   the mean of the ranks' steps / (time until that rank has done its last step)
with_finish        steps / (time until the slowest rank has the final model)
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Final

from benchmarks.compare import job_arguments
from benchmarks.machines import EMULATED
from lightning_dsgd.lab.jobs.cells import Cell, finish, in_turn
from lightning_dsgd.lab.link import Link
from lightning_dsgd.lab.options import Parser
from lightning_dsgd.lab.results import typed

STATISTICS: Final = (
    "steps_per_s", "mean_steps_per_s", "with_finish", "wait_s_per_step", "mb_sent_per_step",
    "late_share",
)  # fmt: skip
LINK_CHECK: Final = "allreduce_bandwidth"
"""The cell that measures the network itself."""


def flatten(result: Cell, steps: int) -> dict[str, Any]:
    """Returns a cell's figures in one dict: the slowest rank's, or the mean over the ranks."""
    ranks = result["ranks"]
    flat: dict[str, Any] = {
        "strategy": result["strategy"],
        "round": result["round"],
        "steps_per_s": steps / max(rank["seconds"] for rank in ranks),
        "mean_steps_per_s": statistics.mean(steps / rank["seconds"] for rank in ranks),
        "with_finish": steps / max(rank["finished_s"] for rank in ranks),
        "seconds": [rank["seconds"] for rank in ranks],
    }
    for name in ranks[0]:
        if name not in ("seconds", "finished_s"):
            flat[name] = statistics.mean(rank[name] for rank in ranks)
    return flat


def summarize(cells: list[dict[str, Any]], baseline: str) -> list[dict[str, Any]]:
    """Returns each strategy's medians over the rounds, and the median ratio within a round."""
    by_round: dict[int, dict[str, float]] = {}
    for cell in cells:
        by_round.setdefault(cell["round"], {})[cell["strategy"]] = cell["steps_per_s"]
    rows = []
    for spec in dict.fromkeys(cell["strategy"] for cell in cells):
        mine = [cell for cell in cells if cell["strategy"] == spec]
        row: dict[str, Any] = {"strategy": spec}
        for name in STATISTICS:
            values = [cell[name] for cell in mine if name in cell]
            row[name] = statistics.median(values) if values else None
        for other, key in ((baseline, "ratio"), ("no_sync", "of_no_sync")):
            ratios = [r[spec] / r[other] for r in by_round.values() if spec in r and other in r]
            row[key] = statistics.median(ratios) if ratios else None
            row[f"{key}_range"] = [min(ratios), max(ratios)] if ratios else None
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]], baseline: str) -> str:
    """Returns the summary in Markdown."""
    lines = [
        f"| strategy | steps/s (slowest rank) | steps/s (mean of ranks) | x {baseline} "
        "| of no_sync | waited, ms per step | MB sent per step | late |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = [
            f"{row['steps_per_s']:.2f}",
            _or_dash(row.get("mean_steps_per_s"), "{:.2f}"),  # older files have no such figure
            _or_dash(row["ratio"], "{:.2f}"),
            _or_dash(row["of_no_sync"], "{:.2f}"),
            _or_dash(row["wait_s_per_step"], "{:.0f}", 1e3),
            _or_dash(row["mb_sent_per_step"], "{:.2f}"),
            _or_dash(row["late_share"], "{:.0%}"),
        ]
        lines.append(f"| `{row['strategy']}` | " + " | ".join(figures) + " |")
    return "\n".join(lines)


def _or_dash(value: float | None, form: str, factor: float = 1.0) -> str:
    return "" if value is None else form.format(factor * value)


def main(argv: list[str] | None = None) -> None:
    """Runs the job and writes the result file."""
    parser = Parser("throughput", __doc__, prog="python -m benchmarks throughput")
    job_arguments.add_to(
        parser,
        strategies="ddp,ddp_bf16,ddp_powersgd,allreduce:wire_dtype=int8:overlap=true,"
        "local_sgd:sync_period=1,wagma,no_sync",
        compute_ms=1e3 * EMULATED.compute_s,
        delay_ms=1e3 * EMULATED.delay_s,
        delayed_ranks=EMULATED.delayed_ranks,
    )
    parser.add_argument(
        "--params", type=float, default=float(EMULATED.num_params), help="weights of the model"
    )
    parser.add_argument("--steps", type=int, default=30, help="steps of a strategy in a round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; in each all take their turn")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where ranks train; each needs its own GPU, unless they share one",
    )
    parser.add_argument(
        "--share-device", action="store_true", help="trains all ranks on the first GPU"
    )
    parser.add_argument(
        "--delay-on",
        choices=("host", "device"),
        default="host",
        help="what is late on a delayed rank: its host, which sleeps, or its GPU, on which a "
        "kernel spins; the latter needs --device cuda",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("throughput.json"), help="file to write"
    )
    args = parser.parse_args(argv)
    job_arguments.refuse(parser, args)
    shares = args.share_device and args.device != "cpu"
    reason = why_not_on(args.device, 1 if shares else args.ranks) or why_not_late(
        args.delay_on, args.device
    )
    if reason:
        parser.error(reason)
    link, network = job_arguments.chosen_link(args.network)
    print(f"{args.ranks} ranks, {network}")
    specs = args.strategies.split(",")
    job = job_arguments.job(
        "benchmarks.compare.throughput_cell:run",
        args,
        link,
        {
            "steps": args.steps,
            "params": int(args.params),
            "device": args.device,
            "shares_device": shares,
            "delay_on": args.delay_on,
            "link_bit_s": link.rate_bit_s if link else None,
        },
    )
    plan: list[Cell] = [{"strategy": LINK_CHECK, "round": 0}] if args.ranks > 1 else []
    plan += in_turn(specs, "round", args.rounds)
    results = job.run(plan, args.output)
    from lightning_dsgd.lab.in_force import in_force  # loads torch

    report = job.provenance(typed("python -m benchmarks throughput", argv))
    report["hyperparameters"] = in_force(args.strategies.split(","), [args.ranks])
    report["network"] = network
    if args.ranks > 1:
        report["link_check"] = check_link(results.pop(0), link)
    cells = [flatten(result, args.steps) for result in results]
    report["summary"] = summarize(cells, specs[0])
    report["cells"] = cells
    print("\n" + table(report["summary"], specs[0]))
    finish(report, args.output)


def why_not_on(device: str, ranks: int) -> str:
    """Says why so many ranks cannot train on a device; empty if they can."""
    if device == "cpu":
        return ""
    from lightning_dsgd.lab import accelerators  # loads torch

    return accelerators.why_no_devices(device, ranks)


def why_not_late(delay_on: str, device: str) -> str:
    """Says why kernels cannot be slow on a device; empty if they can."""
    if delay_on == "host" or device != "cpu":
        return ""
    return f"--delay-on device needs --device cuda, got --device {device}; try --delay-on host"


def check_link(result: Cell, link: Link | None) -> dict[str, Any]:
    """Returns the all-reduce rate of the slowest rank, and its share of the link's rate."""
    rate = min(rank["rate_bit_s"] for rank in result["ranks"])
    share = rate / link.rate_bit_s if link else None
    asked = f", {share:.2f} of the link's" if share else ""
    print(f"an all-reduce alone moves {rate / 1e9:.3f} Gbit/s in each direction{asked}")
    return {"rate_bit_s": rate, "share_of_link": share}


if __name__ == "__main__":
    main()
