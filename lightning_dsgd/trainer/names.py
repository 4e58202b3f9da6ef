"""The strategies' names where others look them up.

    Trainer(strategy="wagam")        Lightning refuses it: what may have been meant is added;
                                     Fabric too
    --trainer.strategy wagma --trainer.strategy.sync_period 20
                                     jsonargparse takes a class there: the name stands for one

Both places are private to their packages: where a version has them no more, all stays as it was.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any

from lightning_dsgd.hyperparameters import NAMES_ALIKE


def take_on_command_line(ours: Mapping[str, type]) -> None:
    """Lets a name stand for its class beside hyperparameters, in options and in YAML."""
    bases = {base for own in ours.values() for base in own.__mro__ if base.__name__ == "Strategy"}

    def wrap(resolve: Callable[[Any, str], str]) -> Callable[[Any, str], str]:
        @functools.wraps(resolve)
        def resolved(cls: Any, name: str) -> str:
            path = resolve(cls, name)
            if cls not in bases or "." in path:
                return path
            if path.lower() in ours:
                return f"lightning_dsgd.{ours[path.lower()].__name__}"
            more = hint(path, ours)
            if more:
                raise ValueError(f"No strategy is called {path!r}. {more}")
            return path

        return resolved

    _replace(importlib.import_module("jsonargparse._typehints"), "resolve_class_path_by_name", wrap)


def hint(name: str, ours: Collection[str], others: Collection[str] = ()) -> str:
    """Returns our names that a wrong name may have meant, as a text; empty if there are none."""
    known = {_bare(other): "" for other in others} | {_bare(own): own for own in ours}
    bare = _bare(name)
    near = [bare] if bare in known else get_close_matches(bare, known, 3, NAMES_ALIKE)
    nearest = [known[each] for each in near]
    if not nearest or not nearest[0]:
        return ""
    meant = " or ".join(f'"{own}"' for own in nearest if own)
    return f"Did you mean {meant}, of lightning_dsgd? `lightning-dsgd strategies` lists its names."


def _bare(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower()).removesuffix("strategy")


def hint_in(module: str, connector: str, ours: Collection[str]) -> None:
    """Adds a hint to the error of the Trainer, or the Fabric, of one of Lightning's packages."""

    def wrap(check: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(check)
        def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return check(self, *args, **kwargs)
            except ValueError as error:
                name = getattr(self, "_strategy_flag", None)
                if isinstance(name, str) and "invalid strategy name" in str(error):
                    known = set(getattr(self, "_registered_strategies", ()))
                    if more := hint(name, ours, known - set(ours)):
                        raise ValueError(f"{error}. {more}") from None  # ours: told in a line
                raise

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
