"""What both measurements ask for on the command line: the ranks, their network and their delays."""

from __future__ import annotations

import argparse
from typing import Any

from lightning_dsgd.lab.jobs.job import LAUNCHERS, Job
from lightning_dsgd.lab.jobs.network import why_not
from lightning_dsgd.lab.link import Link


def add_to(
    parser: argparse.ArgumentParser,
    *,
    strategies: str,
    compute_ms: float,
    delay_ms: float,
    delayed_ranks: int,
) -> None:
    """Adds the options; the caller gives the defaults that differ between the measurements."""
    parser.add_argument("--strategies", default=strategies, help="separated by commas")
    parser.add_argument("--ranks", type=int, default=4, help="processes of this machine")
    parser.add_argument(
        "--network",
        help="emulated link of every rank, such as 1gbit or 10gbit,1ms (needs root); by default "
        "loopback",
    )
    parser.add_argument(
        "--launcher", choices=LAUNCHERS, default=LAUNCHERS[0], help="what starts the ranks"
    )
    parser.add_argument(
        "--compute-ms", type=float, default=compute_ms, help="simulated computation in each step"
    )
    parser.add_argument(
        "--delay-ms", type=float, default=delay_ms, help="how late a delayed rank is in a step"
    )
    parser.add_argument(
        "--delayed-ranks",
        type=int,
        default=delayed_ranks,
        help="how many random ranks are late in each step",
    )


def refuse(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program, in one line, for what each rank would end with a traceback for."""
    # Loads torch and Lightning, which a help text does without.
    from benchmarks.compare import contestants

    try:
        if args.ranks < 1:
            raise ValueError(f"--ranks must be at least 1, got --ranks {args.ranks}; try --ranks 4")
        if not 0 <= args.delayed_ranks <= args.ranks:
            raise ValueError(
                "--delayed-ranks must be at least 0 and at most --ranks, got --delayed-ranks "
                f"{args.delayed_ranks} with --ranks {args.ranks}; try --delayed-ranks 1"
            )
        if args.network is not None:
            Link.parse(args.network)
        for spec in args.strategies.split(","):
            contestants.check(spec, args.ranks)
    except (TypeError, ValueError) as err:
        parser.error(str(err))


def chosen_link(network: str | None) -> tuple[Link | None, str]:
    """Returns the link to emulate, and what is to be said of the network."""
    if network is None:
        return None, "loopback (--network emulates a slower one)"
    link = Link.parse(network)
    reason = why_not()
    if reason:
        return None, f"loopback, not {network}: {reason}"
    return link, f"{network} between network namespaces"


def job(
    function: str, args: argparse.Namespace, link: Link | None, settings: dict[str, Any]
) -> Job:
    """Makes the job that measures with these options.

    Args:
        function: "module:name" of the function that each rank calls for each cell
        args: the options
        link: the chosen link
        settings: what this measurement asks for besides
    """
    common = {
        "world_size": args.ranks,
        "compute_s": args.compute_ms / 1e3,
        "delay_s": args.delay_ms / 1e3,
        "delayed_ranks": args.delayed_ranks,
    }
    return Job(function, common | settings, args.ranks, link, args.launcher)
