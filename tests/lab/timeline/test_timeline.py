"""A rank's file, all ranks' files as one run, and the difference of their clocks."""

from __future__ import annotations

import json
import re
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


IMAGE = "<img src=x onerror=alert(1)>"


@pytest.mark.parametrize(
    ("line", "name", "value", "needed"),
    [
        (1, "rank", None, "'rank' must be a number"),
        (1, "world_size", 10**30, "'world_size' must be a number"),
        (1, "world_size", 0, "'world_size' must be from 1"),
        (1, "rank", -1, "'rank' must be from 0"),
        (1, "origin_s", [1], "'origin_s' must be a number"),
        (1, "began_unix_s", float("nan"), "'began_unix_s' must be a number"),
        (1, "strategy", [IMAGE], "'strategy' must be text"),
        (2, "step", "one", "'step' must be a number"),
        (2, "items", {}, "'items' must be a number"),
        (2, "span", [0], "a span of 'span' must be 2 numbers"),
        (2, "fetch", True, "'fetch' must be a list of spans"),
        (2, "fetch", [[0, 1, 2]], "a span of 'fetch' must be 2 numbers"),
        (2, "exchange", [[0, None]], "a span of 'exchange' must be 2 numbers"),
        (2, "wait", [[0, 9, IMAGE]], "a span of 'wait' must be 3 numbers"),
        (2, "serve", [[0, 9]], "a span of 'serve' must be 3 numbers"),
        (2, "sum", [[0, 9, 4, IMAGE]], "a span of 'sum' must be 4 numbers"),
    ],
)
def test_what_is_no_number_in_a_trace_is_named(
    line: int, name: str, value: Any, needed: str, tmp_path: Path
) -> None:
    record(tmp_path, [[[(0.5, 0.9, 1)], []]])
    path = file_of(tmp_path, 0)
    lines = [json.loads(each) for each in path.read_text().splitlines()]
    lines[line - 1][name] = value
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    with pytest.raises(ValueError, match=f"line {line} of .*: {re.escape(needed)}.*, got"):
        read_folder(tmp_path)


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    record(tmp_path, [[[]]])
    file_of(tmp_path, 1).write_text(file_of(tmp_path, 0).read_text())
    with pytest.raises(ValueError, match=r"must be of different ranks, got rank 0 in .* and in"):
        read_folder(tmp_path)


def test_a_span_that_ends_before_it_begins_takes_no_time(tmp_path: Path) -> None:
    record(tmp_path, [[[]]])
    path = file_of(tmp_path, 0)
    path.write_text(path.read_text().replace('"span":[0,1000000]', '"span":[7,5],"load":[[9,2]]'))
    ((step,),) = [trace.steps for trace in read_folder(tmp_path)]
    assert step.begin_s == step.end_s
    assert step.load[0][0] == step.load[0][1]


# ---- clocks ----
AHEAD_S = (0.0, 0.0, 5.0, -7.0)


def offset(net: Any) -> float:
    kernel = "one" if net.rank < 2 else f"that of {net.rank}"
    return offset_to_rank_0(net, kernel, lambda: net.now() + AHEAD_S[net.rank])


def test_clocks_are_compared_through_the_network() -> None:
    offsets = SimulatedWorld(4, latency_s=1e-3).run(offset)
    assert offsets == pytest.approx([-ahead_s for ahead_s in AHEAD_S])
    assert offsets[1] == 0.0
