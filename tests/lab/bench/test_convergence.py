"""`lightning-dsgd bench convergence`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_dsgd.lab.bench import convergence, report
from tests.support.bench import run_bench


@pytest.mark.exhaustive
def test_convergence_counts_steps_and_seconds_to_the_target(tmp_path: Path) -> None:
    options = "--task digits --ranks 2 --strategies allreduce,wagma:group_size=2 --seeds 1"
    options += " --epochs 4 --val-every 2 --target 0.5"
    options += " --compute-ms 5 --delay-ms 10 --delayed-ranks 1"
    options += ' --model {"lr":0.03} --data {"batch_size":16}'
    result = run_bench(convergence, tmp_path / "c.json", options)
    ours = result["summary"][1]
    assert ours["strategy"] == "wagma:group_size=2"
    assert result["settings"]["model"] == {"lr": 0.03}
    assert ours["reached"] == 1
    rows = result["cells"][0]["rows"]
    assert [row["step"] for row in rows] == [68, 136]
    for row in rows:
        assert row["seconds"] > row["step"] * 0.015  # one of the two is late in each step
    first = next(row for row in rows if row["value"] >= 0.5)
    assert result["summary"][0]["step_to_target"] == first["step"]
    report.main([str(tmp_path / "c.json"), "--output", str(tmp_path / "report")])
    assert (tmp_path / "report" / "c.png").stat().st_size > 10_000


def test_without_wandb_it_ends_before_a_rank_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit) as end:
        convergence.main(["--wandb", "project"])
    assert end.value.code == 2
    assert "--wandb needs the package wandb, which is not installed" in capsys.readouterr().err
