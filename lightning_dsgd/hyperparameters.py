"""What a user may set of an algorithm: type, rule, default and text, stated once, at the field.

    @dataclass
    class LocalSGD(Algorithm):
        sync_period: int = at_least(1, default=8, doc="how many steps lie between two averages")

The type is the field's annotation.  From this come the refusal of what cannot work,

    sync_period must be a whole number of at least 1, got sync_period=0; try sync_period=8

the arguments and the docstring of the strategy that Lightning knows, and the command line's help.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, Final

_KINDS: Final[dict[str, tuple[type, str]]] = {
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "True or False"),
    "str": (str, "a text"),
}
"""What a value may be, by the annotation of its field."""

_METADATA: Final = "lightning_dsgd"
_ALIKE: Final = 0.4
"""How like a choice a text must be to be taken for it, as `difflib` counts likeness."""

NAMES_ALIKE: Final = 0.7
"""The same for names, of which more are known than choices of a field."""

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
    """Declares a field that takes any value of its type."""
    return _made(default, _Setting(doc))


def at_least(
    least: float, *, default: Any, doc: str, below: float | None = None, word: str = ""
) -> Any:
    """Declares a number of at least `least` and, if `below` is given, smaller than `below`.

    With a `word` the value may also be this text.
    """
    words = f" of at least {least}" + ("" if below is None else f" and below {below}")

    def holds(value: Any) -> bool:
        if isinstance(value, str):
            return value == word
        return bool(value >= least and (below is None or value < below))

    return _made(default, _Setting(doc, words, holds, (word,) if word else ()))


def above(limit: float, *, default: Any, doc: str, at_most: float | None = None) -> Any:
    """Declares a number above `limit` and, if `at_most` is given, at most that."""
    words = f" above {limit}" + ("" if at_most is None else f" and at most {at_most}")
    in_range = _Setting(doc, words, lambda v: v > limit and (at_most is None or v <= at_most))
    return _made(default, in_range)


def one_of(*choices: str, default: Any, doc: str) -> Any:
    """Declares a text that must be one of `choices`."""
    return _made(default, _Setting(doc, "", lambda value: value in choices, choices))


def take_printed(owner: Any) -> None:
    """With `paper=True` gives fields that are None the values that the paper has (`printed`)."""
    for name, value in owner.printed.items():
        if owner.paper is True and getattr(owner, name) is None:
            setattr(owner, name, value)


def check_printed(owner: Any) -> None:
    """Raises `ValueError` for the first field that `paper=True` forbids to be what it is."""
    for name, value in owner.printed.items():
        if owner.paper and (got := getattr(owner, name)) != value:
            raise ValueError(
                f"with paper=True {name} must be as in the paper, got {name}={got!r}; set "
                f"{name}={value!r} or paper=False"
            )


def with_default(owner: Any, name: str, default: Any) -> Any:
    """Declares a field of the base class again, with its rule and text, but another default."""
    [of_base] = (each for each in _own(owner) if each.name == name)
    return _made(default, _setting(of_base))


def check(owner: Any) -> None:
    """Raises `ValueError` for the first field whose value breaks its rule.

    A value of another type breaks it too: a command line may pass text, and "False" is true.
    """
    for each in _own(owner):
        value = getattr(owner, each.name)
        if not _is_allowed(each, value):
            raise ValueError(
                f"{each.name} must be {_expected(each)}, got {each.name}={value!r}; try "
                f"{each.name}={_meant(each, value)!r}"
            )


def names(owner: Any) -> list[str]:
    """Returns the names of all fields, in their order."""
    return [each.name for each in _own(owner)]


def documented(owner: type) -> str:
    """Returns the docstring of a class with all its fields, before `dataclass` has seen it.

    `help`, and jsonargparse for a command line, read what a field is for in the docstring.
    """
    inherited = [each for base in reversed(owner.__mro__[1:]) for each in _own(base)]
    fixed = {
        name for name, kind in inspect.get_annotations(owner).items() if "ClassVar" in str(kind)
    }
    own = {name: each for name, each in vars(owner).items() if isinstance(each, Field)}
    texts = {each.name: _setting(each).doc for each in inherited if each.name not in fixed}
    texts |= {name: _setting(each).doc for name, each in own.items()}
    what = inspect.cleandoc(vars(owner).get("__doc__") or "")
    listed = "\n".join(argument(name, text) for name, text in texts.items())
    return f"{what}\n\nArgs:\n{listed}" if listed else what


def arguments(owner: Any) -> str:
    """Returns the fields as "Args:" of a docstring lists them; an empty text without fields."""
    return "\n".join(argument(each.name, _setting(each).doc) for each in _own(owner))


def argument(name: str, text: str) -> str:
    """Returns an entry of the "Args:" of a docstring."""
    return textwrap.fill(f"    {name}: {text}", 96, subsequent_indent="        ")


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Splits `wagma:overlap=true:grace_s=0.02` into a name and its options.

    A value is read as JSON or as one of Python's words; anything else is a text.
    """
    name, *options = text.split(":")
    pairs = (option.partition("=") for option in options)
    return name, {key: _value(value) for key, _, value in pairs}


def check_names(owner: type, given: Mapping[str, Any]) -> None:
    """Raises `TypeError` for the first keyword that a class does not take."""
    made_by: Any = owner.__init__  # type: ignore[misc]
    _, *ours = inspect.signature(made_by).parameters.values()
    if made_by is object.__init__:
        ours = []
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in ours):
        return
    known = [each.name for each in ours]
    for name, value in given.items():
        if name not in known:
            raise TypeError(unknown(owner.__name__, name, value, known))


def unknown(
    owner: str, name: str, value: Any, ours: Sequence[str], elsewhere: Sequence[str] = ()
) -> str:
    """Returns what an error says of an unknown option: which are known, which may be meant.

    Args:
        owner: the name of the class that was given the option
        name: the option
        value: its value
        ours: the options that the class takes
        elsewhere: options that belong to another class, and may be meant too
    """
    return (
        f"{owner} has no option {name}, got {name}={value!r}; it takes "
        f"{', '.join(ours) or 'none'}{did_you_mean(name, [*ours, *elsewhere])}"
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error about an unknown name: the most similar known one, if any."""
    return "".join(
        f"; did you mean {near}?" for near in get_close_matches(name, known, 1, NAMES_ALIKE)
    )


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
    """Returns the names in the annotation: ["int", "None"] of "int | None"."""
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
    """Returns what a text says, or is most like; the default where that cannot be told."""
    if not isinstance(value, str):
        return each.default
    said = _value(value.lower())
    if said is not None and _is_allowed(each, said):
        return said
    return next(iter(get_close_matches(value, _setting(each).choices, 1, _ALIKE)), each.default)


def _expected(each: Field[Any]) -> str:
    kinds, rule = _kinds(each), _setting(each)
    words = [f'"{choice}"' for choice in rule.choices]
    others = [kind for kind in kinds if kind in _KINDS and not (words and kind == "str")]
    words = [_KINDS[kind][1] + rule.words for kind in others] + words
    if "None" in kinds:
        words.insert(0, "None")
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last
