"""The strategies of other packages, measured beside ours where these are installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from lightning_dsgd.bench import contestants, throughput
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


@pytest.mark.parametrize("module", PEERS)
def test_a_peer_that_is_not_installed_says_so(module, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    spec = PEERS[module].split(",")[0]
    with pytest.raises(ValueError, match=r"which is not installed; install it \(pip install "):
        contestants.check(spec, 2)
