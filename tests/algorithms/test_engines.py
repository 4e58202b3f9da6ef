"""Which engine carries what each strategy sends, with gloo in NCCL's place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.transport.contract import Traffic
from tests.support.rank import Rank
from tests.support.worlds import NativeWorld

SUMS, MESSAGES, NONE = "gloo", "TCP", ""
ENGINES = {
    "allreduce": SUMS,
    "allreduce:overlap=true:num_buckets=3": SUMS,
    "allreduce:wire_dtype=int8": MESSAGES,
    "no_sync": NONE,
    "local_sgd:sync_period=2": SUMS,
    "diloco:sync_period=2:outer_momentum=0": SUMS,
    "hpsgd": SUMS,
    "eager_sgd": SUMS,
    "dpsgd": SUMS,
    "wagma:sync_period=100": MESSAGES,
    "wagma:sync_period=1": SUMS,
    "sgp": SUMS,
    "sgp:overlap=2:topology=random:num_peers=2:wire_dtype=int8": SUMS,
    "popsgd": SUMS,
    "popsgd:blocking=true:wire_dtype=int8": SUMS,
    "adpsgd": MESSAGES,
    "oktopk:density=0.1": MESSAGES,
}
"""Who carries what is as long as the weights; the other engine carries news."""
N = 20_000
NEWS = 1000
"""More bytes than the news of a rank have in a step."""
STEPS = 3


def train(net: Any, specs: list[str]) -> dict[str, dict[str, Traffic]]:
    found = {}
    for number, spec in enumerate(specs):
        part = net.sub(str(number))
        part.counters.sent = {}
        rank = Rank(part, make_algorithm(spec), torch.zeros(N))
        for _ in range(STEPS):
            rank.descend(torch.full((N,), net.rank + 1.0), 0.1)
        rank.settle()
        part.barrier().wait()  # lanes count for the next strategy otherwise
        found[spec], net.counters.sent = part.counters.sent, {}
    return found


@pytest.mark.parametrize("world_size", [4, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_an_engine_carries_all_but_news(world_size: int) -> None:
    for rank in NativeWorld().run(world_size, train, list(ENGINES)):
        for spec, sent in rank.items():
            carried = {engine for engine, traffic in sent.items() if traffic.bytes > STEPS * NEWS}
            expected = {ENGINES[spec]} - {NONE}
            # No exchange of adpsgd's may be due in so few steps.
            assert carried == expected or (spec == "adpsgd" and not carried), (spec, sent)
