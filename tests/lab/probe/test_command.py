"""The command, alone and under a launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.lab.probe.cluster import Cluster
from lightning_dsgd.lab.probe.command import main
from lightning_dsgd.primitives.error_feedback import ErrorFeedback

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("world_size", "arguments", "message"),
    [
        ("4", ["--ranks", "2"], "must be left out under a launcher, which has started 4"),
        ("1", [], "needs at least 2 ranks, got 1 from the launcher"),
    ],
)
def test_what_does_not_suit_a_launcher_is_refused(
    world_size: str,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", [[], TORCHRUN], ids=["alone", "torchrun"])
def test_ranks_probe_and_rank_0_writes(launcher: tuple[str, ...], tmp_path: Path) -> None:
    output = tmp_path / "cluster.json"
    options = ["--json"] if launcher else ["--ranks", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "lightning_dsgd", "probe", *options, "--output", output],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert "probe: all-reduce" in done.stderr  # the progress bar
    if launcher:
        assert json.loads(done.stdout) == json.loads(output.read_text())
    else:
        assert "all-reduce of 1 MB" in done.stdout
    cluster = Cluster.read(output)
    assert (cluster.ranks, cluster.ranks_per_node, cluster.between) == (2, 2, None)
    assert cluster.inside is not None
    assert 0 < cluster.inside.latency_s < 0.1
    assert 1e7 < cluster.inside.bandwidth_bytes_s < 1e11
    assert 0 < cluster.processor.send_s < 0.1
    assert 0 < cluster.processor.add_s_per_byte < 1e-7
    sparse, dense = cluster.processor.sparse_s, cluster.processor.dense_s_per_byte
    assert sparse.keys() == {n for n, a in ALGORITHMS.items() if issubclass(a, ErrorFeedback)}
    whole = [least + 1e6 * each for least, each in sparse.values()]
    assert all(0 <= seconds < 10 for seconds in whole)
    assert max(whole) > 1e-4
    assert {"allreduce", "local_sgd", "popsgd", "wagma"} <= dense.keys()
    assert all(0 <= seconds < 1e-6 for seconds in dense.values())
    assert [each["pair"] for each in json.loads(output.read_text())["pairs"]] == [[0, 1]]
