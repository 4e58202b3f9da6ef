"""A rank's file, all ranks' files as one run, and the difference of their clocks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from lightning_dsgd.lab.accelerators import DeviceTimes
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


KILLED = """
import sys, time
from pathlib import Path
from lightning_dsgd.lab.timeline import recorder
recorder.FLUSH_S = 0.0
mine = recorder.Recorder(Path(sys.argv[1]), 0, 1, time.monotonic)
for number in range(1, 1000):
    mine.end_step(number)
    if number == 500:
        mine._file.write('{"step": 501, "sp')
        mine._file.flush()
        print("ready", flush=True)
        sys.stdin.read()
"""


def test_a_killed_run_leaves_what_it_had_written(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    process.stdin.close()
    process.stdout.close()
    (trace,) = read_folder(tmp_path)
    assert [step.number for step in trace.steps] == list(range(1, 501))
    assert trace.end == ""


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
    with pytest.raises(ValueError, match="record them with StepTrace"):
        read_folder(tmp_path)
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


class FakeEvent:
    """An event of a device that has come as far as `at_ms`."""

    at_ms = 0.0

    def __init__(self) -> None:
        self.passes_ms = float("inf")

    def record(self) -> None:
        self.passes_ms = FakeEvent.at_ms + 5.0

    def query(self) -> bool:
        return self.passes_ms <= FakeEvent.at_ms

    def synchronize(self) -> None:
        FakeEvent.at_ms = max(FakeEvent.at_ms, self.passes_ms)

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.passes_ms - self.passes_ms


def test_a_devices_times_are_read_without_waiting_for_it() -> None:
    times = DeviceTimes(lambda: 100.0, FakeEvent)  # the device has come to 5 ms
    first, second = times.mark(), None
    FakeEvent.at_ms += 2.0
    second = times.mark()
    assert times.seconds([first, second]) is None
    FakeEvent.at_ms += 4.0
    assert times.seconds([first]) == pytest.approx([100.005])
    assert times.seconds([first, second]) is None
    FakeEvent.at_ms += 4.0
    assert times.seconds([first, second]) == pytest.approx([100.005, 100.007])
