"""Bits that must not change where nothing but the house is rebuilt.

What each time-independent strategy reaches on the digits, as a hash of the weights, and the bytes
that a rank has sent for it.  Kinds of processors round differently, and so do builds of torch: the
hashes stand under what plain torch, without this package, makes of the same training here.
`python -m tests.test_frozen` writes those of this machine anew, on purpose and with a reason in the
commit.
"""

from __future__ import annotations

import hashlib
import json
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
    "wagma, synchronous": lambda: WAGMA(wait_avoiding=False, sync_period=10),
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


def hashed(model: nn.Module) -> str:
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]


@cache
def build() -> str:
    """What rounds: torch, and the weights that it makes on this processor."""
    model, optimizer = new_model()
    for step in range(STEPS):
        optimizer.zero_grad()
        differentiate(model, step, rank=0)
        optimizer.step()
    return f"torch {torch.__version__}, {hashed(model)}"


def train(net: Any, name: str) -> tuple[str, int]:
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
    return hashed(model), net.counters.bytes_sent


def outcome(name: str) -> tuple[str, list[int]]:
    """The hash of the weights, and what each rank has sent."""
    hashes, sent = zip(*SimulatedWorld(RANKS).run(train, name), strict=True)
    assert len(set(hashes)) == 1
    return hashes[0], list(sent)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_weights_and_bytes_are_those_of_before(name: str) -> None:
    frozen, here = json.loads(FILE.read_text()), build()
    weights, sent = outcome(name)
    assert sent == frozen["bytes"][name]
    if name not in frozen["weights"].get(here, {}):
        known = ", ".join(build for build, hashes in frozen["weights"].items() if name in hashes)
        pytest.skip(
            f"there are hashes of {name} for {known}, this is {here}; to have them compared here, "
            "add those of the last code that is known to be right: python -m tests.test_frozen"
        )
    assert weights == frozen["weights"][here][name]


if __name__ == "__main__":
    known = json.loads(FILE.read_text())["weights"]
    found = {name: outcome(name) for name in ALGORITHMS}
    known[build()] = {name: weights for name, (weights, _) in found.items()}
    sent = {name: sent for name, (_, sent) in found.items()}
    FILE.write_text(json.dumps({"bytes": sent, "weights": known}, indent=1) + "\n")
