"""The command `strategies`: the table of strategies, or one of them in full."""

from __future__ import annotations

import argparse


def main(argv: list[str] | None = None) -> None:
    """Prints the table, or what there is to know of one strategy."""
    parser = argparse.ArgumentParser(prog="lightning-dsgd strategies")
    parser.add_argument(
        "name", nargs="?", help="show the hyperparameters, rule and cost of this strategy"
    )
    parser.add_argument(
        "--markdown",
        metavar="PAGES",
        help="print a Markdown table that links to the pages in this folder",
    )
    given = parser.parse_args(argv)
    from lightning_dsgd.lab import catalogue  # loads torch

    if given.markdown is not None:
        print(catalogue.markdown(given.markdown))
    elif given.name is None:
        print(catalogue.table())
        print("\nDetails of one: lightning-dsgd strategies NAME")
    else:
        try:
            print(catalogue.describe(given.name))
        except ValueError as error:
            parser.error(str(error))
