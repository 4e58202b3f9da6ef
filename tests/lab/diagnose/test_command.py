"""The command: ten lines or JSON, gains with an interval, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_dsgd.cli import main
from lightning_dsgd.lab.timeline.recorder import file_of
from tests.lab.diagnose import made

NEXT = {
    "one rank slow": ("claimed", 'DecentralizedStrategy("popsgd", data="claimed")'),
    "a slow loader": ("workers", "num_workers="),
    "a slow network": ("int8", 'wire_dtype="int8"'),
    "none": (None, "stay with ddp"),
}


@pytest.mark.parametrize("cause", NEXT)
def test_it_says_verdict_why_and_next(
    cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made.write(tmp_path, made.traces(made.CAUSES[cause][0], steps=60, victim=2))
    main(["why", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 150
    begins = [line.partition(":")[0] for line in lines if line[0] != " "]
    assert begins == ["Verdict", "Why", "Next", "Others", "Seen"]
    main(["why", str(tmp_path), "--json"])
    said = json.loads(capsys.readouterr().out)
    assert lines[0] == f"Verdict: {said['verdict']}"
    name, paste = NEXT[cause]
    assert (said["next"] or {"name": None})["name"] == name
    assert any(paste in line for line in lines)
    assert all(r["low"] <= r["gain"] <= r["high"] for r in said["remedies"])
    assert said["cause"] == made.CAUSES[cause][1]
    if name is not None:
        assert said["next"]["low"] > 1.0


def faster(cause: str, cured: made.Cause) -> float:
    """How many times as fast the made job is without the cause, in its last step's end."""
    ends = [
        made.traces(inject, steps=60, victim=2)[0].steps[-1].end_s
        for inject in (made.CAUSES[cause][0], cured)
    ]
    return ends[0] / ends[1]


def shared(s: made.Setting, step: int, rank: int, own: made.Own) -> None:
    if step % 20 == 0:
        own.validation = (0.6 + 20e-3 * (s.ranks - 1)) / s.ranks


@pytest.mark.parametrize(
    ("cause", "name", "cured"),
    [("garbage collection", "freeze", made.none), ("a long validation", "shared", shared)],
)
def test_the_gain_is_what_the_job_without_the_cause_shows(
    cause: str, name: str, cured: made.Cause, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made.write(tmp_path, made.traces(made.CAUSES[cause][0], steps=60, victim=2))
    main(["why", str(tmp_path), "--json"])
    gains = {r["name"]: r for r in json.loads(capsys.readouterr().out)["remedies"]}
    assert gains[name]["low"] < faster(cause, cured) < gains[name]["high"]


def test_what_it_cannot_judge_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused() -> str:
        with pytest.raises(SystemExit):
            main(["why", str(tmp_path)])
        return capsys.readouterr().err

    made.write(tmp_path, made.traces(made.none, steps=15))
    assert "must have 23 steps of every rank, got 15; train for longer" in refused()
    made.write(tmp_path, made.traces(made.none, steps=60))
    file_of(tmp_path, 3).unlink()
    assert "must have a file of every rank, got none of ranks 3" in refused()
    ours = made.traces(made.none, steps=60)
    for trace in ours:
        trace.about.pop("sums")
    made.write(tmp_path, ours)
    assert "must be of torch's DDP or FSDP, got one of strategy 'ddp'" in refused()
