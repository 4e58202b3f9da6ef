"""The command, alone and under a launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_dsgd.lab.probe.cluster import Cluster
from lightning_dsgd.lab.probe.command import main

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1"], "--ranks must be at least 2, got 1"),
        (["--ranks", "2", "--accelerator", "cuda"], "--accelerator must be cpu with --ranks"),
        (["--network", "fast"], "network must be a rate"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_a_launcher_has_started_the_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit):
        main(["--ranks", "2"])
    assert "must be left out under a launcher, which has started 4" in capsys.readouterr().err


def test_one_rank_of_a_launcher_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit):
        main([])
    assert "needs at least 2 ranks, got 1 from the launcher" in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "start",
    [
        [sys.executable, "-m", "lightning_dsgd", "probe", "--ranks", "2"],
        [sys.executable, "-m", *TORCHRUN, "-m", "lightning_dsgd", "probe"],
    ],
    ids=["alone", "torchrun"],
)
def test_ranks_probe_and_rank_0_writes(start: list[str], tmp_path: Path) -> None:
    output = tmp_path / "cluster.json"
    done = subprocess.run(
        [*start, "--output", str(output)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert "probe: all-reduce" in done.stderr  # the progress bar
    assert "all-reduce of 1 MB" in done.stdout
    assert Cluster.read(output).ranks == 2
    assert [each["pair"] for each in json.loads(output.read_text())["pairs"]] == [[0, 1]]
