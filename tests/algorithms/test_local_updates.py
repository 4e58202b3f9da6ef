"""What follows DiLoCo, against each paper's rule in a few lines of plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dsgd.algorithm import Conditions
from lightning_dsgd.algorithms.diloco import DiLoCo
from lightning_dsgd.algorithms.noloco import NoLoCo
from lightning_dsgd.algorithms.sparse_loco import SparseLoCo
from lightning_dsgd.primitives import topology
from lightning_dsgd.replica.replica import Replica
from lightning_dsgd.simulated import RankFailed, SimulatedWorld
from tests.support.rank import Rank

N, P = 300, 4


def update(rank: int, step: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(100 * step + rank)).double()


def follow(net: Any, algorithm: Any, num_steps: int) -> list[tuple[Tensor, Tensor]]:
    """After each step the weights and, where there is one, the residual."""
    rank, seen = Rank(net, algorithm(), torch.zeros(N).double()), []
    for step in range(num_steps):
        rank.step(update(net.rank, step))
        seen.append((rank.x.clone(), getattr(rank.algorithm, "residual", rank.x).clone()))
    rank.finish()
    return seen


# ---- SparseLoCo ----

H, LR, DECAY = 2, 0.8, 0.9


def sparse_loco(wire_dtype: str) -> SparseLoCo:
    return SparseLoCo(0.1, H, False, DECAY, 100, LR, wire_dtype)


def largest_of_chunks(e: Tensor) -> Tensor:
    kept = torch.zeros_like(e)
    for chunk, into in zip(e.split(100), kept.split(100), strict=True):
        places = chunk.abs().topk(10).indices
        into[places] = chunk[places]
    return kept


def test_sparse_loco_is_the_papers_rule() -> None:
    ranks = SimulatedWorld(P).run(follow, lambda: sparse_loco("float32"), 3 * H)
    x, residuals = torch.zeros(N).double(), [torch.zeros(N).double()] * P
    for at in range(0, 3 * H, H):
        changes = [-update(rank, at) - update(rank, at + 1) for rank in range(P)]
        e = [DECAY * r + d for r, d in zip(residuals, changes, strict=True)]
        sent = [largest_of_chunks(each) for each in e]
        residuals = [each - s for each, s in zip(e, sent, strict=True)]
        x = x - LR * torch.stack(sent).mean(0)
        for rank, seen in enumerate(ranks):
            torch.testing.assert_close(seen[at + 1], (x, residuals[rank]), rtol=0, atol=1e-12)


def test_what_is_sent_and_what_is_left_are_what_was_accumulated() -> None:
    """decay * e + change = sent + e, summed over the ranks; what is sent are few numbers."""
    ranks = SimulatedWorld(P).run(follow, lambda: sparse_loco("2bit"), 3 * H)
    x, before = torch.zeros(N).double(), torch.zeros(N).double()
    for at in range(0, 3 * H, H):
        change = sum(-update(rank, at) - update(rank, at + 1) for rank in range(P))
        after = torch.stack([seen[at + 1][1] for seen in ranks]).sum(0)
        sent = (x - ranks[0][at + 1][0]) * P / LR
        torch.testing.assert_close(DECAY * before + change, sent + after, rtol=0, atol=1e-12)
        assert 30 <= sent.count_nonzero() <= 30 * P
        x, before = ranks[0][at + 1][0], after


# ---- NoLoCo ----

ALPHA, BETA, GAMMA = 0.5, 0.7, 0.9


def noloco() -> NoLoCo:
    return NoLoCo(H, BETA, ALPHA, GAMMA, seed=3)


def test_noloco_is_the_papers_rule() -> None:
    """Pairs, and a rank that steps alone; the means make the heavy ball's steps."""
    num_ranks = 5
    ranks = SimulatedWorld(num_ranks).run(follow, noloco, 4 * H)
    slow, v = torch.zeros(2, num_ranks, N).double()
    mean, mean_v = slow.mean(0), v.mean(0)
    for at in range(0, 4 * H, H):
        partners = list(topology.random_partners(at // H, num_ranks, "complete", 3))
        d = torch.stack([update(r, at) + update(r, at + 1) for r in range(num_ranks)])
        towards = (slow + slow[partners]) / 2
        v = ALPHA * v + BETA * (d + d[partners]) / 2 - GAMMA * (slow - towards)
        slow = slow + v
        found = torch.stack([seen[at + 1][0] for seen in ranks])
        torch.testing.assert_close(found, slow, rtol=0, atol=1e-12)
        mean_v = ALPHA * mean_v + BETA * d.mean(0)
        mean = mean + mean_v
        torch.testing.assert_close(found.mean(0), mean, rtol=0, atol=1e-12)


# ---- Streaming DiLoCo ----

MIXING, OUTER_LR, PERIOD, TAU = 0.25, 0.4, 6, 2


def test_streaming_diloco_is_the_papers_rule() -> None:
    """Each fragment in its turn: its sum is begun at its step, and mixed in TAU steps later."""
    ends = (0, 120, N)  # of the first fragment and of the second
    num_steps = 4 * PERIOD

    def train(net: Any) -> list[Tensor]:
        algorithm = DiLoCo(
            PERIOD, OUTER_LR, 0.5, num_fragments=2, overlap_steps=TAU, mixing=MIXING,
            fragments="layers",
        )  # fmt: skip
        conditions, seen = Conditions(fragments=ends), []
        rank = Rank(net, algorithm, torch.zeros(N).double(), conditions)
        for step in range(num_steps):
            rank.step(update(net.rank, step))
            seen.append(rank.x.clone())
        rank.finish()
        return seen

    ranks = SimulatedWorld(P).run(train)
    for f, span in enumerate((slice(0, 120), slice(120, N))):
        model = torch.zeros(span.stop - span.start).double().requires_grad_()
        outer = torch.optim.SGD([model], OUTER_LR, 0.5, nesterov=True)
        xs = [torch.zeros_like(model.detach()) for _ in range(P)]
        first = (f + 1) * PERIOD // 2
        for step in range(1, num_steps + 1):
            for rank, x in enumerate(xs):
                x += update(rank, step - 1)[span]
            if step >= first + TAU and (step - first - TAU) % PERIOD == 0:
                for x in xs:
                    x.copy_(MIXING * x + (1 - MIXING) * model.detach())
            if step >= first and (step - first) % PERIOD == 0:
                model.grad = model.detach() - torch.stack(xs).mean(0)
                outer.step()
            for rank, x in enumerate(xs):
                torch.testing.assert_close(ranks[rank][step - 1][span], x, rtol=0, atol=1e-12)


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 5, bias=False)


def replica_of(net: Any, num_fragments: int) -> Replica:
    model = Layered()
    algorithm = DiLoCo(num_fragments=num_fragments, fragments="layers")
    return Replica(net, model, [torch.optim.SGD(model.parameters(), 0.1)], algorithm)


def lay_out(net: Any, num_fragments: int) -> list[str]:
    replica = replica_of(net.sub("first"), num_fragments)
    [part] = replica.parts
    other = replica_of(net.sub("other"), 3)
    other.load_state_dict(replica.state_dict(), replica.names())
    with pytest.raises(ValueError, match=r"got another order; set .* num_fragments as they were"):
        other.before_update(other._optimizers[0])
    assert part.algorithm.conditions.fragments == (0, 32 + 16 + 16 + 32, 96 + 16 + 16 + 16 + 4)
    return part.weights.names


def test_the_layers_of_a_fragment_lie_side_by_side() -> None:
    [names] = SimulatedWorld(1).run(lay_out, 2)
    assert names == [
        *("embedding.weight", "blocks.1.weight", "blocks.1.bias", "head.weight"),
        *("blocks.0.weight", "blocks.0.bias", "blocks.2.weight", "blocks.2.bias"),
    ]
    with pytest.raises(RankFailed, match=r"at most the number of layers .* 5 layers"):
        SimulatedWorld(1).run(lay_out, 6)
