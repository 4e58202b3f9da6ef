"""What is compared, by name."""

from __future__ import annotations

import pytest

from lightning_dsgd import hyperparameters
from lightning_dsgd.lab.bench import contestants


def test_contestants_are_read_with_their_options() -> None:
    assert hyperparameters.parse("wagma:overlap=true:grace_s=0.02:evaluate=local") == (
        "wagma",
        {"overlap": True, "grace_s": 0.02, "evaluate": "local"},
    )
    assert hyperparameters.parse("wagma:overlap=True:grace_s=None:rule=paper") == (
        "wagma",
        {"overlap": True, "grace_s": None, "rule": "paper"},
    )
    assert contestants.strategy("wagma:group_size=2").algorithm.group_size == 2
    with pytest.raises(ValueError, match=r"one of .*ddp, .*wagma.* got 'wagner'"):
        contestants.strategy("wagner")


def test_a_group_of_one_node_can_be_measured() -> None:
    contestants.check("sgp:hierarchical=true", 4)
