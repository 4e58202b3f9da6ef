r"""How fast a strategy would be on a machine that is not here.

    lightning-dsgd simulate --strategies wagma,allreduce --ranks 4,16,64,256 --profile piz-daint \
        --params 25e6 --steps 50 --output simulated.json --plot simulated.png
    lightning-dsgd simulate --cluster cluster.json --recorded run/ --ranks 8,64 --params 25e6
    lightning-dsgd simulate --check throughput.json    # a file of `python -m benchmarks throughput`

The profile, or the cluster's file, says what steps, messages and sums take.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from lightning_dsgd.lab.epochs import CLAIMED, EQUAL, in_words
from lightning_dsgd.lab.options import Parser
from lightning_dsgd.lab.probe.cluster import Cluster
from lightning_dsgd.lab.results import provenance, typed, write_result
from lightning_dsgd.lab.simulate.machines import MACHINES, Machine, probed
from lightning_dsgd.lab.simulate.recorded import Recorded

_FIGURES: Final = (
    ("--params", float, "weights of the model"),
    ("--compute-ms", float, "what a step takes without its delay"),
    ("--delay-ms", float, "how late a delayed rank is in a step"),
    ("--delayed-ranks", int, "how many random ranks are late in each step"),
    ("--latency-us", float, "what a message takes, however short"),
    ("--gbit-s", float, "how much each rank sends, and receives, at once"),
)
"""The options that replace figures of a profile."""


def main(argv: list[str] | None = None) -> None:
    """Simulates, or checks a result file."""
    parser = Parser("simulate", __doc__)
    parser.add_argument("--strategies", default="allreduce,wagma", help="separated by commas")
    parser.add_renamed("--algorithms", "--strategies")
    parser.add_argument("--ranks", default="4,16,64", help="numbers of ranks, separated by commas")
    parser.add_argument(
        "--profile",
        default="piz-daint",
        choices=MACHINES,
        metavar="MACHINE",
        help=f"the machine that is simulated: {', '.join(MACHINES)} (default: %(default)s)",
    )
    for option, kind, text in _FIGURES:
        parser.add_argument(option, type=kind, help=f"{text}; by default the profile's")
    parser.add_argument("--steps", type=int, default=50, help="steps of each rank")
    parser.add_argument(
        "--epoch-steps", type=int, help="steps of an epoch; by default one epoch is endless"
    )
    parser.add_argument(
        "--data", choices=(EQUAL, CLAIMED), default=EQUAL, help="how ranks get an epoch's batches"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn at random")
    parser.add_argument("--output", type=Path, help="a result file (JSON) to write")
    parser.add_argument("--plot", type=Path, help="an image to write (needs matplotlib)")
    parser.add_argument(
        "--cluster", type=Path, help="a file of `lightning-dsgd probe`, in place of a profile"
    )
    parser.add_argument(
        "--recorded", type=Path, metavar="RUN", help="a folder of StepTrace: its step times"
    )
    parser.add_argument("--trace", type=Path, help="a folder to write, for `timeline`")
    parser.add_argument(
        "--check", type=Path, help="compares with this file of `benchmarks throughput`"
    )
    args = parser.parse_args(argv)
    if args.check and args.trace:
        parser.error("--trace must be left out with --check, which runs each strategy many times")
    command = typed("lightning-dsgd simulate", argv)
    try:
        report = _check(args.check) if args.check else _simulate(args)
    except (ValueError, OSError) as err:
        parser.error(str(err))
    if args.output:
        write_result(provenance(command) | report, args.output)


def _simulate(args: argparse.Namespace) -> dict[str, Any]:
    from lightning_dsgd.lab.simulate import comparison  # loads torch

    machine = overridden(chosen(args), args)
    ranks = [int(p) for p in args.ranks.split(",")]
    specs = args.strategies.split(",")
    name = str(args.cluster or args.profile)
    dealt = args.epoch_steps, args.data
    options = (args.steps, args.seed, args.trace, *dealt)
    rows = comparison.compare(specs, ranks, name, machine, *options)
    print(comparison.table(rows) + "\n\n" + in_words(*dealt))
    if args.plot:
        from matplotlib.figure import Figure  # an extra, which only a plot needs

        figure = Figure(figsize=(7, 5), layout="tight")
        axes = figure.subplots()
        comparison.plot(axes, rows)
        axes.set_title(name)
        figure.savefig(args.plot, dpi=110)
    choices = {"epoch_steps": args.epoch_steps, "data": args.data, "seed": args.seed}
    return {"profile": asdict(machine), "steps": args.steps, **choices, "rows": rows}


def chosen(args: argparse.Namespace) -> Machine:
    """Returns the profile's machine, or the probed one, with step times that were recorded."""
    recorded = None if args.recorded is None else Recorded.read(args.recorded)
    if args.cluster is None:
        return replace(MACHINES[args.profile], recorded=recorded)
    if recorded is None and args.compute_ms is None:
        raise ValueError(
            "--cluster must come with the time of a step, got neither --recorded nor --compute-ms; "
            "try --recorded run/, a folder of StepTrace"
        )
    num_params = recorded.num_params if recorded is not None else None
    if num_params is None and args.params is None:
        raise ValueError("--cluster must come with the size of the model; try --params 25e6")
    return probed(Cluster.read(args.cluster), num_params or 1, 0.0, recorded)


def overridden(machine: Machine, args: argparse.Namespace) -> Machine:
    """Returns the machine with the figures that the command line gives in place of its own."""
    given: dict[str, Any] = {
        "num_params": None if args.params is None else int(args.params),
        "compute_s": None if args.compute_ms is None else args.compute_ms / 1e3,
        "delay_s": None if args.delay_ms is None else args.delay_ms / 1e3,
        "delayed_ranks": args.delayed_ranks,
        "latency_s": None if args.latency_us is None else args.latency_us / 1e6,
        "bandwidth_bytes_s": None if args.gbit_s is None else args.gbit_s * 1e9 / 8,
    }
    if args.compute_ms is not None:
        machine = replace(machine, spread=None, recorded=None)
    return replace(machine, **{name: value for name, value in given.items() if value is not None})


def _check(path: Path) -> dict[str, Any]:
    from lightning_dsgd.lab.simulate import check  # loads torch

    rows, overhead_s = check.check(json.loads(path.read_text()))
    print(check.table(rows))
    print(f"\nadded to each step, as `no_sync` shows it: {1e3 * overhead_s:.1f} ms")
    return {"checked": str(path), "rows": rows, "overhead_s": overhead_s}
