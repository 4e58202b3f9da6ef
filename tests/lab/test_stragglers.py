"""The draw of the ranks that are delayed."""

from __future__ import annotations

from lightning_dsgd.lab.stragglers import delayed_ranks


def test_a_draw_depends_on_the_seed_and_the_step_alone() -> None:
    draws = [delayed_ranks(seed, step, 8, 2) for seed in (0, 1) for step in range(20)]
    assert draws == [delayed_ranks(seed, step, 8, 2) for seed in (0, 1) for step in range(20)]
    assert draws[:20] != draws[20:]
    assert all(len(set(ranks)) == 2 for ranks in draws)
    assert {rank for ranks in draws for rank in ranks} == set(range(8))
