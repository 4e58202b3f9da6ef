"""What a user may set of an algorithm: type, rule, default and text, stated once, at the field.

    @dataclass
    class LocalSGD(Algorithm):
        sync_period: int = at_least(1, default=8, doc="how many steps lie between two averages")

The type is the field's annotation.  From this come the refusal of what cannot work,

    sync_period must be a whole number of at least 1, got sync_period=0; try sync_period=8

the arguments and the docstring of the strategy that Lightning knows, and the command line's help.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, Final, TypeVar

T = TypeVar("T")

_KINDS: Final[dict[str, tuple[type, str]]] = {
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "True or False"),
    "str": (str, "a text"),
}
"""What a value may be, by the annotation of its field."""

_METADATA: Final = "lightning_dsgd"
_ALIKE: Final = 0.4
"""How much of a text must be that of a choice for it to be meant, as `difflib` counts it."""

NAMES_ALIKE: Final = 0.7
"""The same for names, of which there are more."""

_PYTHONS: Final = {"True": True, "False": False, "None": None}
"""The words of Python that JSON spells differently."""


@dataclass(frozen=True)
class _Setting:
    """What stands at a field besides its type and its default."""

    doc: str
    words: str = ""  # the rule, after the words for the type
    holds: Callable[[Any], bool] = lambda value: True
    choices: tuple[Any, ...] = ()


def setting(*, default: Any, doc: str) -> Any:
    """Any value of the field's type."""
    return _made(default, _Setting(doc))


def at_least(least: float, *, default: Any, doc: str, below: float | None = None) -> Any:
    """A number that is not smaller; with `below`, smaller than that."""
    words = f" of at least {least}" + ("" if below is None else f" and below {below}")
    in_range = _Setting(doc, words, lambda v: v >= least and (below is None or v < below))
    return _made(default, in_range)


def above(limit: float, *, default: Any, doc: str, at_most: float | None = None) -> Any:
    """A number that is larger; with `at_most`, not larger than that."""
    words = f" above {limit}" + ("" if at_most is None else f" and at most {at_most}")
    in_range = _Setting(doc, words, lambda v: v > limit and (at_most is None or v <= at_most))
    return _made(default, in_range)


def one_of(*choices: str, default: Any, doc: str) -> Any:
    """One of some texts."""
    return _made(default, _Setting(doc, "", lambda value: value in choices, choices))


def with_default(owner: Any, name: str, default: Any) -> Any:
    """The field of a base class, with its rule and its text, but another default."""
    [of_base] = (each for each in _own(owner) if each.name == name)
    return _made(default, _setting(of_base))


def check(owner: Any) -> None:
    """Raises `ValueError` for the first field whose value breaks its rule.

    Or is of another type: a command line may have passed text, and "False" is true.
    """
    for each in _own(owner):
        value = getattr(owner, each.name)
        if not _is_allowed(each, value):
            raise ValueError(
                f"{each.name} must be {_expected(each)}, got {each.name}={value!r}; try "
                f"{each.name}={_meant(each, value)!r}"
            )


def names(owner: Any) -> list[str]:
    """Of all fields, in their order."""
    return [each.name for each in _own(owner)]


def arguments(owner: Any) -> str:
    """The fields as the part "Args:" of a docstring lists them; empty without fields."""
    lines = []
    for each in _own(owner):
        text = f"{each.name}: {_setting(each).doc}"
        lines += textwrap.wrap(text, 96, initial_indent="    ", subsequent_indent="        ")
    return "\n".join(lines)


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """`wagma:overlap=true:grace_s=0.02` as a name and its options.

    A value is read as JSON or one of Python's words, or is a text where it is none.
    """
    name, *options = text.split(":")
    pairs = (option.partition("=") for option in options)
    return name, {key: _value(value) for key, _, value in pairs}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the known one that it is most like, if any."""
    return "".join(
        f"; did you mean {near}?" for near in get_close_matches(name, known, 1, NAMES_ALIKE)
    )


def strategy_called(name: str, known: Mapping[str, T]) -> T:
    """What the name stands for; raises `ValueError` where it is unknown."""
    if name not in known:
        raise ValueError(
            f"the strategy must be one of {', '.join(known)}, got {name!r}"
            f"{did_you_mean(name, known)}"
        )
    return known[name]


def _value(text: str) -> Any:
    if text in _PYTHONS:
        return _PYTHONS[text]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _made(default: Any, made: _Setting) -> Any:
    return field(default=default, metadata={_METADATA: made})


def _own(owner: Any) -> tuple[Field[Any], ...]:
    return fields(owner) if is_dataclass(owner) else ()


def _setting(each: Field[Any]) -> _Setting:
    found: _Setting = each.metadata.get(_METADATA, _Setting(""))
    return found


def _kinds(each: Field[Any]) -> list[str]:
    """The names in the annotation: ["int", "None"] of "int | None"."""
    return getattr(each.type, "__name__", str(each.type)).split(" | ")


def _is_allowed(each: Field[Any], value: Any) -> bool:
    kinds = _kinds(each)
    if value is None and "None" in kinds:
        return True
    types = tuple(_KINDS[kind][0] for kind in kinds if kind in _KINDS)
    if not types:  # a type that only the algorithm knows
        return True
    is_flag = isinstance(value, bool)  # which is a whole number to Python
    if (is_flag and "bool" not in kinds) or not isinstance(value, types):
        return False
    return _setting(each).holds(value)


def _meant(each: Field[Any], value: Any) -> Any:
    """What a text says, or is most like; the default where that cannot be told."""
    if not isinstance(value, str):
        return each.default
    said = _value(value.lower())
    if said is not None and _is_allowed(each, said):
        return said
    return next(iter(get_close_matches(value, _setting(each).choices, 1, _ALIKE)), each.default)


def _expected(each: Field[Any]) -> str:
    kinds, rule = _kinds(each), _setting(each)
    words = [f'"{choice}"' for choice in rule.choices]
    if not words:
        words = [_KINDS[kind][1] + rule.words for kind in kinds if kind in _KINDS]
    *others, last = ["None"] * ("None" in kinds) + words
    return f"{', '.join(others)} or {last}" if others else last
