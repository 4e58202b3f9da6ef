"""The strategies of other packages, measured beside ours where these are installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from torch import nn

from lightning_dsgd.lab.bench import contestants, convergence, throughput
from lightning_dsgd.lab.bench.torchft_peers import fragments_of
from tests.support.bench import run_bench

PEERS = {
    "torchft": "torchft_local_sgd:period=2,torchft_diloco:period=2",
    "decent_dp": "decent_dp:topology=ring",
    "hivemind": "hivemind:period=2",
}


@pytest.mark.parametrize("module", PEERS)
def test_a_peer_is_measured_where_it_is_installed(module: str, tmp_path: Path) -> None:
    pytest.importorskip(module, reason="the extra `bench` is not installed")
    options = f"--ranks 2 --strategies {PEERS[module]}"
    options += " --rounds 1 --steps 4 --params 1e4 --compute-ms 10 --delayed-ranks 0"
    rows = run_bench(throughput, tmp_path / "t.json", options)["summary"]
    assert all(0 < row["steps_per_s"] < 1 / 0.01 for row in rows)


def test_torchft_streams_a_model_by_halves(tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason="the extra `bench` is not installed")
    spec = "torchft_diloco:period=4:fragments=2:delay=1:lr=0.7:momentum=0"
    options = f"--task digits --ranks 2 --strategies {spec} --epochs 2 --seeds 1"
    (row,) = run_bench(convergence, tmp_path / "c.json", options)["summary"]
    assert row["best"] > 0.5


def test_fragments_are_consecutive_layers() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 3), nn.Linear(3, 4))
    first, second = fragments_of(model, 2)
    assert list(first.modules())[1:] == [model[0]]
    assert list(second.modules())[1:] == [model[2], model[3]]
    assert fragments_of(model, 1) == [model]
    with pytest.raises(ValueError, match="from 1 to the number of layers with parameters, 3, got"):
        fragments_of(model, 4)


@pytest.mark.parametrize("module", PEERS)
def test_a_peer_that_is_not_installed_says_so(module, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    spec = PEERS[module].split(",")[0]
    with pytest.raises(ValueError, match=r"which is not installed; install it \(pip install "):
        contestants.check(spec, 2)
