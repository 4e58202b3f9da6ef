"""The table of strategies, for the command line and the documents: one row per algorithm.

The first line of an algorithm's docstring says what it does, `decisions` what it is for; the other
cells are its `Profile`.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final, TypeVar

from lightning_dsgd import hyperparameters
from lightning_dsgd.algorithm import Algorithm, Profile
from lightning_dsgd.algorithms import ALGORITHMS, ALL_ALGORITHMS, COMPARISONS
from lightning_dsgd.algorithms.written import class_for
from lightning_dsgd.lab import decisions

T = TypeVar("T")

COLUMNS: Final = (
    "name", "what it does", "communicates", "with", "extra memory", "bytes sent per step",
    "use it for",
)  # fmt: skip
TO_COMPARE: Final = "Here to be compared with:"
"""Stands above the strategies that nobody need try first."""
BRIEF: Final = ("name", "what it does", "use it for")
"""The columns of a short table."""
LEGEND: Final = (
    "|x|: bytes of the weights, |g|: bytes of the gradient, P: number of ranks, S: ranks per "
    "group, n: gradient entries, k = density * n: entries selected per step.  Extra memory is per "
    "rank, in addition to plain training."
)
_NOT_SAID: Final = Profile("-", "-", "-", "-", "-")
"""The profile of an algorithm of another package that has none."""
_NARROW: Final = 130
"""Columns of a terminal below which the table's cells would break words."""
_INDENTED: Final[Any] = {"initial_indent": "    ", "subsequent_indent": "    "}
_SHARES: Final = (0, 24, 15, 16, 23, 17, 25)
"""Each column's share of the width that the names leave."""


def strategy_called(name: str, known: Mapping[str, T]) -> T:
    """Returns what the name stands for; raises `ValueError` for an unknown name."""
    if name not in known:
        raise ValueError(
            f"the strategy must be one of {', '.join(known)}, got {name!r}"
            f"{hyperparameters.did_you_mean(name, known)}"
        )
    return known[name]


def row(algorithm: type[Algorithm]) -> tuple[str, ...]:
    """Returns the cells of one algorithm, in the order of `COLUMNS`."""
    profile, text = algorithm.profile or _NOT_SAID, inspect.getdoc(algorithm) or ""
    what = " ".join(text.partition("\n\n")[0].split()).rstrip(".")
    return (
        algorithm.name,
        what,
        profile.when,
        profile.with_whom,
        profile.memory,
        profile.sends,
        decisions.use_for(algorithm.name) or profile.suits,
    )


def records(name: str | None) -> list[dict[str, Any]]:
    """Returns what the table and the details say, for programs: of one strategy, or of all."""
    chosen = ALL_ALGORITHMS.values() if name is None else [strategy_called(name, ALL_ALGORITHMS)]
    names = [column.replace(" ", "_") for column in COLUMNS]
    return [
        {
            **dict(zip(names, row(algorithm), strict=True)),
            "class": f"lightning_dsgd.{algorithm.__name__}",
            "hyperparameters": {each.name: each.default for each in fields(algorithm)},  # type: ignore[arg-type]
        }
        for algorithm in chosen
    ]


def table() -> str:
    """Returns the table for a terminal, as wide as the terminal; a list where that is narrow."""
    width = shutil.get_terminal_size((150, 24)).columns
    front = [row(algorithm) for algorithm in _in_front(ALL_ALGORITHMS)]
    compared = [row(algorithm) for algorithm in _compared()]
    if width < _NARROW:
        entries = [_entry(cells, width) for cells in (*front, *compared)]
        entries.insert(len(front), TO_COMPARE)
        return "\n\n".join(entries)
    name_width = max(map(len, ALL_ALGORITHMS))
    spare = width - name_width - 2 * len(COLUMNS)
    widths = [name_width, *(spare * share // sum(_SHARES) for share in _SHARES[1:])]

    def lines(cells: tuple[str, ...]) -> list[str]:
        wrapped = [textwrap.wrap(c, w) for c, w in zip(cells, widths, strict=True)]
        height = max(map(len, wrapped))
        padded = [column + [""] * (height - len(column)) for column in wrapped]
        return [
            "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in zip(*padded, strict=True)
        ]

    rule = "  ".join("-" * width for width in widths)
    body = [line for cells in front for line in (*lines(cells), "")]
    body += [TO_COMPARE, ""]
    body += [line for cells in compared for line in (*lines(cells), "")]
    legend = textwrap.fill(LEGEND, sum(widths) + 2 * len(COLUMNS))
    return "\n".join([*lines(COLUMNS), rule, *body, legend])


def _in_front(known: Mapping[str, type[Algorithm]]) -> list[type[Algorithm]]:
    return [algorithm for name, algorithm in known.items() if name not in COMPARISONS]


def _compared() -> list[type[Algorithm]]:
    return [ALGORITHMS[name] for name in COMPARISONS]


def _entry(cells: tuple[str, ...], width: int) -> str:
    """Returns one strategy as lines: its name, what it does, and what suits it."""
    brief = [cells[COLUMNS.index(column)] for column in BRIEF]
    lines = [textwrap.fill(text, max(width, 20), **_INDENTED) for text in brief[1:]]
    return "\n".join([brief[0], *lines])


def markdown(page: str, columns: tuple[str, ...] = COLUMNS) -> str:
    """Returns the table for a document.

    Args:
        page: the page with a section for each module of algorithms, for the links
        columns: which of `COLUMNS` the table has
    """
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += [_linked(algorithm, page, columns) for algorithm in _in_front(ALGORITHMS)]
    lines.append(f"| **{TO_COMPARE}** " + "| " * (len(columns) - 1) + "|")
    lines += [_linked(algorithm, page, columns) for algorithm in _compared()]
    return "\n".join(lines)


def _linked(algorithm: type[Algorithm], page: str, columns: tuple[str, ...]) -> str:
    """Returns an algorithm's line of the table, with a link to its section."""
    every = dict(zip(COLUMNS, row(algorithm), strict=True))
    cells = {column: every[column].replace("|", r"\|") for column in columns}
    section = algorithm.__module__.rpartition(".")[2]
    cells["name"] = f"[`{algorithm.name}`]({page}#{section})"
    return "| " + " | ".join(cells.values()) + " |"


def describe(name: str) -> str:
    """Describes a strategy: how to create it, its hyperparameters, its module's docstring."""
    algorithm = strategy_called(name, ALL_ALGORITHMS)
    defaults = (f"{f.name}={f.default!r}" for f in fields(algorithm))  # type: ignore[arg-type]
    module = inspect.getdoc(inspect.getmodule(algorithm)) or ""
    sections = [
        f'Trainer(strategy="{name}"), or lightning_dsgd.{class_for(algorithm)}('
        f"lightning_dsgd.{algorithm.__name__}({', '.join(defaults)}))",
        inspect.getdoc(algorithm) or "",
        *(f"{title}: {cell}" for title, cell in zip(COLUMNS, row(algorithm), strict=True)),
        module,
    ]
    return "\n\n".join(sections[:2]) + "\n\n" + "\n".join(sections[2:-1]) + "\n\n" + sections[-1]
