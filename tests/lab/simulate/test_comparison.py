"""Rows, table and plot of several algorithms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_dsgd import cli


def test_table_result_file_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    cli.main(
        f"simulate --algorithms wagma,allreduce --ranks 4,8 --profile emulated-1gbit --params 25e5 "
        f"--compute-ms 100 --delay-ms 0 --steps 10 --output {tmp_path}/a/r.json "
        f"--plot {tmp_path}/p.png".split()
    )
    lines = capsys.readouterr().out.splitlines()
    assert "| steps/s (mean of ranks) |" in lines[0]
    assert "| x allreduce (slowest rank) |" in lines[0]
    assert len([line for line in lines if line.startswith("|")]) == 2 + 4
    assert lines[2].startswith("| `allreduce` | 4 | 4.5")  # 0.1 + 0.12 s
    report = json.loads((tmp_path / "a" / "r.json").read_text())
    assert report["command"].startswith("lightning-dsgd simulate --algorithms wagma,allreduce")
    assert report["profile"]["num_params"] == 2_500_000
    assert report["cores"] > 0
    for row in report["rows"]:
        assert row["ideal_steps_per_s"] == pytest.approx(10)
        assert row["slowest_steps_per_s"] == pytest.approx(row["steps_per_s"], rel=0.05)
        assert row["of_ideal"] == pytest.approx(row["steps_per_s"] / 10)
        if row["algorithm"] == "allreduce":
            assert row["ratio"] == row["slowest_ratio"] == 1
        else:
            assert min(row["ratio"], row["slowest_ratio"]) > 1.05  # half of the bytes at 4 ranks
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_without_an_all_reduce_nothing_is_compared_to_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cli.main(["simulate", "--algorithms", "dpsgd", "--ranks", "4", "--steps", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].count("|  |") == 2
    assert lines[-1] == "One endless epoch: no rank stands still before the end."
