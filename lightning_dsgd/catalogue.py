"""The table of strategies, for the command line and the documents: one row an algorithm.

What and how much memory stands in the algorithm's docstring, the rest in its `Profile`.
"""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from dataclasses import fields
from typing import Final

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms.adpsgd import ADPSGD
from lightning_dsgd.algorithms.allreduce import AllReduce
from lightning_dsgd.algorithms.dpsgd import DPSGD
from lightning_dsgd.algorithms.eager_sgd import EagerSGD
from lightning_dsgd.algorithms.hpsgd import HPSGD
from lightning_dsgd.algorithms.local_sgd import LocalSGD
from lightning_dsgd.algorithms.no_sync import NoSync
from lightning_dsgd.algorithms.oktopk import OkTopk
from lightning_dsgd.algorithms.popsgd import PopSGD
from lightning_dsgd.algorithms.sgp import SGP
from lightning_dsgd.algorithms.sparse_baselines import GaussianTopk, GTopk, TopkAllgather, TopkDSA
from lightning_dsgd.algorithms.wagma import WAGMA

ALGORITHMS: Final[tuple[type[Algorithm], ...]] = (
    WAGMA, EagerSGD, HPSGD, SGP, ADPSGD, PopSGD, LocalSGD, DPSGD, OkTopk,
    TopkAllgather, TopkDSA, GTopk, GaussianTopk, AllReduce, NoSync,
)  # fmt: skip
"""Those that one would try first come first."""

COLUMNS: Final = (
    "name", "what", "when", "with whom", "memory above plain training", "sends a step", "for whom",
)  # fmt: skip
_SHARES: Final = (0, 26, 17, 17, 18, 17, 25)
"""Of the width that the names leave over."""


def row(algorithm: type[Algorithm]) -> tuple[str, ...]:
    """What the table says of one algorithm."""
    profile, text = algorithm.profile, inspect.getdoc(algorithm) or ""
    assert profile is not None, f"{algorithm.__name__} has no profile"
    what = " ".join(text.partition("\n\n")[0].split()).rstrip(".")
    found = re.search(r"Memory above plain training: ([^.;:]+)", text)
    memory = re.sub(r" \(.*?\)", "", " ".join(found[1].split())) if found else ""
    whom = profile.with_whom
    return (algorithm.name, what, profile.when, whom, memory, profile.sends, profile.suits)


def table() -> str:
    """For a terminal, as wide as it is."""
    rows = [row(algorithm) for algorithm in ALGORITHMS]
    name_width = max(len(name) for name, *_ in rows)
    spare = max(shutil.get_terminal_size((150, 24)).columns, 100) - name_width - 2 * len(COLUMNS)
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
    body = [line for cells in rows for line in (*lines(cells), "")]
    legend = "|x| the weights, |g| the gradient, P ranks, S ranks a group, k entries sent of n."
    return "\n".join([*lines(COLUMNS), rule, *body, legend])


def markdown(pages: str) -> str:
    """The same for a document that has the algorithms' pages in this folder."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for algorithm in ALGORITHMS:
        name, *cells = row(algorithm)
        page = algorithm.__module__.rpartition(".")[2]
        cells = [f"[`{name}`]({pages}{page}.md)", *(cell.replace("|", r"\|") for cell in cells)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def describe(name: str) -> str:
    """One strategy: how it is made, the hyperparameters, and what its paper's file says."""
    known = {algorithm.name: algorithm for algorithm in ALGORITHMS}
    if name not in known:
        raise ValueError(f"the strategy must be one of {', '.join(known)}, got {name!r}")
    algorithm = known[name]
    defaults = (f"{f.name}={f.default!r}" for f in fields(algorithm))  # type: ignore[arg-type]
    module = inspect.getdoc(inspect.getmodule(algorithm)) or ""
    parts = [
        f'Trainer(strategy="{name}"), or lightning_dsgd.{algorithm.__name__}Strategy'
        f"({', '.join(defaults)})",
        inspect.getdoc(algorithm) or "",
        *(f"{title}: {cell}" for title, cell in zip(COLUMNS, row(algorithm), strict=True)),
        module,
    ]
    return "\n\n".join(parts[:2]) + "\n\n" + "\n".join(parts[2:-1]) + "\n\n" + parts[-1]
