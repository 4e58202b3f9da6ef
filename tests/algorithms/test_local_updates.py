"""What follows DiLoCo, against each paper's rule in a few lines of plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dsgd.algorithms.noloco import NoLoCo
from lightning_dsgd.algorithms.sparse_loco import SparseLoCo
from lightning_dsgd.primitives import topology
from lightning_dsgd.transport.simulated import SimulatedWorld
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


@pytest.mark.parametrize("wire_dtype", ["2bit", "e3m0"])
def test_what_is_sent_and_what_is_left_are_what_was_accumulated(wire_dtype: str) -> None:
    """decay * e + change = sent + e, summed over the ranks; what is sent are few numbers."""
    ranks = SimulatedWorld(P).run(follow, lambda: sparse_loco(wire_dtype), 3 * H)
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


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_noloco_is_the_papers_rule(num_ranks: int) -> None:
    """Pairs, and where P is odd a rank that steps alone; the means make the heavy ball's steps."""
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
