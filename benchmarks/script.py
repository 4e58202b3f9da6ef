"""What every script beside this file begins with: its arguments."""

from __future__ import annotations

import argparse
from pathlib import Path


def parser(text: str | None, output: str) -> argparse.ArgumentParser:
    """The arguments of a script, to which it adds its own.

    Args:
        text: its docstring
        output: the file that it writes, from the root of a clone
    """
    made = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--output", type=Path, default=Path(output), help="default: %(default)s")
    return made
