"""Step times of a real run, drawn again: in their order, together, and from what says enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dsgd.lab.simulate.machines import MACHINES, probed
from lightning_dsgd.lab.simulate.model import run
from lightning_dsgd.lab.simulate.recorded import Recorded
from tests.lab.probe.test_measure import everything, measure
from tests.timeline.support import record

RECORD = Recorded(((1.0, 2.0, 3.0), (10.0, 20.0, 30.0)))


def test_a_window_is_played_as_it_was() -> None:
    for seed in range(8):
        first, second = RECORD.step_times(2, 7, seed)
        assert [10 * s for s in first] == second  # together
        begin = RECORD.seconds[0].index(first[0])
        assert first == [RECORD.seconds[0][(begin + i) % 3] for i in range(7)]  # in its order
    assert {RECORD.step_times(1, 1, seed)[0][0] for seed in range(20)} == {1.0, 2.0, 3.0}


def test_more_ranks_than_were_recorded_are_copies_from_elsewhere() -> None:
    times = RECORD.step_times(5, 3, seed=1)
    assert [10 * s for s in times[0]] == times[1]
    assert [10 * s for s in times[2]] == times[3]
    assert len(times) == 5
    begins = {tuple(RECORD.step_times(5, 3, seed)[i]) for seed in range(9) for i in (0, 2, 4)}
    assert len(begins) == 3


def test_a_simulated_run_takes_the_recorded_times(tmp_path: Path) -> None:
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
    record(tmp_path, [[[]] * 9] * 2)
    next(tmp_path.glob("*1.jsonl")).unlink()
    with pytest.raises(ValueError, match="got none of ranks 1"):
        Recorded.read(tmp_path)


def test_a_probed_machine_has_its_nodes_and_its_costs() -> None:
    machine = probed(measure.cluster(everything("aabb")), 1000, 0.1)
    assert (machine.node_size, machine.machine_size, machine.cores) == (2, 4, 2)
    assert machine.uplink_bytes_s == 5e7
    alone = run("allreduce", 2, machine, 3)
    both = run("allreduce", 4, machine, 3)
    assert alone.steps_per_s > both.steps_per_s
    assert probed(measure.cluster(everything("ab")), 1000, 0.1).node_size == 1
