"""How fast a strategy would be on a machine that is not here.

    lightning-dsgd simulate --algorithms wagma,allreduce --ranks 4,16,64,256 --profile piz-daint \
        --params 25e6 --steps 50 --output simulated.json --plot simulated.png
    lightning-dsgd simulate --check throughput.json    # a file of `lightning-dsgd bench throughput`

`simulation.py` does it; that loads torch and Lightning, which a help text does without.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning_dsgd.bench.job import finish, provenance
from lightning_dsgd.bench.profiles import PROFILES, Profile


def main(argv: list[str] | None = None) -> None:
    """Simulates, or checks a result file."""
    parser = argparse.ArgumentParser(
        prog="lightning-dsgd simulate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--algorithms", default="allreduce,wagma", help="separated by commas")
    parser.add_argument("--ranks", default="4,16,64", help="separated by commas")
    parser.add_argument("--profile", default="piz-daint", choices=PROFILES)
    parser.add_argument("--params", type=float, help="in place of the profile's, as the rest")
    parser.add_argument("--compute-ms", type=float)
    parser.add_argument("--delay-ms", type=float)
    parser.add_argument("--delayed-ranks", type=int)
    parser.add_argument("--latency-us", type=float)
    parser.add_argument("--gbit-s", type=float)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a result file (JSON)")
    parser.add_argument("--plot", type=Path, help="an image (needs matplotlib)")
    parser.add_argument("--check", type=Path, help="a result file of `bench throughput`")
    args = parser.parse_args(argv)
    command = "lightning-dsgd simulate " + " ".join(sys.argv[2:] if argv is None else argv)
    try:
        report = _check(args.check) if args.check else _simulate(args)
    except (ValueError, OSError) as err:
        parser.error(str(err))
    if args.output:
        finish(provenance(command) | report, args.output)


def _simulate(args: argparse.Namespace) -> dict[str, Any]:
    from lightning_dsgd.bench.simulation import plot, run_all, table

    profile = overridden(PROFILES[args.profile], args)
    ranks = [int(p) for p in args.ranks.split(",")]
    specs = args.algorithms.split(",")
    rows = run_all(specs, ranks, args.profile, profile, args.steps, args.seed)
    print(table(rows))
    if args.plot:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 5))
        plot(axes, rows)
        axes.set_title(args.profile)
        figure.tight_layout()
        figure.savefig(args.plot, dpi=110)
    return {"profile": asdict(profile), "steps": args.steps, "seed": args.seed, "rows": rows}


def overridden(profile: Profile, args: argparse.Namespace) -> Profile:
    """The profile with what the command line says in place of its own."""
    given: dict[str, Any] = {
        "num_params": None if args.params is None else int(args.params),
        "compute_s": None if args.compute_ms is None else args.compute_ms / 1e3,
        "delay_s": None if args.delay_ms is None else args.delay_ms / 1e3,
        "delayed_ranks": args.delayed_ranks,
        "latency_s": None if args.latency_us is None else args.latency_us / 1e6,
        "bandwidth_bytes_s": None if args.gbit_s is None else args.gbit_s * 1e9 / 8,
    }
    if args.compute_ms is not None:
        profile = replace(profile, spread=None)
    return replace(profile, **{name: value for name, value in given.items() if value is not None})


def _check(path: Path) -> dict[str, Any]:
    from lightning_dsgd.bench.simulation import check, check_table

    rows, overhead_s = check(json.loads(path.read_text()))
    print(check_table(rows))
    print(f"\nadded to each step, as `no_sync` shows it: {1e3 * overhead_s:.1f} ms")
    return {"checked": str(path), "rows": rows, "overhead_s": overhead_s}
