"""Why a fit is slow is said without an edit of its script."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dsgd.lab.timeline.trace import read_folder
from tests.support.thorough import cases
from tests.why.jobs import forked


@pytest.mark.exhaustive
def test_a_slow_loader_is_named_with_what_its_remedy_gains(tmp_path: Path) -> None:
    job = forked(tmp_path / "run", "slow_loader", 2)
    assert job.status == 0, job.said
    assert job.told == []
    assert "why: Verdict: rank" in job.said, job.said
    assert "for the data loader" in job.said
    assert "why: Next:    more loader workers" in job.said
    assert sorted(path.name for path in (tmp_path / "run" / "steps").iterdir()) == [
        "step_trace_00000.jsonl",
        "step_trace_00001.jsonl",
    ]


LOOPS = cases(
    "face, slow, says",
    now=[("plain", "loader", "rank 1 waits for the data loader")],
    later=[
        ("fabric", "late", "rank 1 computes longer than the others"),
        ("plain", "validation", "rank 0 validates longer than the others"),
    ],
)


@LOOPS
@pytest.mark.timeout(300)
def test_a_loop_that_calls_nothing_of_ours_is_judged(
    face: str, slow: str, says: str, tmp_path: Path
) -> None:
    job = forked(tmp_path / "run", "slow_loop", 2, FACE=face, SLOW=slow)
    assert job.status == 0, job.said
    assert job.told == []
    assert f"why: Verdict: {says}" in job.said, job.said
    assert "why: Next:    " in job.said
    for trace in read_folder(tmp_path / "run" / "steps"):
        assert (trace.about["face"], trace.end) == (face, "training has ended")
        assert [step.number for step in trace.steps] == list(range(1, 41))
        for step in trace.steps:
            parts = step.forward, step.backward, step.optimizer, step.sum
            assert [*map(len, parts)] == [1, 1, 1, 1]
            assert step.items == 32
        assert all(step.load for step in trace.steps)
        is_late = trace.rank == int(slow != "validation")
        kind = {"loader": "load", "late": "forward", "validation": "evaluate"}[slow]
        spans = [span for step in trace.steps for span in getattr(step, kind)]
        long = sum(end - begin > 0.045 for begin, end in spans)
        assert long >= (9 if slow == "validation" else 40) if is_late else long < 10


@pytest.mark.exhaustive
def test_no_steps_are_recorded_where_only_stuck_jobs_are_asked_for(tmp_path: Path) -> None:
    job = forked(tmp_path / "run", "slow_loader", 2, options=("--only-stuck",))
    assert job.status == 0, job.said
    assert not (tmp_path / "run" / "steps").exists()
    assert "why:" not in job.said
