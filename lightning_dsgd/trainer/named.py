"""A strategy for each algorithm, made from its dataclass: WAGMA's is `WAGMAStrategy(group_size=4)`.

Arguments, defaults and texts are those of the algorithm's fields, and after them the options that
every strategy has.  Made once for `lightning`, and once for `pytorch_lightning`, another package
with a registry of its own, whose strategies are in `lightning_dsgd.pytorch_lightning`.

What editors and type checkers see stands in named.pyi, which the build makes by docs/stub.py.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Mapping
from functools import partial
from inspect import Parameter
from typing import Any, Final, get_type_hints

from lightning_dsgd import hyperparameters, keywords
from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms import ALGORITHMS, BY_UNITS, warn_of_one_left_out, written
from lightning_dsgd.trainer import names
from lightning_dsgd.trainer.arguments import TrainerOptions
from lightning_dsgd.trainer.balanced import BalancedMixin
from lightning_dsgd.trainer.strategy import DecentralizedMixin, DecentralizedStrategy


def named(algorithm: type[Algorithm], base: type, module: str) -> type:
    """Makes the strategy that trains with an algorithm.

    Args:
        algorithm: the algorithm's dataclass
        base: the strategy of one of Lightning's two packages
        module: where the class can be imported from
    """
    own = set(hyperparameters.names(algorithm))

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        mine = {name: kwargs.pop(name) for name in own & kwargs.keys()}
        base.__init__(self, algorithm(*args, **mine), **kwargs)  # type: ignore[misc]

    parameters = [*_own(algorithm), *keywords.parameters(TrainerOptions, base)]
    __init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [Parameter("self", Parameter.POSITIONAL_ONLY), *parameters]
    )
    content = {"__init__": __init__, "__doc__": _docstring(algorithm), "__module__": module}
    return type(f"{algorithm.__name__}Strategy", (base,), content)


def _own(algorithm: type[Algorithm]) -> list[Parameter]:
    types = get_type_hints(algorithm)
    parameters = inspect.signature(algorithm).parameters
    return [parameters[n].replace(annotation=types[n]) for n in hyperparameters.names(algorithm)]


def _docstring(algorithm: type[Algorithm]) -> str:
    what = inspect.getdoc(algorithm) or ""
    if algorithm.profile is not None:
        memory = (
            "Memory per rank in addition to plain training (|x|: the weights, |g|: the gradient): "
        )
        what += "\n\n" + textwrap.fill(f"{memory}{algorithm.profile.memory}.", 96)
    theirs = ", ".join(keywords.names_of_others(TrainerOptions))
    arguments = [
        hyperparameters.arguments(algorithm),
        keywords.texts(TrainerOptions),
        hyperparameters.argument("**kwargs", f"what Lightning's own strategies take: {theirs}"),
    ]
    return "\n".join(filter(None, [what, "\nArgs:", *arguments]))


def make_all(base: type, module: str) -> dict[str, type]:
    """Makes a strategy of every algorithm; warns of another package's that cannot be one."""
    made = {}
    for name, algorithm in list(ALGORITHMS.items()):
        try:
            made[name] = named(algorithm, base, module)
        except Exception as error:
            if algorithm.__module__.startswith("lightning_dsgd."):
                raise
            del ALGORITHMS[name]
            warn_of_one_left_out(f"{algorithm.__module__}.{algorithm.__name__}", error)
    by_units = type("BalancedStrategy", (BalancedMixin, base), {})
    return {name: named(each, by_units, module) for name, each in BY_UNITS.items()} | made


def make_known(package: str, strategies: Mapping[str, type], base: type) -> None:
    """Makes the strategies' names known to the Trainer of one of Lightning's packages."""
    registry = _registry_of(package)
    for name, strategy in strategies.items():
        description = (strategy.__doc__ or "").splitlines()[0]
        names.register(registry, name, strategy, description)
    connectors = f"{package}.trainer.connectors.accelerator_connector"
    home = base.__module__ if package == "pytorch_lightning" else "lightning_dsgd"
    names.hint_in(
        connectors,
        "_AcceleratorConnector",
        [*strategies],
        partial(_written_as_strategy, home),
    )


def _written_as_strategy(home: str, algorithm: Algorithm) -> str:
    """Returns the call of the Trainer's strategy with an algorithm."""
    is_public = home == "lightning_dsgd" and written.is_ours(algorithm)
    if is_public or algorithm.name in (*ALGORITHMS, *BY_UNITS):
        return f"{home}.{type(algorithm).__name__}Strategy({written.arguments(algorithm)})"
    return f"{home}.DecentralizedStrategy({written.written(algorithm)})"


def class_of(name: str, package: str = "lightning.pytorch") -> type | None:
    """Returns the class that is registered under one of our names; None: the name is not ours.

    Args:
        name: what `Trainer(strategy=...)` takes
        package: the one of Lightning's packages in whose registry the name is looked up
    """
    registry = _registry_of(package)
    strategy = registry[name]["strategy"] if name in registry else None
    is_ours = isinstance(strategy, type) and issubclass(strategy, DecentralizedMixin)
    return strategy if is_ours else None


def _registry_of(package: str) -> Any:
    return importlib.import_module(f"{package}.strategies").StrategyRegistry


STRATEGIES: Final[dict[str, type[DecentralizedStrategy]]] = make_all(
    DecentralizedStrategy, __name__
)
"""The names that `Trainer(strategy=...)` takes, once this module is imported."""

globals().update({strategy.__name__: strategy for strategy in STRATEGIES.values()})
__all__ = ["STRATEGIES", *(strategy.__name__ for strategy in STRATEGIES.values())]

make_known("lightning.pytorch", STRATEGIES, DecentralizedStrategy)
