"""The command `strategies`: the table of strategies, or one of them in full.

    lightning-dsgd strategies
    lightning-dsgd strategies wagma
    lightning-dsgd strategies --json

The table says what each strategy is for; one of them in full also has its hyperparameters and rule.
"""

from __future__ import annotations

import json

from lightning_dsgd.lab.options import Parser


def main(argv: list[str] | None = None) -> None:
    """Prints the table, or what there is to know of one strategy."""
    parser = Parser("strategies", __doc__)
    parser.add_argument(
        "name", nargs="?", help="shows the hyperparameters, rule and cost of this strategy"
    )
    parser.add_argument(
        "--markdown",
        metavar="PAGE",
        help="prints a Markdown table that links to the sections of this page",
    )
    parser.add_argument("--json", action="store_true", help="prints JSON, for programs")
    given = parser.parse_args(argv)
    from lightning_dsgd.lab import catalogue  # loads torch

    try:
        if given.json:
            print(json.dumps(catalogue.records(given.name), indent=1))
        elif given.markdown is not None:
            print(catalogue.markdown(given.markdown))
        elif given.name is None:
            print(catalogue.table())
            print("\nDetails of one: lightning-dsgd strategies NAME")
        else:
            print(catalogue.describe(given.name))
    except ValueError as error:
        parser.error(str(error))
