"""`StepTrace` where a rank is killed, and a process that is started again joins the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dsgd.lab.drawing import picture
from lightning_dsgd.lab.timeline.trace import read_folder
from tests.elastic.launch.test_joining import kill_and_let_join


@pytest.mark.exhaustive
def test_a_rank_that_joins_is_recorded_and_stops_nobody(tmp_path: Path) -> None:
    trace = tmp_path / "trace"

    def has_steps_of_the_rank() -> bool:
        """What a killed rank recorded in its last second is lost with it."""
        return any(file.read_text().count("\n") > 1 for file in trace.glob("*_00001.jsonl"))

    kill_and_let_join(tmp_path, "local_sgd:trace", 1, 3, has_steps_of_the_rank)
    first, lost, third, joined = read_folder(trace)
    assert [t.rank for t in (first, lost, third, joined)] == [0, 1, 2, 3]
    assert [t.end for t in (first, lost, third)] == ["training has ended", "", "training has ended"]
    assert joined.end == "training has ended"
    assert joined.steps[0].number > lost.steps[-1].number
    assert joined.steps[0].begin_s > lost.steps[-1].end_s
    # What the ranks wait for, they wait for from ranks that are recorded, on one clock.
    by_number = {step.number: step for step in first.steps}
    for step in joined.steps[1:]:
        same = by_number[step.number]
        assert abs(step.end_s - same.end_s) < 5.0
    assert {who for t in (first, third) for s in t.steps for *_, who in s.wait} >= {3}
    assert [track.rank for track in picture.load(trace).tracks] == [0, 1, 2, 3]
