"""How often tests try what is random: `TIMES=20 make test-all` tries 20 times as much."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest


def times(number: int) -> range:
    """So many tries by default."""
    return range(number * int(os.environ.get("TIMES", "1")))


def tries(number: int, fast: int) -> list[Any]:
    """The same as parameters of a test; the first few are in `make test`."""
    return [
        pytest.param(place, marks=[pytest.mark.exhaustive] if place >= fast else [])
        for place in times(number)
    ]


def cases(names: str, now: Iterable[Any], later: Iterable[Any]) -> pytest.MarkDecorator:
    """Parameters of a test: `make test` runs some of them, `make test-all` the later ones too."""
    rows = [(case,) if "," not in names else case for case in later]
    marked = [pytest.param(*row, marks=pytest.mark.exhaustive) for row in rows]
    return pytest.mark.parametrize(names, [*now, *marked])


def some(names: Iterable[str], few: Iterable[str]) -> list[str]:
    """A few of the names by default, and all where everything is tried more than once."""
    return list(names if len(times(1)) > 1 else few)
