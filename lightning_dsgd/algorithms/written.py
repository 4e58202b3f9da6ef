"""How a script writes an algorithm, for errors that say what to write.

decentralized(model, optimizer, "wagma")    write decentralized(model, optimizer,
lightning_dsgd.WAGMA())
Trainer(strategy=WAGMA(group_size=4))       write strategy=lightning_dsgd.DecentralizedStrategy(
lightning_dsgd.WAGMA(group_size=4))
"""

from __future__ import annotations

import json
import math
from typing import Any

from lightning_dsgd import hyperparameters
from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms import BY_UNITS, make_algorithm

_PACKAGE = __name__.partition(".")[0]


def check_algorithm(given: Any, place: str) -> None:
    """Raises unless this is an algorithm, with hyperparameters that hold.

    Args:
        given: what stands where an algorithm is to stand
        place: the call that takes the algorithm, with {} where the algorithm stands

    Raises:
        TypeError: if it is none; the error says what to write
        ValueError: if a hyperparameter breaks its rule
    """
    if not isinstance(given, Algorithm):
        found = meant(given)
        example = "lightning_dsgd.LocalSGD(sync_period=8)" if found is None else written(found)
        raise TypeError(
            f"the algorithm must be one of lightning_dsgd, got {described(given)}; write "
            f"{place.format(example)}"
        )
    given.check_hyperparameters()


def meant(given: Any) -> Algorithm | None:
    """Returns the algorithm that is meant by its name, its class or a strategy; None: none is."""
    if isinstance(given, str):
        return _named(given)
    if isinstance(given, type):
        return given() if issubclass(given, Algorithm) else None
    found = given if isinstance(given, Algorithm) else getattr(given, "algorithm", None)
    return found if isinstance(found, Algorithm) else None


def _named(spec: str) -> Algorithm | None:
    try:
        return make_algorithm(spec.lower())
    except ValueError:
        return None


def written(algorithm: Algorithm) -> str:
    """Returns the call that makes an algorithm, as in `lightning_dsgd.WAGMA(group_size=4)`."""
    kind = type(algorithm)
    prefix = f"{_PACKAGE}." if kind.__module__.startswith(f"{_PACKAGE}.") else ""
    return f"{prefix}{kind.__name__}({_arguments(algorithm)})"


def as_strategy(algorithm: Algorithm, home: str = _PACKAGE) -> str:
    """Returns the call of the Trainer's strategy with an algorithm.

    Args:
        algorithm: what the strategy trains with
        home: the module that has the strategies of the Trainer's package
    """
    return f"{home}.{class_for(type(algorithm))}({written(algorithm)})"


def class_for(kind: type[Algorithm]) -> str:
    """Returns the name of the Trainer's strategy for an algorithm."""
    return "BalancedStrategy" if kind.name in BY_UNITS else "DecentralizedStrategy"


def _arguments(algorithm: Algorithm) -> str:
    """Returns the hyperparameters that are not the default ones, as a call's arguments."""
    ordinary = type(algorithm)()
    values = [
        (name, getattr(algorithm, name), getattr(ordinary, name))
        for name in hyperparameters.names(algorithm)
    ]
    return ", ".join(f"{name}={as_code(value)}" for name, value, usual in values if value != usual)


def as_code(value: Any) -> str:
    """Returns a value as a script writes it."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return json.dumps(value) if isinstance(value, str) else repr(value)


def described(given: Any) -> str:
    """Returns what an error says that it got."""
    if isinstance(given, str):
        return repr(given)
    if isinstance(given, type):
        return f"the class {given.__name__}"
    return f"a {type(given).__name__}" if meant(given) is not None else repr(given)
