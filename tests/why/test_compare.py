"""Two runs are compared: what a step's time went to, what has grown, and on which rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_dsgd.why import compare
from lightning_dsgd.why.command import main
from lightning_dsgd.why.compare import run_in
from lightning_dsgd.why.slow import STEPS
from tests.lab.diagnose import made
from tests.why.jobs import ROOT, forked


def record(folder: Path, cause: made.Cause, threads: int = 1, within: str = STEPS) -> Path:
    folder.mkdir()
    traces = made.traces(cause, victim=2, steps=60, about={"threads": threads})
    made.write(folder / within, traces)
    return folder


def longer(part: str, seconds: float, victim: int | None = None) -> made.Cause:
    def cause(setting: made.Setting, step: int, rank: int, own: made.Own) -> None:
        if victim is None or rank == victim:
            setattr(own, part, getattr(own, part) + seconds)

    return cause


@pytest.mark.parametrize(
    ("cause", "why"),
    [
        (longer("loader", 0.05, victim=2), "waiting for the loader on rank 2"),
        (longer("forward", 0.05, victim=1), "computing on rank 1"),
        (longer("forward", 0.05), "computing on all ranks"),
        (longer("sum", 0.05), "summing the gradient"),
        (longer("validation", 0.05, victim=0), "validating on rank 0"),
    ],
)
def test_what_has_grown_is_named_with_its_rank(cause: made.Cause, why: str, tmp_path: Path) -> None:
    before, now = record(tmp_path / "before", made.none), record(tmp_path / "now", cause, threads=8)
    for runs in ((before, now), (now, before)):
        said = compare.lines_of(*runs)
        assert re.match(rf"Verdict: {now} takes \d+\.\d ms a step, and {before} 5\d", said[0])
        found = re.fullmatch(rf"Why:     {why}: \+(\d+\.\d) ms of \+(\d+\.\d) ms a step", said[1])
        assert found is not None, said
        # Half of the sum is hidden behind the backward pass, as far as that reaches.
        expected = 39 if "sum" in why else 50
        assert [float(s) for s in found.groups()] == pytest.approx([expected] * 2, abs=4)
        changed = "1 -> 8" if runs[1] is now else "8 -> 1"
        assert f"Changed: threads of a rank {changed}" in said
        assert said[-1].startswith("Seen:    57 steps of ")
    assert any(line.startswith("Next:    ") for line in said)


def test_folders_of_step_traces_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`StepTrace` and `LoopTrace` write into a run's folder itself."""
    causes = {"before": made.none, "now": made.loader}
    runs = [record(tmp_path / name, cause, within="") for name, cause in causes.items()]
    main([str(run) for run in runs])
    said = capsys.readouterr().out
    assert f"Verdict: {runs[1]} takes " in said
    assert "Next:    more loader workers" in said


def test_runs_that_are_as_fast_are_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [record(tmp_path / name, made.none) for name in ("a", "b")]
    main([str(run) for run in runs])
    said = capsys.readouterr().out
    assert "Verdict: alike: 5" in said
    assert "Next:" not in said


def test_a_runs_parts_add_up_to_its_step(tmp_path: Path) -> None:
    run = run_in(record(tmp_path / "run", made.lengths) / STEPS, "run")
    assert sum(run.spent.values()) == pytest.approx(run.step_s)
    assert run.step_s == pytest.approx(0.06, rel=0.5)


def test_runs_without_steps_are_not_compared(tmp_path: Path) -> None:
    run = record(tmp_path / "run", made.none)
    (said,) = compare.lines_of(run, tmp_path)
    assert said.startswith("the steps cannot be compared: ")


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_real_runs_that_were_slowed_are_told_from_one_that_was_not(tmp_path: Path) -> None:
    def watched(slow: str) -> Path:
        job = forked(tmp_path / (slow or "usual"), "slow_loop", 2, SLOW=slow)
        assert job.status == 0, job.said
        return tmp_path / (slow or "usual")

    usual = run_in(watched("") / STEPS, "usual")
    # What is slow, what grows, on which rank, and the least growth of a step.
    for slow, what, rank, least_s in (
        ("loader", "loader", 1, 0.045),
        ("late", "computing", 1, 0.045),
        ("validation", "validation", 0, 0.04),
        ("saving", "saving", 0, 0.045),
    ):
        run = run_in(watched(slow) / STEPS, slow)
        # How short processors are depends on what else the machine does.
        grown = {
            each: run.spent[each] - usual.spent[each]
            for each in run.spent
            if each not in ("processor", "sums")
        }
        assert max(grown, key=lambda each: grown[each]) == what, (slow, grown)
        assert grown[what] > least_s
        of_ranks = [a - b for a, b in zip(run.of_ranks[what], usual.of_ranks[what], strict=True)]
        assert of_ranks[rank] > 2 * of_ranks[1 - rank]
    command = [sys.executable, "-m", "lightning_dsgd", "why", "usual", "loader"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    ).stdout
    assert "Verdict: loader takes " in said
    assert "nothing was wrong; exit status 0" in said
