"""Bytes that must not change where nothing but the house is rebuilt.

What each rank has sent where each time-independent strategy has trained on the digits, and that
all ranks end with the same weights.  `python -m tests.test_frozen` writes the bytes anew, on
purpose and with a reason in the commit.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dsgd.algorithms.allreduce import AllReduce
from lightning_dsgd.algorithms.diloco import DiLoCo
from lightning_dsgd.algorithms.dpsgd import DPSGD
from lightning_dsgd.algorithms.hpsgd import HPSGD
from lightning_dsgd.algorithms.local_sgd import LocalSGD
from lightning_dsgd.algorithms.no_sync import NoSync
from lightning_dsgd.algorithms.oktopk import OkTopk
from lightning_dsgd.algorithms.popsgd import PopSGD
from lightning_dsgd.algorithms.sgp import SGP
from lightning_dsgd.algorithms.sparse_baselines import GaussianTopk, GTopk, TopkAllgather, TopkDSA
from lightning_dsgd.algorithms.wagma import WAGMA
from lightning_dsgd.replica.replica import Replica
from lightning_dsgd.simulated import SimulatedWorld

FILE = Path(__file__).with_suffix(".json")
RANKS, STEPS, BATCH = 3, 20, 8
ALGORITHMS: dict[str, Any] = {
    "allreduce": AllReduce,
    "no_sync": NoSync,
    "local_sgd": lambda: LocalSGD(sync_period=4),
    "local_sgd, four bits in fragments": lambda: LocalSGD(
        sync_period=6, num_fragments=3, overlap_steps=1, wire_dtype="int4"
    ),
    "diloco": lambda: DiLoCo(sync_period=5, outer_momentum=0.5),
    "dpsgd": DPSGD,
    "sgp": SGP,
    "popsgd": lambda: PopSGD(blocking=True),
    "hpsgd, bounded": lambda: HPSGD(max_local_steps=1),
    "wagma, synchronous": lambda: WAGMA(grace_s=math.inf, sync_period=10),
    "oktopk": lambda: OkTopk(density=0.05, rule="paper"),
    "oktopk, shared": lambda: OkTopk(density=0.05),
    "topk_allgather": lambda: TopkAllgather(density=0.05),
    "topk_dsa": lambda: TopkDSA(density=0.05),
    "gtopk": lambda: GTopk(density=0.05),
    "gaussian_topk": lambda: GaussianTopk(density=0.05),
}


def new_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


@cache
def digits() -> tuple[Tensor, Tensor]:
    # An extra, which others' use of this module does without.
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)


def differentiate(model: nn.Module, step: int, rank: int) -> None:
    """Leaves the gradients of a batch."""
    images, goals = digits()
    begin = (step * RANKS + rank) * BATCH
    batch = slice(begin, begin + BATCH)
    nn.functional.cross_entropy(model(images[batch]), goals[batch]).backward()


def train(net: Any, name: str) -> tuple[Tensor, int]:
    model, optimizer = new_model()
    replica = Replica(net, model, [optimizer], ALGORITHMS[name]())
    for step in range(STEPS):
        optimizer.zero_grad()
        differentiate(model, step, net.rank)
        replica.before_update(optimizer)
        optimizer.step()
        replica.after_update(optimizer)
    replica.finish()
    replica.stop()
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return weights, net.counters.bytes_sent


def bytes_sent(name: str) -> list[int]:
    """What each rank has sent."""
    weights, sent = zip(*SimulatedWorld(RANKS).run(train, name), strict=True)
    assert all(torch.equal(each, weights[0]) for each in weights)
    return list(sent)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_bytes_are_those_of_before(name: str) -> None:
    assert bytes_sent(name) == json.loads(FILE.read_text())[name]


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: bytes_sent(name) for name in ALGORITHMS}, indent=1) + "\n")
