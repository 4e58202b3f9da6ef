"""`lightning-dsgd bench target`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dsgd.lab.bench import report, target, target_cell, target_rows, target_tables
from lightning_dsgd.lab.bench.network import why_not
from lightning_dsgd.lab.bench.situations import SITUATIONS, Situation
from lightning_dsgd.lab.bench.small_tasks import TASKS, Networks
from lightning_dsgd.simulated import SimulatedWorld
from tests.support.bench import run_bench
from tests.support.fits import some_now

ROOT = Path(__file__).parents[3]


def cell(spec: str, lr: float, seed: int, values: list[float], pace_s: float = 1.0) -> Any:
    """A curve with a point per step; each step takes `pace_s` and sends 1 MB."""
    steps = list(range(1, len(values) + 1))
    return {
        "situation": "random",
        "strategy": spec,
        "lr": lr,
        "seed": seed,
        "seconds": [pace_s * step for step in steps],
        "step": steps,
        "mb_sent": steps,
        "value": values,
        "steps_per_s": 1 / pace_s,
    }


CELLS = [
    cell("allreduce", 0.1, 0, [0.5, 0.79, 0.8], 2.0),
    cell("allreduce", 0.1, 1, [0.5, 0.80, 0.8], 2.0),
    cell("allreduce", 0.2, 0, [0.7, 0.7, 0.7], 2.0),
    cell("allreduce", 0.2, 1, [0.7, 0.7, 0.7], 2.0),
    cell("wagma", 0.1, 0, [0.6, 0.6, 0.6]),
    cell("wagma", 0.1, 1, [0.6, 0.6, 0.6]),
    cell("wagma", 0.2, 0, [0.7, 0.795, 0.81]),
    cell("wagma", 0.2, 1, [0.7, 0.795, 0.795]),
]


def test_each_strategy_has_its_own_learning_rate_and_each_seed_its_own_target() -> None:
    baseline, ours = target_rows.summarize(CELLS, higher_is_better=True)
    assert (baseline["lr"], ours["lr"]) == (0.1, 0.2)
    assert ours["lr_at_edge"]
    assert ours["value"] == pytest.approx(0.8025)
    # 99% of 0.8 is 0.792: ours after two steps of 1 s, all-reduce after three and two of 2 s.
    mean = (2 / 6 * 2 / 4) ** 0.5
    assert ours["to_target"]["0.99"] == {
        **{"reached": 2, "seconds": 2.0, "step": 2.0, "mb_sent": 2.0},
        "share": pytest.approx(mean, abs=1e-4),
        "interval": pytest.approx([2 / 6, 2 / 4], abs=1e-4),
    }
    # One seed of two never has all of it, and counts as 6 s, when all-reduce ends.
    assert ours["to_target"]["1"]["reached"] == 1
    assert ours["to_target"]["1"]["seconds"] == (3 + 6) / 2
    assert ours["end"]["share"] == 0.5
    assert ours["at_baseline_lr"]["lr"] == 0.1
    assert ours["at_baseline_lr"]["to_target"]["0.99"]["reached"] == 0
    best, others = target_rows.curves(CELLS, higher_is_better=True)
    assert [len(best), len(others)] == [4, 4]
    assert others[2]["value"] == [0.6, 0.6]  # the last, and every second one before


def test_rates_are_chosen_with_seeds_that_are_not_reported() -> None:
    tuning = [each | {"seed": each["seed"] + 1000} for each in CELLS]
    reported = [
        cell("allreduce", 0.1, 0, [0.5, 0.79, 0.8], 2.0),
        cell("wagma", 0.2, 0, [0.7, 0.7, 0.7]),
        cell("wagma", 0.1, 0, [0.9, 0.9, 0.9]),
    ]
    _, ours = target_rows.summarize(tuning + reported, {1000, 1001}, higher_is_better=True)
    assert (ours["lr"], ours["seeds"], ours["value"]) == (0.2, 1, 0.7)
    assert ours["at_baseline_lr"]["to_target"]["1"]["share"] == pytest.approx(1 / 6, abs=1e-4)


def test_a_target_must_hold_for_three_looks() -> None:
    for values, place in (
        ([0.9, 0.9, 0.7, 0.9, 0.9, 0.9, 0.7], 3),
        ([0.7, 0.9, 0.7, 0.9], 3),  # at the end, for all that are left
        ([0.9, 0.9, 0.7], None),
    ):
        assert target_rows.reached(cell("a", 0.1, 0, values), 0.8, higher_is_better=True) == place


def test_a_strategy_may_train_for_more_steps_than_all_reduce_and_be_there_sooner() -> None:
    longer = [
        cell("allreduce", 0.1, seed, [0.5, 0.6, 0.7, 0.8, 0.81], 2.0) | {"stretch": 1.7}
        for seed in (0, 1)
    ] + [
        cell("wagma", 0.1, seed, [0.5, 0.6, 0.7, last, last], 1.0) | {"stretch": 1.7}
        for seed, last in ((0, 0.8), (1, 0.82))
    ]
    baseline, ours = target_rows.summarize(CELLS + longer, higher_is_better=True)
    assert "stretch" not in baseline["to_target"]["1"]  # it is there later with more steps
    assert "stretch" not in ours["to_target"]["0.99"]
    assert ours["to_target"]["1"]["stretch"] == 1.7
    text = target_tables.time_table({"summary": [baseline, ours], "higher_is_better": True}, "1")
    assert "| `wagma` | 4 s (0.82 [0.67, 1.00]), 1.7x |" in text


def test_the_tables_say_how_many_seeds_got_there() -> None:
    summary = target_rows.summarize(CELLS, higher_is_better=True)
    settings = {"baseline": "allreduce", "epoch_steps": 30}
    result = {"summary": summary, "higher_is_better": True, "settings": settings}
    text = target_tables.tables(result | {"floors": {"random": 4.5}})
    assert "Training: epochs of 30 steps, with a validation after each." in text
    assert "| floor: nobody waits | 4 s (0.75) |" in text
    assert "| `wagma` | 2 s (0.41 [0.33, 0.50]) |" in text
    assert "| `wagma` | 4 s (0.87 [0.50, 1.50]), 1 of 2 |" in text
    assert "| `wagma` | never |" in text  # with all-reduce's rate
    assert "| `allreduce` | 80.0%; 0.50; 0.1* |" in text
    assert "one endless epoch" in target_tables.tables({**result, "settings": {}})
    old = json.loads((ROOT / "docs/results/choosing/target_stretch.json").read_text())
    assert "steps/s (mean of ranks); learning rate:" in target_tables.tables(old)
    assert "| `hpsgd` | never (1 of 5) |" in target_tables.time_table(old, "1")


CHECKED = {"task": "digits", "steps": 6, "epoch_steps": 3, "validation_s": 1.0}


@pytest.mark.parametrize(
    ("data", "spec"),
    [
        ({}, "popsgd"),
        ({"data": "claimed"}, "popsgd"),
        ({"data": "claimed"}, "local_sgd:sync_period=2"),
    ],
)
def test_an_epoch_counts_all_ranks(
    data: dict[str, str], spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks stand still after three steps; the slow one makes three, or half of the others'."""
    one = {"situation": "slow-rank", "strategy": spec, "lr": 0.2, "seed": 0, **data}
    steps: list[tuple[int, int]] = []
    step_s = Situation.step_s

    def noted(self: Situation, seed: int, step: int, rank: int) -> float:
        steps.append((rank, step))
        return step_s(self, seed, step, rank)

    monkeypatch.setattr(Situation, "step_s", noted)
    result = target_cell.run(one, CHECKED)
    assert len(steps) == 2 * 3 * 8
    assert len([rank for rank, _ in steps if rank == 7]) == (4 if data else 6)
    # Two epochs of 3 steps of 2 s; claimed, of 4 steps of 1 s; and each with a validation of 1 s.
    assert result["seconds"][-1] == pytest.approx(10 if data else 14, rel=0.04)
    assert result["job_steps_per_s"] == 6 / result["seconds"][-1]
    floor_s = SITUATIONS["slow-rank"].floor_s(0, 6)
    assert floor_s == pytest.approx(6 * 8 / 7.5, rel=0.02)


def test_what_is_held_back_is_applied_at_the_end() -> None:
    """After one step and the end, every gradient has had its effect, whoever sends it when."""
    ends = {}
    for spec in ("allreduce", "allreduce:wire_dtype=int8:delay=1", "topk_allgather", "oktopk"):
        one = {"situation": "random", "strategy": spec, "lr": 0.2, "seed": 0}
        training = target_cell.Training(TASKS["digits"], SITUATIONS["random"], one, {"steps": 1})
        SimulatedWorld(8).run(training.run)
        ends[spec] = training.x
    for x in ends.values():
        torch.testing.assert_close(x, ends["allreduce"])


def test_interrupted_run_continues_with_the_cells_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    options = (
        "--strategies allreduce,adpsgd --situations slow-rank --lrs 0.2 --seeds 1 --steps 6 "
        "--tuning-seeds 0"
    )
    run, seen = target_cell.run, []

    def failing(one: Any, settings: Any) -> Any:
        seen.append(one["strategy"])
        if seen == ["allreduce", "adpsgd"]:
            raise KeyboardInterrupt
        return run(one, settings)

    monkeypatch.setattr(target_cell, "run", failing)
    with pytest.raises(KeyboardInterrupt):
        run_bench(target, tmp_path / "t.json", options)
    result = run_bench(target, tmp_path / "t.json", options)
    assert seen == ["allreduce", "adpsgd", "adpsgd"]
    assert [row["strategy"] for row in result["summary"]] == ["allreduce", "adpsgd"]
    synchronous, asynchronous = result["summary"]
    assert synchronous["steps_per_s"] == pytest.approx(0.5, rel=0.05)  # the slow rank's rate
    assert asynchronous["steps_per_s"] == pytest.approx(7.5 / 8, rel=0.05)
    assert "| `adpsgd` | " in capsys.readouterr().out
    assert not list(tmp_path.glob("*.cells"))
    report.main([str(tmp_path / "t.json"), "--output", str(tmp_path / "report")])
    assert "| `adpsgd` | " in (tmp_path / "report" / "report.md").read_text()
    assert (tmp_path / "report" / "t.png").stat().st_size > 10_000


@pytest.mark.exhaustive
def test_several_jobs_give_the_same_result(tmp_path: Path) -> None:
    options = (
        "--strategies allreduce,popsgd --situations random --lrs 0.2,0.4 --seeds 1 --steps 4 "
        "--tuning-seeds 1 --epoch-steps 2 --data equal,claimed"
    )
    one = run_bench(target, tmp_path / "one.json", options)
    two = run_bench(target, tmp_path / "two.json", f"{options} --jobs 2")
    for key in ("summary", "others", "curves", "floors"):
        assert one[key] == two[key]
    assert [row["strategy"] for row in one["summary"]] == ["allreduce", "popsgd", "popsgd, claimed"]
    assert one["hyperparameters"]["popsgd"]["blocking"] is False


@some_now("task", TASKS, now=("digits", "translation"))
def test_gradients_of_several_ranks_are_those_of_each_alone(task: str) -> None:
    networks = Networks(TASKS[task], 3)
    inputs, targets, *_ = TASKS[task].examples(0)
    x = networks.weights() + 0.01 * torch.randn(3, len(networks.weights()))
    batches = inputs[:12].unflatten(0, (3, 4)), targets[:12].unflatten(0, (3, 4))
    together = networks.gradients(x, [0, 1, 2], batches)
    for rank in range(3):
        parameters = list(networks.module.parameters())
        torch.nn.utils.vector_to_parameters(x[rank], parameters)
        loss = TASKS[task].loss(networks.module(batches[0][rank]), batches[1][rank])
        alone = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        torch.testing.assert_close(together[rank], alone, rtol=1e-3, atol=1e-5)


def test_ranks_wait_at_the_end_for_one_an_hour_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is longer than the time-out of a job."""
    monkeypatch.setitem(SITUATIONS, "slow-rank", Situation("one rank is far behind", slow=600.0))
    one = {"situation": "slow-rank", "strategy": "popsgd", "lr": 0.1, "seed": 0}
    result = target_cell.run(one, {"task": "digits", "steps": 6})
    assert result["seconds"][-1] > 3500


@pytest.mark.exhaustive
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "network namespaces can be had")
def test_real_ranks_train_as_the_simulated_ones_do(tmp_path: Path) -> None:
    """All-reduce makes the same steps, whatever the time; a step is long enough for busy cores."""
    pytest.importorskip("matplotlib")
    options = "--situations slow-link --strategies allreduce --lrs 0.4 --seeds 1 --steps 6"
    options += " --tuning-seeds 0"
    simulated = run_bench(target, tmp_path / "simulated.json", options)
    real = run_bench(target, tmp_path / "real.json", f"{options} --real-ms 300")
    (a,), (b,) = simulated["curves"], real["curves"]
    assert a["step"] == b["step"]
    assert a["value"] == pytest.approx(b["value"], abs=0.01)  # sums are rounded in another order
    assert a["mb_sent"][-1] < b["mb_sent"][-1]  # with the weights that fill up
    assert b["seconds"][-1] > 0.9 * a["seconds"][-1]
