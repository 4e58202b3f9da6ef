"""The command, from files to the advice, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_dsgd.lab.advise import verify
from lightning_dsgd.lab.advise.command import main
from lightning_dsgd.lab.results import write_result
from lightning_dsgd.lab.simulate.machines import MACHINES
from lightning_dsgd.lab.simulate.model import run
from tests.lab.probe.test_measure import everything, measure


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    write_result(measure.cluster(everything("abcd")).to_json(), tmp_path / "cluster.json")
    machine = MACHINES["emulated-1gbit"]
    run("wagma", 4, machine, 12, trace=tmp_path / "run", epoch_steps=12)
    return [str(tmp_path / "cluster.json"), "--trace", str(tmp_path / "run")]


@pytest.mark.parametrize(
    ("chosen", "epoch_steps", "said"),
    [
        ([], 6, "So many samples has an epoch of the trace: 12 steps of 4 ranks."),
        (["--epoch-steps", "endless"], None, "One endless epoch"),
    ],
)
def test_the_advice_comes_with_what_to_paste(
    chosen: list[str],
    epoch_steps: int | None,
    said: str,
    files: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "advice.json"
    some = ["--strategies", "wagma", "--steps", "10", *chosen]
    main([*files, "--params", "1e6", "--ranks", "8", *some, "--output", str(output)])
    text = capsys.readouterr().out
    assert "8 ranks, 1,000,000 parameters" in text
    assert said in text
    assert "extrapolated: 8 ranks are more than the 4 that were probed" in text
    report = json.loads(output.read_text())
    claimed = set() if epoch_steps is None else {"no_sync, claimed", "wagma, claimed"}
    assert {row["strategy"] for row in report["rows"]} == {
        "no_sync", "allreduce", "wagma", *claimed,
    }  # fmt: skip
    assert report["settings"]["epoch_steps"] == epoch_steps
    assert f"Advice: {report['advised']}." in text
    assert report["advised"].startswith("wagma")
    assert ('WAGMAStrategy(data="claimed")' in text) == ("claimed" in report["advised"])


@pytest.mark.exhaustive
def test_the_first_are_run_here(
    files: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "STEPS", 10)
    some = ["--strategies", "popsgd", "--steps", "10", "--epoch-steps", "10"]
    main([*files, "--params", "1e4", *some, "--verify", "--verify-ranks", "2"])
    text = capsys.readouterr().out
    assert "running the first three on 2 ranks of this machine" in text
    assert "popsgd:data=claimed" in text
    assert "steps/s of the job:" in text
