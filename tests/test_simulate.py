"""`lightning-dsgd simulate`: what it predicts where the answer is known, and what it refuses."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dsgd import cli
from lightning_dsgd.algorithms.oktopk import OkTopk
from lightning_dsgd.algorithms.wagma import WAGMA
from lightning_dsgd.bench import simulation as bench
from lightning_dsgd.bench.profiles import PROFILES, Profile
from lightning_dsgd.callbacks import StragglerInjector

PLAIN = Profile(latency_s=0.0, bandwidth_bytes_s=1e9, compute_s=0.1, num_params=25_000_000)
"""All weights take 0.1 s to send, as long as a step computes."""

STRAGGLERS = replace(PLAIN, bandwidth_bytes_s=math.inf, delay_s=0.2, delayed_ranks=2)


def step_s(spec: str, world_size: int, profile: Profile, steps: int = 10) -> float:
    return 1 / bench.simulate(spec, world_size, profile, steps).slowest_steps_per_s


# ---- where the answer is known ----


@pytest.mark.parametrize(
    ("spec", "messages"),
    [
        ("no_sync", 0.0),
        ("allreduce", 2 * 7 / 8),
        ("local_sgd:sync_period=1", 2 * 7 / 8),
        ("local_sgd:sync_period=5", 2 * 7 / 8 / 5),
        ("sgp", 1.0),
        ("sgp:num_peers=2", 2.0),
        ("popsgd:wire_dtype=bfloat16", 0.5),
        ("wagma:group_size=2:sync_period=100", 1.0),
        ("wagma:group_size=4:sync_period=5", (4 * 2 * 3 / 4 + 2 * 7 / 8) / 5),
    ],
)
def test_a_step_takes_the_time_of_its_messages(spec: str, messages: float) -> None:
    """`messages` of all weights, beside the computation; 8 ranks, nobody late."""
    run = bench.simulate(spec, 8, PLAIN, 10)
    assert 1 / run.slowest_steps_per_s == pytest.approx(0.1 + 0.1 * messages, rel=1e-4)
    assert run.bytes_sent == pytest.approx(100e6 * messages, rel=1e-4)


@pytest.mark.parametrize("spec", ["hpsgd", "adpsgd", "wagma:overlap=true:sync_period=100"])
def test_who_waits_for_nobody_is_as_fast_as_without_messages(spec: str) -> None:
    assert step_s(spec, 8, PLAIN) == pytest.approx(0.1, rel=1e-3)


def test_the_bytes_of_sparse_messages_follow_the_density_and_not_the_stand_in() -> None:
    """Ok-Topk sends about 2k (P-1)/P entries of 5.1 bytes; control messages hardly count."""
    for density in (0.01, 0.02):
        run = bench.simulate(f"oktopk:density={density}", 8, PLAIN, 2)
        expected = 2 * 7 / 8 * density * PLAIN.num_params * 5.1
        assert run.bytes_sent == pytest.approx(expected, rel=0.25)


def test_a_sparse_stand_in_has_entries_for_each_region() -> None:
    for world_size in (4, 256):
        n = bench.stand_in(OkTopk(density=0.001), world_size, 10**9)
        assert 0.001 * n >= world_size
        assert n % world_size == 0
    assert bench.stand_in(WAGMA(), 6, 10**9) % 6 == 0
    assert bench.stand_in(WAGMA(), 6, 20) == 20


def test_only_what_stands_for_the_model_counts_for_more() -> None:
    count = bench.message_bytes(100.0)
    assert count(torch.zeros(3)) == 1200
    assert count(torch.zeros(3, dtype=torch.bfloat16)) == 600
    assert count(torch.zeros(3, dtype=torch.int64)) == 24
    assert count(torch.zeros(1, dtype=torch.float64)) == 8
    assert count(torch.zeros(34, dtype=torch.uint8)) == 24 + 1000
    assert count(torch.zeros(0, dtype=torch.uint8)) == 0


def test_selection_costs_what_the_profile_says() -> None:
    free = replace(PLAIN, bandwidth_bytes_s=math.inf)
    slow = replace(free, exact_topk_s=4e-9, threshold_s=1e-9)  # 0.1 s and 0.025 s of all
    for spec, more_s in (
        ("topk_allgather", 0.1),
        ("gaussian_topk", 0.05),
        ("oktopk:threshold_period=4", 0.025 + 0.1 / 4),
        ("gtopk", 0.1 + 0.1 * 2 * 0.01 * 2),
        ("allreduce", 0.0),
    ):
        assert step_s(spec, 4, slow, 2) - step_s(spec, 4, free, 2) == pytest.approx(more_s), spec


def test_ranks_beyond_the_devices_share_them() -> None:
    station = replace(PLAIN, devices=4)
    assert step_s("no_sync", 4, station) == pytest.approx(0.1)
    assert step_s("no_sync", 12, station) == pytest.approx(0.3)


def test_a_spread_has_the_figures_that_it_is_given() -> None:
    spread = PROFILES["piz-daint-habitat"]
    times = torch.tensor(spread.step_times(50, 100, seed=0)).flatten()
    assert times.min() >= 1.7
    assert times.max() <= 43.5
    assert float(times.median()) == pytest.approx(1.9, abs=0.02)
    assert times.max() > 20


# ---- stragglers ----


def test_the_delayed_ranks_are_those_of_the_straggler_injector() -> None:
    times = STRAGGLERS.step_times(8, 5, seed=3)
    injector = StragglerInjector(0.2, 2, seed=3)
    for step in range(5):
        late = [rank for rank in range(8) if times[rank][step] > 0.15]
        assert late == sorted(injector.delayed_ranks(step, 8))


def test_wait_avoidance_pays_with_stragglers_and_costs_nothing_without() -> None:
    assert step_s("allreduce", 16, STRAGGLERS) == pytest.approx(0.3)
    assert step_s("wagma", 16, STRAGGLERS) < 0.75 * 0.3
    calm = replace(STRAGGLERS, delayed_ranks=0)
    assert step_s("wagma", 16, calm) == pytest.approx(0.1)


def test_an_all_reduce_takes_longer_among_more_ranks() -> None:
    slow = replace(PLAIN, bandwidth_bytes_s=125e6, latency_s=1e-3)
    times = [step_s("allreduce", p, slow, 2) for p in (2, 4, 8, 16)]
    assert times == sorted(set(times))
    shared = replace(slow, shared_link=True)
    assert step_s("allreduce", 8, shared, 2) > 4 * step_s("allreduce", 8, slow, 2)


def test_two_runs_are_equal_to_the_bit_and_another_seed_gives_another() -> None:
    runs = [bench.simulate("wagma", 8, STRAGGLERS, 12, seed) for seed in (0, 0, 1)]
    assert torch.equal(runs[0].done_s, runs[1].done_s)
    assert runs[0].bytes_sent == runs[1].bytes_sent
    assert not torch.equal(runs[0].done_s, runs[2].done_s)


# ---- the command line ----


def test_table_result_file_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    cli.main(
        f"simulate --algorithms wagma,allreduce --ranks 4,8 --profile emulated-1gbit --params 25e5 "
        f"--compute-ms 100 --delay-ms 0 --steps 10 --output {tmp_path}/a/r.json "
        f"--plot {tmp_path}/p.png".split()
    )
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("|")]) == 2 + 4
    assert lines[2].startswith("| `allreduce` | 4 | 4.5")  # 0.1 + 0.12 s
    report = json.loads((tmp_path / "a" / "r.json").read_text())
    assert report["command"].startswith("lightning-dsgd simulate --algorithms wagma,allreduce")
    assert report["profile"]["num_params"] == 2_500_000
    assert report["cores"] > 0
    for row in report["rows"]:
        assert row["ideal_steps_per_s"] == pytest.approx(10)
        assert row["of_ideal"] == pytest.approx(row["steps_per_s"] / 10)
        if row["algorithm"] == "allreduce":
            assert row["ratio"] == 1
        else:
            assert row["ratio"] > 1.05  # half of the bytes at 4 ranks
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_without_an_all_reduce_nothing_is_compared_to_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cli.main(["simulate", "--algorithms", "dpsgd", "--ranks", "4", "--steps", "2"])
    assert "|  |" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--algorithms wagmas", "must be one of allreduce, no_sync"),
        (
            "--algorithms wagma:group_size=8 --ranks 4",
            "group_size must be at least 1 and no larger",
        ),
        ("--algorithms oktopk:density=2", "density must be above 0"),
        ("--ranks 0", "the number of ranks and of steps must be at least 1"),
        ("--steps 0", "the number of ranks and of steps must be at least 1"),
        ("--ranks four", "invalid literal"),
        ("--ranks 4 --delayed-ranks 5", "delayed_ranks must be at most the number of ranks"),
        ("--profile cray", "invalid choice: 'cray'"),
        ("--check missing.json", "No such file"),
    ],
)
def test_bad_input(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["simulate", *arguments.split()])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


# ---- the check against real runs ----


def measured(**rates: float) -> dict[str, Any]:
    """A result file of `bench throughput`."""
    return {
        "summary": [{"strategy": spec, "steps_per_s": rate} for spec, rate in rates.items()],
        "cells": [{"round": 0}, {"round": 1}],
        "settings": {
            "ranks": 4,
            "compute_s": 0.1,
            "delay_s": 0.05,
            "delayed_ranks": 4,
            "params": "25e5",
            "steps": 10,
            "network": {"rate_bit_s": 8e8, "latency_s": 0.0, "emulated": True},
        },
    }


def test_check_compares_with_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step of 150 ms, 10 MB at 100 MB/s: an all-reduce takes 150 ms more."""
    report = measured(ddp=3.0, no_sync=6.0)
    report["summary"].append({"strategy": "ddp_powersgd:rank=2", "steps_per_s": 4.0})
    rows, overhead_s = bench.check(report)
    assert overhead_s == pytest.approx(1 / 6 - 0.15)
    predicted = {row["strategy"]: row["predicted"] for row in rows}
    assert predicted["no_sync"] == pytest.approx(6.0)
    assert predicted["ddp"] == pytest.approx(1 / (1 / 6 + 0.15), rel=1e-3)
    assert predicted["ddp_powersgd:rank=2"] is None
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(report))
    cli.main(["simulate", "--check", str(path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| `ddp` | 3.000 | 3.158 | 1.05 |"
    assert lines[4] == "| `ddp_powersgd:rank=2` | 4.000 | not ours | |"
    assert lines[-1].endswith(" 16.7 ms")


def test_check_takes_the_rounds_as_seeds_and_loopback_as_no_cost() -> None:
    report = measured(allreduce=1.0)
    report["settings"] |= {"delayed_ranks": 1, "ranks": 8, "delay_s": 0.4}
    report["settings"]["network"] = {"rate_bit_s": None, "latency_s": None, "emulated": False}
    rows, overhead_s = bench.check(report)
    assert overhead_s == 0
    assert rows[0]["predicted"] == pytest.approx(2.0)  # one of eight is late in each step
    report["summary"] = [{"strategy": "no_sync", "steps_per_s": 1e3}]
    profile = replace(STRAGGLERS, delay_s=0.4, delayed_ranks=1)
    rates = [bench.simulate("no_sync", 8, profile, 10, seed).slowest_steps_per_s for seed in (0, 1)]
    assert bench.check(report)[0][0]["predicted"] == pytest.approx(sum(rates) / 2)


def test_check_names_what_a_result_file_lacks() -> None:
    report = measured(ddp=1.0)
    del report["settings"]["delay_s"]
    with pytest.raises(ValueError, match="with its settings, got one without 'delay_s'"):
        bench.check(report)


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_runs(name: str) -> None:
    run = bench.simulate("allreduce", 4, PROFILES[name], 2)
    assert 0 < run.steps_per_s <= run.ideal_steps_per_s
