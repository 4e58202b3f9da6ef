"""Keyword arguments that several classes take, stated once, in a `TypedDict`.

    class Options(TypedDict, total=False):
        check: Annotated[bool, setting(default=False, doc="looks for NaN")]
        timeout: timedelta                                      of the class that ours builds upon

    @lists(Options)
    class Ours(Theirs):
        def __init__(self, **given: Unpack[Options]) -> None:
            chosen = choose("Ours", Options, given)
            super().__init__(**passed_on(Options, given))

Editors and type checkers read the `TypedDict`.  `help`, `inspect.signature` and command lines read
the signature and the docstring, which `lists` completes.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, make_dataclass
from inspect import Parameter
from typing import Annotated, Any, Final, TypeVar, cast, get_origin, get_type_hints

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
    ours, theirs = names(table), names_of_others(table)
    for name in given:
        if name not in (*ours, *theirs):
            raise TypeError(unknown(owner, name, given[name], ours))
    made = _dataclass(table)(**{name: given[name] for name in ours if name in given})
    hyperparameters.check(made)
    return cast(Table, vars(made))


def passed_on(table: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what was given for the class that the table's owner builds upon."""
    return {name: value for name, value in given.items() if name not in names(table)}


def unknown(
    owner: str, name: str, value: Any, ours: Sequence[str], theirs: Sequence[str] = ()
) -> str:
    """Returns what an error says of an unknown name: which are known, which may be meant."""
    of_lightnings = f", and of Lightning's {', '.join(theirs)}" if theirs else ""
    return (
        f"{owner} has no option {name}, got {name}={value!r}; it takes {', '.join(ours)}"
        f"{of_lightnings}{hyperparameters.did_you_mean(name, [*ours, *theirs])}"
    )


def names(table: type) -> list[str]:
    """Returns the names of a table that have a text."""
    return hyperparameters.names(_dataclass(table))


def names_of_others(table: type) -> list[str]:
    """Returns the keywords of a table that its owner passes on to the class that it builds upon."""
    return [name for name, hint in _hints(table).items() if get_origin(hint) is not Annotated]


def texts(table: type) -> str:
    """Returns a table's texts as the "Args:" of a docstring list them."""
    return hyperparameters.arguments(_dataclass(table))


def parameters(table: type, owner: type) -> list[Parameter]:
    """Returns a table's keywords as parameters of a class, those of other classes last."""
    own = [_keyword(each.name, each.default, each.type) for each in fields(_dataclass(table))]
    package = __name__.partition(".")[0]
    theirs = next(base for base in owner.__mro__ if base.__module__.partition(".")[0] != package)
    others = inspect.signature(theirs.__init__).parameters  # type: ignore[misc]
    passed = [(name, others[name]) for name in names_of_others(table)]
    return own + [_keyword(name, other.default, other.annotation) for name, other in passed]


def lists(table: type) -> Callable[[Owner], Owner]:
    """Has the signature and the docstring of a class list a table's keywords."""

    def completed(owner: Owner) -> Owner:
        init = owner.__init__  # type: ignore[misc]

        @functools.wraps(init)
        def __init__(self: Any, *args: Any, **given: Any) -> None:
            init(self, *args, **given)

        own = inspect.signature(init, eval_str=True).parameters.values()
        __init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*(p for p in own if p.kind is not Parameter.VAR_KEYWORD), *parameters(table, owner)]
        )
        owner.__init__ = __init__  # type: ignore[misc]
        owner.__doc__ = _PLACE.sub(lambda _: texts(table), inspect.getdoc(owner) or "")
        return owner

    return completed


def _keyword(name: str, default: Any, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@functools.cache
def _hints(table: type) -> dict[str, Any]:
    return get_type_hints(table, include_extras=True)


@functools.cache
def _dataclass(table: type) -> type:
    """Returns a dataclass of the keywords that have a text, for `hyperparameters`."""
    own = [(n, hint) for n, hint in _hints(table).items() if get_origin(hint) is Annotated]
    return make_dataclass(table.__name__, [(n, h.__origin__, h.__metadata__[0]) for n, h in own])
