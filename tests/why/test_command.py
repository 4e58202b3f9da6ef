"""What `why` says of runs that are over, as text and as JSON, and which options it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_dsgd.cli import main
from lightning_dsgd.why.slow import STEPS
from lightning_dsgd.why.watch import TOLD
from tests.lab.diagnose import made
from tests.support.refused import refused

STUCK = {"cause": "missing", "lines": ["stuck: rank 2 never entered all_reduce 16"]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was watched: its steps are there, and what was told."""
    run = tmp_path / "run"
    run.mkdir()
    made.write(run / STEPS, made.traces(made.loader, steps=40, victim=2))
    told = {"told": [STUCK], "exit_status": 1, "slow": ["Verdict: as it was told"]}
    (run / TOLD).write_text(json.dumps(told))
    return run


def test_what_was_told_of_a_run_is_said_once_more(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["why", str(run)])
    assert capsys.readouterr().out.splitlines() == [*STUCK["lines"], "Verdict: as it was told"]


def test_programs_get_what_was_told_and_why_it_is_slow(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["why", str(run), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["cause"], found["ranks"], found["told"]) == ("loader", [2], [STUCK])
    main(["why", str(run / STEPS), "--json"])
    assert json.loads(capsys.readouterr().out) == {**found, "told": []}


def test_programs_get_what_was_told_of_a_run_with_too_few_steps(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that is stuck at its beginning has made few."""
    made.write(run / STEPS, made.traces(made.loader, steps=15))
    main(["why", str(run), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["told"]) == (None, [STUCK])
    (reason,) = found["reasons"]
    assert reason.startswith("a trace must have 23 steps of every rank, got 15"), reason
    refused(main, ["why", str(run), "--json", "--ranks", "8"], capsys)  # cannot be told


def test_a_run_that_was_watched_is_foretold_on_another_cluster(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["why", str(run), "--ranks", "8", "--link", "1gbit"])
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("Cluster: 8 ranks, each with a link of 1 Gbit/s")


def test_a_run_whose_watcher_has_not_ended_is_told_by_its_steps(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / TOLD).unlink()
    main(["why", str(run)])
    assert capsys.readouterr().out.startswith("Verdict: rank 2 waits for the data loader")


def test_a_run_whose_watcher_was_killed_is_told_by_what_its_ranks_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        said = {"rank": rank, "steps": "the model is in two dimensions"}
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(said))
    main(["why", str(tmp_path)])
    reason = "the model is in two dimensions"
    assert capsys.readouterr().out == f"of the time of a step nothing is said: {reason}\n"
    main(["why", str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found == {"verdict": None, "told": [], "reasons": [reason]}


REFUSED = {
    "--end RUN": "--end must be given for a command, got a run; leave --end out",
    "--stuck-after 5 RUN": "--stuck-after must be given for a command, got a run",
    "--ranks 4 -- true": "--ranks must be given for a run, got a command; leave --ranks out",
    "--json RUN RUN": "--json must be given for one run, got two; ask of each by itself",
    "--stuck-after 0 -- true": "--stuck-after must be positive, got 0.0; try 30",
    "RUN RUN RUN": "one run or two must be given, got 3",
    "RUN/nothing": "must be a folder with files step_trace_00000.jsonl and so on, got none",
    "RUN -- true": "either a command behind -- or the folder of a run must be given, got both",
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_cannot_be_done_is_refused(
    given: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["why", *given.replace("RUN", str(run)).split()]
    assert REFUSED[given] in refused(main, words, capsys)
