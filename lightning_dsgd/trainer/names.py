"""The algorithms' names where Lightning looks them up.

    Trainer(strategy="wagma")        the strategy of the Trainer, with the algorithm of this name;
                                     Fabric too
    Trainer(strategy="ddp_wagma")    the same strategy as "wagma", for a library that trains several
                                     ranks only where it finds "ddp" in the name
    Trainer(strategy="wagam")        Lightning refuses it: what may have been meant is added
    Trainer(strategy="wagma:overlap=true")    the same: Lightning's names have no options; what to
                                     write is added, or what is wrong with the options

Where the last is told is private to Lightning: where a version has it no more, Lightning's own
error stays as it was.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Collection
from difflib import get_close_matches
from typing import Any, Final

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms import ALL_ALGORITHMS, BY_UNITS, make_algorithm
from lightning_dsgd.algorithms.written import as_code, meant
from lightning_dsgd.hyperparameters import NAMES_ALIKE

ALIAS: Final = "ddp_"
"""With this before it each name is registered once more; tables and listings leave that out."""
_DATA: Final = "data="
"""Stands in a name's options for how batches are dealt, as `lightning-dsgd why` writes it."""


def make_known(registry: Any, strategy: type, by_units: type) -> None:
    """Makes each algorithm's name, and its alias, known to one of Lightning's registries.

    Args:
        registry: the registry of the Trainer, or of Fabric, in one of Lightning's packages
        strategy: the class that a name stands for
        by_units: the same for algorithms that sum a step's micro-batches one by one
    """
    for name, algorithm in ALL_ALGORITHMS.items():
        kind = by_units if name in BY_UNITS else strategy
        description = (inspect.getdoc(algorithm) or name).splitlines()[0]
        for each in (name, f"{ALIAS}{name}"):
            registry.register(each, kind, description, override=True, algorithm=name)


def hint(name: str, others: Collection[str] = ()) -> str:
    """Returns our names that a wrong name may have meant, as a text; empty if there are none."""
    prefix = ALIAS if name.lower().startswith(ALIAS) else ""
    ours = [f"{prefix}{own}" for own in ALL_ALGORITHMS]
    known = {_bare(other): "" for other in others} | {_bare(own): own for own in ours}
    bare = _bare(name.partition(":")[0])
    near = [bare] if bare in known else get_close_matches(bare, known, 3, NAMES_ALIKE)
    nearest = [known[each] for each in near]
    if not nearest or not nearest[0]:
        return ""
    meant = " or ".join(f'"{own}"' for own in nearest if own)
    return f"Did you mean {meant}, of lightning_dsgd? `lightning-dsgd strategies` lists its names."


def _more(given: Any, write: Callable[[Algorithm], str], registered: set[str]) -> str:
    """Returns what to write in place of a strategy that Lightning refuses; empty: nobody knows."""
    if isinstance(given, str):
        ours = {*ALL_ALGORITHMS, *(f"{ALIAS}{own}" for own in ALL_ALGORITHMS)}
        if ":" not in given:
            return hint(given, registered - ours)
        text = _in_place_of_options(given, write) or hint(given, registered - ours)
        return text and f"Names take no options. {text}"
    found = meant(given)
    return "" if found is None else f"Write strategy={write(found)}."


def _in_place_of_options(given: str, write: Callable[[Algorithm], str]) -> str:
    """Returns what to write for one of our names with options; empty: the name is none of ours.

    Args:
        given: the name, with options of its algorithm and perhaps with `data`, the strategy's own
        write: see `hint_in`
    """
    name, *options = given.lower().removeprefix(ALIAS).split(":")
    if name not in ALL_ALGORITHMS:
        return ""
    dealt = [each for each in options if each.startswith(_DATA)]
    others = [each for each in options if each not in dealt]
    try:
        call = write(make_algorithm(":".join([name, *others])))
    except ValueError as error:
        return f"Besides, {error}"
    for each in dealt[-1:]:
        call = f"{call.removesuffix(')')}, data={as_code(each.removeprefix(_DATA))})"
    return f"Write strategy={call}."


def _bare(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower()).removesuffix("strategy")


def hint_in(module: str, connector: str, write: Callable[[Algorithm], str]) -> None:
    """Adds a hint to the error of the Trainer, or the Fabric, of one of Lightning's packages.

    Args:
        module: the module of the connector
        connector: the private class that reads the arguments
        write: returns what is to be written for the strategy with an algorithm
    """

    def wrap(check: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(check)
        def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return check(self, *args, **kwargs)
            except ValueError as error:
                if "invalid strategy name" not in str(error):
                    raise
                given = getattr(self, "_strategy_flag", None)
                more = _more(given, write, set(getattr(self, "_registered_strategies", ())))
                if not more:
                    raise
                raise ValueError(f"{error}. {more}") from None  # ours: told in a line

        return checked

    owner = getattr(importlib.import_module(module), connector, None)
    real = getattr(owner, "_check_config_and_set_final_flags", None)
    if real is not None and not hasattr(real, "of_lightning_dsgd"):
        wrapped: Any = wrap(real)
        wrapped.of_lightning_dsgd = True
        setattr(owner, real.__name__, wrapped)
