"""Keyword arguments that several classes take, stated once, in a `TypedDict`.

    class Options(TypedDict, total=False):
        check: Annotated[bool, setting(default=False, doc="looks for NaN")]

    @lists(Options)
    class Ours:
        def __init__(self, **given: Unpack[Options]) -> None:
            chosen = choose("Ours", Options, given)

Editors and type checkers read the `TypedDict`.  `help`, `inspect.signature` and command lines read
the signature and the docstring, which `lists` completes.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, make_dataclass
from inspect import Parameter
from typing import Any, Final, TypeVar, cast, get_type_hints

from lightning_dsgd import hyperparameters

Table = TypeVar("Table", bound=Mapping[str, Any])
Owner = TypeVar("Owner", bound=type)

_PLACE: Final = re.compile(r"^    \*\*given: .*(?:\n {8}.*)*", re.MULTILINE)
"""What a docstring says of the keywords before `lists` completes it."""


def choose(owner: str, table: type[Table], given: Table) -> Table:
    """Returns a table's keywords, those left out with their defaults.

    Args:
        owner: the name of the class that takes them
        table: what it takes
        given: what it was given

    Raises:
        TypeError: if a name is unknown
        ValueError: if a value breaks its rule
    """
    ours = names(table)
    for name in given:
        if name not in ours:
            raise TypeError(hyperparameters.unknown(owner, name, given[name], ours))
    made = _dataclass(table)(**given)
    hyperparameters.check(made)
    return cast(Table, vars(made))


def names(table: type) -> list[str]:
    """Returns the names of a table's keywords."""
    return hyperparameters.names(_dataclass(table))


def lists(table: type) -> Callable[[Owner], Owner]:
    """Has the signature and the docstring of a class list a table's keywords."""

    def completed(owner: Owner) -> Owner:
        init = owner.__init__  # type: ignore[misc]

        @functools.wraps(init)
        def __init__(self: Any, *args: Any, **given: Any) -> None:
            init(self, *args, **given)

        own = inspect.signature(init, eval_str=True).parameters.values()
        __init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*(p for p in own if p.kind is not Parameter.VAR_KEYWORD), *_parameters(table)]
        )
        owner.__init__ = __init__  # type: ignore[misc]
        texts = hyperparameters.arguments(_dataclass(table))
        owner.__doc__ = _PLACE.sub(lambda _: texts, inspect.getdoc(owner) or "")
        return owner

    return completed


def _parameters(table: type) -> list[Parameter]:
    return [
        Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in fields(_dataclass(table))
    ]


@functools.cache
def _dataclass(table: type) -> type:
    """Returns a dataclass of a table's keywords, for `hyperparameters`."""
    hints = get_type_hints(table, include_extras=True)
    made = [(name, hint.__origin__, hint.__metadata__[0]) for name, hint in hints.items()]
    return make_dataclass(table.__name__, made)
