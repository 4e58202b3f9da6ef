"""How much memory a strategy needs, as its page says: `Profile.memory`, with its settings.

Such a text has clauses between commas and semicolons.  Each is an amount, "none" or such as
"2 |x|"; it is the new amount, or it is added if the clause says "more".  It counts

    always                          2 |x|; 4 |x| during an exchange
    with an option                  3 |x| with `overlap`, none with an infinite grace
    in a case that has a word       |x| more with momentum
    on a device                     3 |x| with `overlap`, on a device 6 |x|

so what comes last is the peak.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

from lightning_dsgd.algorithms import ALGORITHMS, make_algorithm
from lightning_dsgd.hyperparameters import parse

_AMOUNT: Final = re.compile(r"(?P<copies>\d*) ?\|[xg]\|(?: / (?:(?P<ranks>P)|`(?P<by>\w+)`))?")
_OPTION: Final = re.compile(r"`(\w+)(=False|=True)?`")


def copies(
    spec: str, num_ranks: int, *, is_claimed: bool = False, on_device: bool = False
) -> float:
    """Returns the memory that a rank needs more at its peak, in copies of the weights.

    Args:
        spec: the strategy as on the command line
        num_ranks: P
        is_claimed: whether ranks claim batches, and so have different numbers of them
        on_device: whether ranks train on a device
    """
    name, options = parse(spec)
    profile = ALGORITHMS[name].profile
    assert profile is not None
    options = {key: value for key, value in options.items() if value != "float32"}
    outer = any(option.startswith("outer_") for option in options)
    cases = {
        "outer optimizer": outer,
        "momentum": options.get("outer_momentum"),
        "infinite grace": options.get("grace_s") == math.inf,
        "random graphs": str(options.get("topology")).startswith("random"),
        "different numbers": is_claimed,
        "rounded sums overlap": options.get("wire_dtype") and options.get("overlap"),
    }
    held, conditions = 0.0, [True]
    for clause in re.split("[,;] ", profile.memory):
        amount = _AMOUNT.search(clause)
        is_of_device = "on a device" in clause
        if not is_of_device:  # that clause is about the case of the clause before
            conditions = [bool(on) for words, on in cases.items() if words in clause]
            conditions += _options(clause.replace(amount[0], "") if amount else clause, options)
        if (conditions and not any(conditions)) or (is_of_device and not on_device):
            continue
        held = (held if "more" in clause else 0.0) + _copies(clause, amount, spec, num_ranks)
    return held


def _options(clause: str, options: dict[str, Any]) -> list[bool]:
    """Returns for each option that the clause names whether it is given so."""
    return [
        options.get(name) is False if value == "=False" else bool(options.get(name))
        for name, value in _OPTION.findall(clause)
    ]


def _copies(clause: str, amount: re.Match[str] | None, spec: str, num_ranks: int) -> float:
    if amount is None:
        return 0.0
    by = num_ranks if amount["ranks"] else 1
    if amount["by"]:
        by = make_algorithm(spec).hyperparameters()[amount["by"]]
    return float(amount["copies"] or 1) / by
