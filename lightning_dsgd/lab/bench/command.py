"""The command `lightning-dsgd bench`: it has one module for each thing that it measures."""

from __future__ import annotations

import argparse
import importlib

BENCHES = {
    "throughput": "steps per second, with simulated computation, stragglers and links",
    "convergence": "steps, seconds and bytes to a target, over seeds",
    "target": "seconds to all-reduce's quality in five situations, in simulated time",
    "report": "tables and plots of result files",
}


def main(args: list[str]) -> None:
    """Hands the arguments over to the measurement that they name."""
    parser = argparse.ArgumentParser(
        prog="lightning-dsgd bench",
        epilog="\n".join(f"  {name:12}{text}" for name, text in BENCHES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=BENCHES, metavar="what", help="one of those below")
    what = parser.parse_args(args[:1] or ["--help"]).what
    # Lazily: a strategy name, or a help text, needs none of it.
    importlib.import_module(f"lightning_dsgd.lab.bench.{what}").main(args[1:])
