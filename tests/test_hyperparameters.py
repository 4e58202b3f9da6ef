"""The rules at the fields of algorithms: which values are taken, and what a refusal says."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

import pytest

from lightning_dsgd import hyperparameters
from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.hyperparameters import above, at_least, one_of, setting


@dataclass
class Options:
    steps: int = at_least(1, default=8, doc="steps")
    rate: float = above(0, at_most=1, default=0.5, doc="rate")
    momentum: float = at_least(0, below=1, default=0.0, doc="momentum")
    form: str | None = one_of("wide", "narrow", default=None, doc="form")
    overlap: bool = setting(default=False, doc="overlap")
    size: int | str | None = at_least(1, default=None, word="auto", doc="size")


@pytest.mark.parametrize(
    "given",
    [
        {"steps": 1},
        {"rate": 1},
        {"rate": 1e-9},
        {"momentum": 0, "form": "narrow"},
        {"momentum": 0.999, "form": None, "overlap": True},
        {"size": "auto"},
        {"size": 1},
    ],
)
def test_values_up_to_the_limits_are_taken(given: dict[str, Any]) -> None:
    hyperparameters.check(Options(**given))


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1, got steps=0; try steps=8"),
        ({"steps": True}, "steps must be a whole number of at least 1, got steps=True; try"),
        ({"steps": 1.5}, "a whole number of at least 1, got steps=1.5"),
        ({"steps": "4"}, "got steps='4'; try steps=4"),
        ({"rate": 0}, "rate must be a number above 0 and at most 1, got rate=0"),
        ({"rate": 1.01}, "got rate=1.01"),
        ({"momentum": 1.0}, "momentum must be a number of at least 0 and below 1, got momentum=1"),
        ({"overlap": 1}, "overlap must be True or False, got overlap=1"),
        ({"overlap": "false"}, "got overlap='false'; try overlap=False"),
        ({"size": 0}, 'size must be None, a whole number of at least 1 or "auto", got size=0; try'),
        ({"size": "atuo"}, "got size='atuo'; try size='auto'"),
        ({"form": "wde"}, 'form must be None, "wide" or "narrow", got form=\'wde\'; try form=\'wi'),
    ],
)
def test_what_breaks_a_rule_is_refused_with_what_to_try(
    given: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(ValueError) as info:  # noqa: PT011 - the text is looked at below
        hyperparameters.check(Options(**given))
    assert refusal in str(info.value)


def test_a_name_and_its_options_are_read_as_json_or_pythons_words() -> None:
    assert hyperparameters.parse("wagma:overlap=true:grace_s=0.02:rule=paper:size=None") == (
        "wagma",
        {"overlap": True, "grace_s": 0.02, "rule": "paper", "size": None},
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS.values())
def test_the_options_that_are_described_are_those_that_are_taken(
    algorithm: type[Algorithm],
) -> None:
    _, _, listed = (algorithm.__doc__ or "").partition("Args:\n")
    described = re.findall(r"^    (\w+): ", listed, re.MULTILINE)
    assert described == list(inspect.signature(algorithm).parameters)
