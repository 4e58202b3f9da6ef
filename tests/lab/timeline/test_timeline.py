"""A rank's file, all ranks' files as one run, and the difference of their clocks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from lightning_dsgd.lab.timeline import recorder as recorder_of_ranks
from lightning_dsgd.lab.timeline.clocks import offset_to_rank_0
from lightning_dsgd.lab.timeline.recorder import MOST_SPANS, file_of
from lightning_dsgd.lab.timeline.trace import missing_ranks, read_folder
from lightning_dsgd.simulated import SimulatedWorld
from tests.lab.timeline.support import record, recorder


def test_a_wait_for_ones_own_lane_is_a_wait_for_whom_the_lane_waits(tmp_path: Path) -> None:
    mine = recorder(tmp_path, rank=0, world_size=4)

    def lane() -> None:
        mine.waited(100.0, 100.4, 3, in_lane=True)
        mine.waited(100.5, 100.6, 2, in_lane=True)

    thread = threading.Thread(target=lane)
    thread.start()
    thread.join()
    mine.waited(100.2, 100.7, 0, in_lane=False)
    for i in range(MOST_SPANS):
        mine.waited(101 + i, 101.1 + i, 1, in_lane=False)
    mine.clock.at_s = 300.0
    mine.end_step(1)
    mine.close("")
    (trace,) = read_folder(tmp_path)
    (step,) = trace.steps
    assert len(step.wait) == MOST_SPANS  # the others are only counted
    ours = [(round(begin, 6), round(end, 6), src) for begin, end, src in step.wait[:4]]
    assert ours == [(0.2, 0.4, 3), (0.4, 0.5, 0), (0.5, 0.6, 2), (0.6, 0.7, 0)]


def test_a_full_file_ends_and_says_so(tmp_path: Path) -> None:
    mine = recorder(tmp_path, max_mb=0.001)
    for number in range(1, 100):
        mine.clock.at_s += 1
        mine.end_step(number)
    assert not mine.is_open
    mine.close("too late")
    assert mine.path.stat().st_size < 1100
    (trace,) = read_folder(tmp_path)
    assert trace.end == "the file is full"
    assert 5 < len(trace.steps) < 99


def test_a_killed_run_leaves_what_it_had_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_of_ranks, "FLUSH_S", 0.0)
    mine = recorder(tmp_path)
    for number in range(1, 501):
        mine.end_step(number)
    with file_of(tmp_path, 0).open("a") as file:
        file.write('{"step": 501, "sp')  # it was killed meanwhile
    (trace,) = read_folder(tmp_path)
    assert [step.number for step in trace.steps] == list(range(1, 501))
    assert trace.end == ""
    mine.close("")


# ---- one run ----
def test_ranks_are_on_one_clock(tmp_path: Path) -> None:
    for rank, offset_s in ((0, 0.0), (1, 5.0)):
        mine = recorder(tmp_path, rank, offset_s=offset_s)
        mine.clock.at_s = 101.0
        mine.end_step(1)
        mine.close("")
    first, second = read_folder(tmp_path)
    assert (first.steps[0].begin_s, first.steps[0].end_s) == (0.0, 1.0)
    assert (second.steps[0].begin_s, second.steps[0].end_s) == (5.0, 6.0)


def test_files_of_an_earlier_run_are_left_out(tmp_path: Path) -> None:
    record(tmp_path, [[[]]] * 4, run="old", began_unix_s=1.0)
    record(tmp_path, [[[]]] * 2, run="new", began_unix_s=2.0)
    traces = read_folder(tmp_path)
    assert [trace.rank for trace in traces] == [0, 1]
    assert missing_ranks(traces) == []
    file_of(tmp_path, 0).unlink()
    assert missing_ranks(read_folder(tmp_path)) == [0]


def test_what_is_no_trace_is_named(tmp_path: Path) -> None:
    record(tmp_path, [[[], []]])
    path = file_of(tmp_path, 0)
    whole = path.read_text()
    path.write_text(whole.replace('{"step":1', "step 1", 1))
    with pytest.raises(ValueError, match=r"line 2 of .* must be a JSON object"):
        read_folder(tmp_path)
    path.write_text('{"format": "another"}\n')
    with pytest.raises(ValueError, match="must begin with the format"):
        read_folder(tmp_path)


# ---- clocks ----
AHEAD_S = (0.0, 0.0, 5.0, -7.0)


def offset(net: Any) -> float:
    kernel = "one" if net.rank < 2 else f"that of {net.rank}"
    return offset_to_rank_0(net, kernel, lambda: net.now() + AHEAD_S[net.rank])


def test_clocks_are_compared_through_the_network() -> None:
    offsets = SimulatedWorld(4, latency_s=1e-3).run(offset)
    assert offsets == pytest.approx([-ahead_s for ahead_s in AHEAD_S])
    assert offsets[1] == 0.0
