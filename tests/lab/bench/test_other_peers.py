"""The strategies of other packages, beside ours."""

from __future__ import annotations

import importlib.util

import pytest
from torch import nn

from lightning_dsgd.lab.bench import contestants
from lightning_dsgd.lab.bench.torchft_peers import fragments_of

PEERS = ["torchft_local_sgd:period=2", "decent_dp:topology=ring", "hivemind:period=2"]


def test_fragments_are_consecutive_layers() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 3), nn.Linear(3, 4))
    first, second = fragments_of(model, 2)
    assert list(first.modules())[1:] == [model[0]]
    assert list(second.modules())[1:] == [model[2], model[3]]
    assert fragments_of(model, 1) == [model]
    with pytest.raises(ValueError, match="from 1 to the number of layers with parameters, 3, got"):
        fragments_of(model, 4)


@pytest.mark.parametrize("spec", PEERS)
def test_a_peer_that_is_not_installed_says_so(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"which is not installed; install it \(pip install "):
        contestants.check(spec, 2)
