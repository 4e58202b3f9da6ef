"""A simulated run, where the answer is known; machines, and step times of a real run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_dsgd import cli
from lightning_dsgd.lab.simulate.machines import MACHINES, Machine, probed
from lightning_dsgd.lab.simulate.model import run
from lightning_dsgd.lab.simulate.recorded import Recorded
from tests.lab.probe.test_measure import everything, measure
from tests.lab.timeline.support import record

PLAIN = Machine(latency_s=0.0, bandwidth_bytes_s=1e9, compute_s=0.1, num_params=25_000_000)
"""All weights take 0.1 s to send, as long as a step computes."""

STRAGGLERS = replace(PLAIN, bandwidth_bytes_s=math.inf, delay_s=0.2, delayed_ranks=2)


def step_s(spec: str, world_size: int, machine: Machine, steps: int = 10) -> float:
    """Seconds per step of the slowest rank."""
    return 1 / run(spec, world_size, machine, steps).slowest_steps_per_s


@pytest.mark.parametrize(
    ("spec", "messages"),
    [
        ("no_sync", 0.0),
        ("allreduce", 2 * 7 / 8),
        # In the first of two periods the ranks agree on the model, unrounded.
        ("local_sgd:sync_period=5:wire_dtype=int8", 2 * 7 / 8 * (1 + 2 * 33 / 128) / 10),
        ("sgp:num_peers=2", 2.0),
        ("popsgd:blocking=true:wire_dtype=bfloat16", 0.5),
        ("wagma:group_size=4:sync_period=5", (4 * 2 * 3 / 4 + 2 * 7 / 8) / 5),
    ],
)
def test_a_step_takes_the_time_of_its_messages(spec: str, messages: float) -> None:
    """`messages` of all weights, beside the computation; 8 ranks, nobody late."""
    done = run(spec, 8, PLAIN, 10)
    assert 1 / done.slowest_steps_per_s == pytest.approx(0.1 + 0.1 * messages, rel=1e-4)
    assert done.bytes_sent == pytest.approx(100e6 * messages, rel=1e-4)


def test_messages_travel_beside_the_computation_where_the_strategy_lets_them() -> None:
    for spec in ("hpsgd", "wagma:overlap=true:sync_period=100"):
        assert step_s(spec, 8, PLAIN) == pytest.approx(0.1, rel=1e-3), spec
    # A sum takes 0.175 s, and the first piece a little over a third of a step of 0.1 s.
    assert step_s("allreduce:overlap=true", 8, PLAIN) == pytest.approx(0.1 / 3 + 0.175, rel=0.07)
    assert step_s("allreduce:delay=1", 8, PLAIN) == pytest.approx(0.175, rel=0.07)


def test_an_epoch_ends_with_its_slowest_rank_unless_batches_are_claimed() -> None:
    """One of 8 ranks takes 0.3 s for a step and the others 0.1 s, in two epochs of 6 steps."""
    machine = replace(PLAIN, recorded=Recorded(((0.1,) * 3,) * 7 + ((0.3,) * 3,)))
    rates = [
        run("popsgd", 8, machine, 12, epoch_steps=epoch_steps, data=data)
        for epoch_steps, data in ((None, "equal"), (6, "equal"), (6, "claimed"))
    ]
    endless, equal, claimed = (done.slowest_steps_per_s for done in rates)
    assert endless == pytest.approx(1 / 0.3, rel=0.01)
    assert equal == pytest.approx(1 / 0.3, rel=0.01)
    assert rates[1].steps_per_s < 0.8 * rates[0].steps_per_s  # the others wait in between
    # The slow rank begins its third step when 6 of 48 batches are left, and ends it last.
    assert claimed == pytest.approx(6 / 1.0, rel=0.02)
    assert rates[2].num_own.sum() == 8 * 12
    assert rates[2].num_own[7] == 6
    averaging = run("local_sgd:sync_period=4", 8, machine, 12, epoch_steps=6, data="claimed")
    assert averaging.num_own[7] < 9  # it is called to the averages
    with pytest.raises(ValueError, match="strategy whose ranks step together"):
        run("allreduce", 8, PLAIN, 12, epoch_steps=6, data="claimed")


def test_sparse_messages_follow_the_density_and_selection_costs_what_the_profile_says() -> None:
    """Ok-Topk sends about 14.2 bytes for each of k (P-1)/P entries; others hardly count."""
    done = run("oktopk:density=0.02:local_steps=2", 8, PLAIN, 2)
    expected = 7 / 8 * 0.02 * PLAIN.num_params * 14.2 / 2
    assert done.bytes_sent == pytest.approx(expected, rel=0.25)
    free = replace(PLAIN, bandwidth_bytes_s=math.inf)
    slow = replace(free, exact_topk_s=4e-9, threshold_s=1e-9)  # 0.1 s and 0.025 s of all
    for spec, more_s in (("oktopk:threshold_period=4", 0.025 + 0.1 / 4), ("allreduce", 0.0)):
        assert step_s(spec, 4, slow, 2) - step_s(spec, 4, free, 2) == pytest.approx(more_s), spec


def test_wait_avoidance_pays_with_stragglers_and_costs_nothing_without() -> None:
    assert step_s("allreduce", 16, STRAGGLERS) == pytest.approx(0.3)
    assert step_s("wagma", 16, STRAGGLERS) < 0.75 * 0.3
    calm = replace(STRAGGLERS, delayed_ranks=0)
    assert step_s("wagma", 16, calm) == pytest.approx(0.1)


# ---- machines, and step times of a real run ----
def test_a_simulated_run_takes_the_recorded_times(tmp_path: Path) -> None:
    record, begins = Recorded(((1.0, 2.0, 3.0), (10.0, 20.0, 30.0))), set()
    for seed in range(8):
        first, second = record.step_times(2, 7, seed)
        assert [10 * s for s in first] == second  # together
        begin = record.seconds[0].index(first[0])
        begins.add(begin)
        assert first == [record.seconds[0][(begin + i) % 3] for i in range(7)]  # in its order
    assert begins == {0, 1, 2}
    run("allreduce", 3, MACHINES["emulated-1gbit"], 12, trace=tmp_path)
    recorded = Recorded.read(tmp_path)
    assert (recorded.num_ranks, recorded.num_steps) == (3, 11)
    assert {round(s, 4) for of_rank in recorded.seconds for s in of_rank} == {0.4, 0.72}
    machine = probed(measure.cluster(everything("abc")), 1000, 0.0, recorded)
    done = run("no_sync", 3, machine, 11)
    mean_s = float(done.compute_s.mean())
    assert mean_s == pytest.approx(recorded.mean_s)
    assert done.steps_per_s == pytest.approx(1 / mean_s, rel=0.1)


def test_a_trace_that_says_too_little_is_refused(tmp_path: Path) -> None:
    record(tmp_path, [[[]] * 9] * 2, waits="not seen")
    with pytest.raises(ValueError, match="must tell waits from computation"):
        Recorded.read(tmp_path)
    record(tmp_path, [[[]] * 3] * 2)
    with pytest.raises(ValueError, match="must have 5 steps of every rank, got 3"):
        Recorded.read(tmp_path)


def test_a_probed_machine_has_its_nodes_and_its_costs() -> None:
    machine = probed(measure.cluster(everything("aabb")), 1000, 0.1)
    assert (machine.node_size, machine.machine_size, machine.cores) == (2, 4, 2)
    assert machine.uplink_bytes_s == 5e7
    alone = run("allreduce", 2, machine, 3)
    both = run("allreduce", 4, machine, 3)
    assert alone.steps_per_s > both.steps_per_s
    assert probed(measure.cluster(everything("ab")), 1000, 0.1).node_size == 1


# ---- `lightning-dsgd simulate`: what it compares, and its check against measured runs ----
def test_nothing_that_simulates_imports_lightning(tmp_path: Path) -> None:
    """A console script, whose package loads nothing by itself."""
    code = f"""
import sys
sys.argv[0] = "/somewhere/bin/lightning-dsgd"
from lightning_dsgd.cli import main
main("simulate --strategies wagma --ranks 2 --steps 2 --output {tmp_path}/r.json".split())
loaded = {{"lightning", "pytorch_lightning", "lightning_dsgd.trainer"}} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250, capture_output=True)
    assert json.loads((tmp_path / "r.json").read_text())["rows"][0]["algorithm"] == "wagma"


# ---- rows, table and plot ----
def test_table_result_file_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    cli.main(
        f"simulate --strategies wagma,allreduce --ranks 4,8 --profile emulated-1gbit --params 25e5 "
        f"--compute-ms 100 --delay-ms 0 --steps 10 --output {tmp_path}/a/r.json "
        f"--plot {tmp_path}/p.png".split()
    )
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("|")]) == 2 + 4
    assert lines[2].startswith("| `allreduce` | 4 | 4.5")  # 0.1 + 0.12 s
    report = json.loads((tmp_path / "a" / "r.json").read_text())
    assert report["command"].startswith("lightning-dsgd simulate --strategies wagma,allreduce")
    for row in report["rows"]:
        assert row["ideal_steps_per_s"] == pytest.approx(10)
        assert row["of_ideal"] == pytest.approx(row["steps_per_s"] / 10)
        least = 1.0 if row["algorithm"] == "allreduce" else 1.05  # half of the bytes at 4 ranks
        assert min(row["ratio"], row["slowest_ratio"]) >= least
    assert (tmp_path / "p.png").stat().st_size > 10_000


# ---- the check against measured runs ----
def test_check_compares_with_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step of 150 ms, 10 MB at 100 MB/s: an all-reduce takes 150 ms more."""
    rates = {"ddp": 3.0, "no_sync": 6.0, "ddp_powersgd:rank=2": 4.0}
    network = {"rate_bit_s": 8e8, "latency_s": 0.0, "emulated": True}
    settings = {"ranks": 4, "compute_s": 0.1, "delay_s": 0.05, "delayed_ranks": 4, "steps": 10}
    report = {  # as `benchmarks throughput` writes it
        "summary": [{"strategy": spec, "steps_per_s": rate} for spec, rate in rates.items()],
        "cells": [{"round": 0}, {"round": 1}],
        "settings": settings | {"params": "25e5", "network": network},
    }
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(report))
    cli.main(["simulate", "--check", str(path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| `ddp` | 3.000 | 3.158 | 1.05 |"
    assert lines[4] == "| `ddp_powersgd:rank=2` | 4.000 | not ours | |"
    assert lines[-1].endswith(" 16.7 ms")
