"""What rank 0 says of engines is true for the rounded values of this training."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch

from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.session import notices
from tests.support.rank import Rank
from tests.support.thorough import cases
from tests.support.worlds import NativeWorld

ROUNDED = [
    "allreduce:wire_dtype=int8",
    "wagma:wire_dtype=int8",
    "wagma:overlap=true:sync_period=2:wire_dtype=int8",
    "local_sgd:sync_period=1:wire_dtype=int8",
    "hpsgd:max_local_steps=1:wire_dtype=int8",
    "sgp:wire_dtype=int8",
    "adpsgd:wire_dtype=int8",
    "popsgd:blocking=true:wire_dtype=int8",
    "oktopk:density=0.5:wire_dtype=int8",
    "sparse_loco:local_steps=2:wire_dtype=int8",
]
SIZE = 4096


def train(net: Any, spec: str) -> tuple[list[str], dict[str, int]]:
    """What rank 0 says at the start, and how many bytes each engine has carried."""
    x = torch.randn(SIZE, generator=torch.Generator().manual_seed(net.rank))
    algorithm = make_algorithm(spec)
    rank = Rank(net, algorithm, x)
    lines: list[str] = []
    optimizer = SimpleNamespace(param_groups=[{}])
    parts = [SimpleNamespace(x=x, optimizer=optimizer, algorithm=algorithm)]
    replica = SimpleNamespace(parts=parts, net=net)
    training = SimpleNamespace(replica=replica, algorithm=algorithm)
    notices.tell(
        SimpleNamespace(training=training, ranks=SimpleNamespace(is_first=True)),  # type: ignore[arg-type]
        lines.append,
    )
    lines += notices.engines(algorithm, net, on_device=True)
    net.barrier().wait()
    before = {name: traffic.bytes for name, traffic in net.counters.sent.items()}
    for _ in range(4):
        rank.descend(x + 1.0, 0.1)
    rank.settle()  # what a lane was told to send has left
    after = {name: traffic.bytes for name, traffic in net.counters.sent.items()}
    rank.finish()
    return lines, {name: sent - before.get(name, 0) for name, sent in after.items()}


def train_all(net: Any, specs: list[str]) -> dict[str, tuple[list[str], dict[str, int]]]:
    return {spec: train(net.sub(spec), spec) for spec in specs}


FEW = ["allreduce:wire_dtype=int8", "sgp:wire_dtype=int8"]


@cases("specs", now=[FEW], later=[[spec for spec in ROUNDED if spec not in FEW]])
def test_what_is_rounded_travels_by_the_engine_that_rank_0_names(specs: list[str]) -> None:
    ranks = NativeWorld().run(4, train_all, specs)
    for spec in specs:
        lines, _ = ranks[0][spec]
        said = 'With wire_dtype="int8" gloo carries'
        assert any(line.startswith(said) for line in lines), (spec, lines)
        sent = sum((Counter(rank[spec][1]) for rank in ranks), Counter[str]())
        assert 0 < sent["gloo"] == max(sent.values()), (spec, sent)
