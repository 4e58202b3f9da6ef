"""Why a fit is slow is said without an edit of its script."""

from __future__ import annotations

from pathlib import Path

import pytest

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


@pytest.mark.exhaustive
def test_no_steps_are_recorded_where_only_stuck_jobs_are_asked_for(tmp_path: Path) -> None:
    job = forked(tmp_path / "run", "slow_loader", 2, options=("--only-stuck",))
    assert job.status == 0, job.said
    assert not (tmp_path / "run" / "steps").exists()
    assert "why:" not in job.said
