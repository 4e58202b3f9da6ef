"""Which engine carries what each strategy sends, with gloo in NCCL's place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.transport.counters import Traffic
from tests.support.rank import Rank
from tests.support.thorough import cases
from tests.support.worlds import NativeWorld, ProcessWorld

ENGINE, MESSAGES, NONE = {"gloo"}, {"TCP"}, set[str]()
NODES = ":hierarchical=true:node_size=2"
TIMELESS = [
    "allreduce",
    "local_sgd:sync_period=2",
    "wagma:wait_avoiding=false",
    f"wagma:wait_avoiding=false{NODES}",
]
"""Who is late makes no difference there: the weights are those of messages, within rounding."""
ENGINES = {
    **dict.fromkeys(TIMELESS, ENGINE),
    "allreduce:overlap=true:num_buckets=3": ENGINE,
    "allreduce:wire_dtype=int8": MESSAGES,
    "no_sync": NONE,
    "diloco:sync_period=2:outer_momentum=0": ENGINE,
    "hpsgd": ENGINE,
    "eager_sgd": ENGINE,
    "dpsgd": ENGINE,
    "wagma:overlap=true": ENGINE,
    "wagma:dynamic_groups=false:group_period=2": ENGINE,
    "wagma:rule=paper:sync_period=2": ENGINE,
    "wagma:wire_dtype=int8": MESSAGES,
    "sgp": ENGINE,
    "sgp:overlap=2:topology=random:num_peers=2:wire_dtype=int8": ENGINE,
    "popsgd": ENGINE,
    "popsgd:blocking=true:wire_dtype=int8": ENGINE,
    "adpsgd": MESSAGES,
    "oktopk:density=0.1": ENGINE,
}
"""Who carries what is as long as the weights; the other engine carries news."""
N = 20_000
NEWS = 2000
"""More bytes than the news of a rank have in a step."""
STEPS = 3


def train(net: Any, specs: list[str]) -> dict[str, tuple[dict[str, Traffic], Tensor]]:
    found = {}
    for number, spec in enumerate(specs):
        part = net.sub(str(number))
        part.counters.sent = {}
        rank = Rank(part, make_algorithm(spec), torch.zeros(N))
        for step in range(STEPS):
            rank.descend(torch.arange(N).add_(step).mul_(net.rank + 1).sin(), 0.1)
        weights = rank.settle()
        part.barrier().wait()  # lanes count for the next strategy otherwise
        found[spec], net.counters.sent = (part.counters.sent, weights), {}
    return found


@cases("world_size", now=[4], later=[8])
def test_an_engine_carries_all_but_news(world_size: int) -> None:
    ranks = NativeWorld().run(world_size, train, list(ENGINES))
    for rank in ranks:
        for spec, (sent, _) in rank.items():
            carried = {engine for engine, traffic in sent.items() if traffic.bytes > STEPS * NEWS}
            # No exchange of adpsgd's may be due in so few steps.
            assert carried == ENGINES[spec] or (spec == "adpsgd" and not carried), (spec, sent)
    for rank, by_messages in zip(
        ranks, ProcessWorld().run(world_size, train, TIMELESS), strict=True
    ):
        for spec, (_, weights) in by_messages.items():
            torch.testing.assert_close(rank[spec][1], weights)
