"""The strategies' names where others look them up.

    Trainer(strategy="wagam")        Lightning refuses it: what may have been meant is added;
                                     Fabric too
    --trainer.strategy wagma --trainer.strategy.sync_period 20
                                     jsonargparse takes a class there: the name stands for one
    Trainer(strategy="ddp_wagma")    the same strategy as "wagma", for a library that trains several
                                     ranks only where it finds "ddp" in the name

The first two places are private to their packages: where a version has them no more, all stays as
it was.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Collection
from difflib import get_close_matches
from typing import Any, Final

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms.written import meant
from lightning_dsgd.hyperparameters import NAMES_ALIKE

ALIAS: Final = "ddp_"
"""With this before it each name is registered once more; tables and listings leave that out."""


def register(registry: Any, name: str, strategy: Any, description: str, **given: Any) -> None:
    """Makes a strategy known to one of Lightning's registries, by its name and by its alias."""
    for each in (name, f"{ALIAS}{name}"):
        registry.register(each, strategy, description, override=True, **given)


def take_on_command_line(
    base: type, class_of: Callable[[str], type | None], ours: Collection[str]
) -> None:
    """Lets a name stand for its class beside hyperparameters, in options and in YAML.

    Args:
        base: the strategy of one of Lightning's two packages
        class_of: returns the class that a name stands for; None: the name is not one of ours
        ours: the names, to tell which of them a wrong name may have meant
    """
    bases = {each for each in base.__mro__ if each.__name__ == "Strategy"}

    def wrap(resolve: Callable[[Any, str], str]) -> Callable[[Any, str], str]:
        @functools.wraps(resolve)
        def resolved(cls: Any, name: str) -> str:
            path = resolve(cls, name)
            if cls not in bases or "." in path:
                return path
            found = class_of(path.lower())
            if found is not None:
                return _path_of(found)
            more = hint(path, ours)
            if more:
                raise ValueError(f"No strategy is called {path!r}. {more}")
            return path

        return resolved

    _replace(importlib.import_module("jsonargparse._typehints"), "resolve_class_path_by_name", wrap)


def _path_of(kind: type) -> str:
    """Returns from where a class is imported: from the package itself, if its name is public."""
    package: Any = importlib.import_module(__name__.partition(".")[0])
    if getattr(package, kind.__name__, None) is kind:
        return f"{package.__name__}.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def hint(name: str, ours: Collection[str], others: Collection[str] = ()) -> str:
    """Returns our names that a wrong name may have meant, as a text; empty if there are none."""
    prefix = ALIAS if name.lower().startswith(ALIAS) else ""
    meant_ours = [f"{prefix}{own}" for own in ours]
    known = {_bare(other): "" for other in others} | {_bare(own): own for own in meant_ours}
    bare = _bare(name)
    near = [bare] if bare in known else get_close_matches(bare, known, 3, NAMES_ALIKE)
    nearest = [known[each] for each in near]
    if not nearest or not nearest[0]:
        return ""
    meant = " or ".join(f'"{own}"' for own in nearest if own)
    return f"Did you mean {meant}, of lightning_dsgd? `lightning-dsgd strategies` lists its names."


def _bare(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower()).removesuffix("strategy")


def hint_in(
    module: str, connector: str, ours: Collection[str], write: Callable[[Algorithm], str]
) -> None:
    """Adds a hint to the error of the Trainer, or the Fabric, of one of Lightning's packages.

    Args:
        module: the module of the connector
        connector: the private class that reads the arguments
        ours: the names of our strategies
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
                if isinstance(given, str):
                    theirs = set(getattr(self, "_registered_strategies", ())) - set(ours)
                    theirs -= {f"{ALIAS}{own}" for own in ours}
                    more = hint(given, ours, theirs)
                else:
                    found = meant(given)
                    more = f"Write strategy={write(found)}." if found is not None else ""
                if not more:
                    raise
                raise ValueError(f"{error}. {more}") from None  # ours: told in a line

        return checked

    owner = getattr(importlib.import_module(module), connector, None)
    _replace(owner, "_check_config_and_set_final_flags", wrap)


def _replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replaces an attribute by its wrapped form, once, and only if it is there."""
    real = getattr(owner, name, None)
    if real is not None and not hasattr(real, "of_lightning_dsgd"):
        wrapped = wrap(real)
        wrapped.of_lightning_dsgd = True
        setattr(owner, name, wrapped)
