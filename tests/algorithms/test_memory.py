"""What a rank needs more at its peak, as a strategy's page says it."""

from __future__ import annotations

import pytest

from lightning_dsgd.algorithms import ALGORITHMS, make_algorithm


def test_every_strategy_says_what_memory_it_needs() -> None:
    for name in set(ALGORITHMS) - {"no_sync", "local_sgd"}:
        assert make_algorithm(name).num_copies(8) >= 1, name


@pytest.mark.parametrize(
    ("spec", "copies"),
    [
        ("allreduce:wire_dtype=int8:overlap=true", 3),
        ("diloco:overlap_steps=2:num_fragments=4", 2.5),
        ("sgp, claimed", 3),
        ("popsgd, on a device", 7),
        ("wagma:grace_s=Infinity", 0),
        ("wagma:grace_s=Infinity:overlap=true", 3),
        ("wagma:overlap=true:sync_period=10:wire_dtype=int8", 7),  # during a sum
        ("topk_dsa", 2.125),
    ],
)
def test_memory_is_what_the_page_of_a_strategy_says(spec: str, copies: float) -> None:
    name, _, case = spec.partition(", ")
    cases = {"is_claimed": case == "claimed", "on_device": case == "on a device"}
    assert make_algorithm(name).num_copies(8, **cases) == copies
