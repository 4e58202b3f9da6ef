"""Cells of a measurement: each is measured once, and kept until all are.

    results = measured([{"strategy": "wagma", "round": 0}, ...], Path("FILE.json"), key, measure)

A cell is a dict of plain values that says what is to be measured; its result is a dict that JSON
can hold.  Results are kept in `FILE.json.cells`, one per line, until `finish` writes `FILE.json`.
A run that was interrupted continues with the cells that are missing.  Results with another
identity, such as other settings, are not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm  # comes with Lightning

from lightning_dsgd.lab.results import write_result

Cell = dict[str, Any]


def measured(
    cells: Sequence[Cell],
    output: Path,
    identity: str,
    measure: Callable[[Sequence[Cell]], Iterator[Cell]],
) -> list[Cell]:
    """Yields the results of all cells, in their order.

    Args:
        cells: the cells to measure
        output: the result file; results kept for a resumed run lie beside it
        identity: all that the results depend on besides the cell
        measure: gives the result of each of these cells, in their order
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    done = _kept(output, key)
    missing = [cell for cell in cells if name(cell) not in done]
    if missing:
        with _bar(len(cells), len(cells) - len(missing)) as tell, open(_store(output), "a") as file:
            for cell, result in zip(missing, measure(missing), strict=True):
                done[name(cell)] = result
                file.write(json.dumps({"key": key, "cell": cell, "result": result}) + "\n")
                file.flush()
                tell(cell)
    return [done[name(cell)] for cell in cells]


def finish(report: dict[str, Any], output: Path) -> None:
    """Writes the result file, and removes the cells that were kept for a run that is resumed."""
    write_result(report, output)
    _store(output).unlink(missing_ok=True)


def in_turn(specs: Sequence[str], turn: str, count: int) -> list[Cell]:
    """Returns every strategy once a turn, in an order that changes from turn to turn."""
    return [
        {"strategy": specs[(index + place) % len(specs)], turn: index}
        for index in range(count)
        for place in range(len(specs))
    ]


def name(cell: Cell) -> str:
    """Returns the cell as text."""
    return json.dumps(cell, sort_keys=True)


def _store(output: Path) -> Path:
    return output.with_name(output.name + ".cells")


def _kept(output: Path, key: str) -> dict[str, Cell]:
    done: dict[str, Cell] = {}
    if _store(output).exists():
        for line in _store(output).read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # cut off when the run was
                entry = json.loads(line)
                if entry["key"] == key:
                    done[name(entry["cell"])] = entry["result"]
    return done


@contextlib.contextmanager
def _bar(total: int, done: int) -> Iterator[Callable[[Cell], None]]:
    options: Any = {"unit": "cell", "dynamic_ncols": True, "smoothing": 0}
    # A bar of one cell tells nothing.
    with tqdm(total=total, initial=done, disable=total == 1, **options) as bar:

        def tell(cell: Cell) -> None:
            bar.set_postfix_str(" ".join(map(str, cell.values())))
            bar.update()

        yield tell


def take_core(num_taken: Any) -> None:
    """Gives a worker a core of its own; where there are fewer cores, workers share them in turn."""
    if hasattr(os, "sched_setaffinity"):
        with num_taken.get_lock():
            place, num_taken.value = num_taken.value, num_taken.value + 1
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[place % len(cores)]})
