"""Files are read as one run, on one clock; broken ones are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dsgd.timeline.recorder import file_of
from lightning_dsgd.timeline.trace import missing_ranks, read_folder
from tests.timeline.support import record, recorder


def test_ranks_are_on_one_clock(tmp_path: Path) -> None:
    for rank, offset_s in ((0, 0.0), (1, 5.0)):
        mine = recorder(tmp_path, rank, offset_s=offset_s)
        mine.clock.at_s = 101.0
        mine.end_step(1)
        mine.close("")
    first, second = read_folder(tmp_path)
    assert (first.steps[0].begin_s, first.steps[0].end_s) == (0.0, 1.0)
    assert (second.steps[0].begin_s, second.steps[0].end_s) == (5.0, 6.0)


def test_a_steps_own_time_is_what_is_left_without_the_others(tmp_path: Path) -> None:
    mine = recorder(tmp_path)
    mine.waited(100.0, 100.1, 1, in_lane=False)  # before the batch, for a checkpoint
    mine.waited(100.5, 100.7, 1, in_lane=False)  # within the exchange
    mine.exchanged(100.4, 100.8)
    mine.evaluated(100.8, 100.9)
    mine.clock.at_s = 101.0
    mine.end_step(1)
    mine.close("")
    (trace,) = read_folder(tmp_path)
    assert trace.steps[0].own_s == pytest.approx(1.0 - 0.1 - 0.4 - 0.1)


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
