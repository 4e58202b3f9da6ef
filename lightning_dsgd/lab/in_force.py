"""What a result was measured with, what differs today, and what its file does not say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from lightning_dsgd.algorithms import ALL_ALGORITHMS, make_algorithm
from lightning_dsgd.hyperparameters import parse

_OFF = (False, None, "equal", "float32")
"""The values with which an option changes nothing: a file without the option means the same."""
_GONE = {"wagma": {"wait_avoiding": True, "dynamic_groups": True, "rule": "conserving"}}
"""The options that a strategy has no more, and the value of each that is what the strategy does."""


def in_force(specs: Iterable[str], ranks: Iterable[int]) -> dict[str, dict[str, Any]]:
    """Returns all hyperparameters of each strategy, as a result file records them.

    Strategies of other packages are left out.  Where a hyperparameter that is None stands for a
    number that follows from the number of ranks, as `group_size` does, the numbers are recorded, by
    each of these numbers of ranks.
    """
    sizes = sorted({*ranks})
    return {spec: _all(spec, sizes) for spec in specs if parse(spec)[0] in ALL_ALGORITHMS}


def _all(spec: str, ranks: Iterable[int]) -> dict[str, Any]:
    algorithm: Any = make_algorithm(spec)
    found: dict[str, Any] = algorithm.hyperparameters()
    if found.get("group_size", 0) is None and not algorithm.hierarchical:
        found["group_size"] = {str(size): algorithm.usual_size(size) for size in ranks}
    return found


def differences(result: dict[str, Any]) -> list[str]:
    """Returns what of a result's hyperparameters is another now; an empty list if nothing is.

    An option that is new, and off by default, changes nothing; nor does one that has gone, and was
    off.
    """
    found = []
    for spec, then in result["hyperparameters"].items():
        try:
            by_ranks = then.get("group_size")
            now = _all(spec, map(int, by_ranks) if isinstance(by_ranks, dict) else ())
        except ValueError as error:
            found.append(f"`{spec}` is refused now: {error}")
            continue
        gone = _GONE.get(parse(spec)[0], {})
        if then.get("paper"):
            gone = gone | {"rule": "paper"}  # what `paper=True` does
        then = {name: x for name, x in then.items() if name in now or x != gone.get(name, ...)}
        either = then | now
        is_off = {name for name in then.keys() ^ now.keys() if either[name] in _OFF}
        for name in sorted(either.keys() - is_off):
            before, today = (str(each.get(name, "unknown")) for each in (then, now))
            if before != today:
                found.append(f"`{spec}` had {name}={before}, which is {today} now")
    return found


def measured_with(result: dict[str, Any]) -> str:
    """Says when a result was measured, and what of its hyperparameters is another now."""
    made = str(result["made"]).partition("T")[0]
    found = differences(result)
    told = "with today's defaults" if not found else "with other defaults: " + "; ".join(found)
    return f"Measured on {made} {told}."


def lacks(result: dict[str, Any]) -> list[str]:
    """Returns what is missing in a result file; without it nobody can measure the same again.

    That is the commit, with all changes committed, and the hyperparameters, if a strategy of this
    package was measured.
    """
    found = []
    commit = result.get("commit")
    if not commit:
        found.append("no commit")
    elif commit.endswith("+"):
        found.append("uncommitted changes")
    if "hyperparameters" not in result and _names_a_strategy(result):
        found.append("no hyperparameters")
    return found


def _names_a_strategy(result: dict[str, Any]) -> bool:
    names = "|".join(ALL_ALGORITHMS)
    return re.search(rf'"(?:{names})[":,]', json.dumps(result)) is not None
