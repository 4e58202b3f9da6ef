"""Every algorithm, with what it promises: the rows that `test_algorithms.py` goes through.

One of `ALGORITHMS` that has no row here is tested with the properties that all share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms import ALGORITHMS, make_algorithm
from lightning_dsgd.algorithms.eager_sgd import EagerSGD
from lightning_dsgd.primitives import topology
from lightning_dsgd.transport import Transport
from tests.support.rank import Rank

N = 1040
K = 260
LR = 0.1


@dataclass
class Row:
    """What holds for one algorithm."""

    spec: str
    """Its name and options, as `--strategies` takes them."""
    bytes_per_step: Callable[[int, int], float] | None = None
    """Of one rank, as a function of P and of |x| in bytes; averaged over `period` steps."""
    period: int = 1
    slack: float = 1e-6
    """What control messages may add to the formula."""
    copies: int | None = None
    """Memory in |x| that a rank needs besides x; None: it is not counted."""
    mixes_weights: bool = True
    """Whether weights that differ between ranks are brought together."""
    is_synchronous: bool = True
    """Whether what is averaged does not depend on who is late: the mean is conserved then."""
    has_push_weights: bool = False
    """Whether the consensus gives the ranks weights that differ after late messages."""
    is_sparse: bool = False
    """Whether a step leaves out a part of the gradient, on one rank too."""
    held_back: Callable[[Any], Tensor] = lambda algorithm: torch.zeros(N).double()
    """What a rank has, when all stand still, of the gradients that it will apply later."""
    has_outer_optimizer: bool = False
    """Whether one rank alone is another optimizer than its own."""
    is_rounded: bool = False
    """Whether what is sent is rounded, and what is left of it kept for later."""
    rounding: float = 1e-12
    """How near its sums are to exact ones."""
    is_delayed: bool = False
    """Whether ranks with the same gradients differ for a while: by delay, or by whom they meet."""
    accuracy: float = 1e-6
    """How near the constant learning rate comes to a minimum that is another one on every rank."""

    def make(self) -> Algorithm:
        return make_algorithm(self.spec)


def reduce_bytes(world_size: int, size: int) -> float:
    return 2 * (world_size - 1) / world_size * size


def flag_bytes(world_size: int) -> float:
    """One word is all-reduced by one of the ranks: the mean over ranks."""
    return 2 * (world_size - 1) / world_size * 8


def rounded_bytes(world_size: int, size: int, bits: int, num_fragments: int = 1) -> float:
    """Whole blocks of 32 values and an exponent, twice from and to each rank that sums a piece."""
    n = size // 8

    def lengths(whole: int, count: int) -> list[int]:
        return [whole * (i + 1) // count - whole * i // count for i in range(count)]

    pieces = [m for part in lengths(n, num_fragments) for m in lengths(part, world_size)]
    num_blocks = sum(-(-m // 32) for m in pieces)
    return 2 * (world_size - 1) / world_size * num_blocks * (1 + 4 * bits)


def block_bytes(size: int, bits: int) -> int:
    """Whole blocks of 32 values and an exponent."""
    return -(-size // 8 // 32) * (1 + 4 * bits)


def wagma_bytes(world_size: int, size: int, period: int) -> float:
    """Group sums, and a global one every `period` steps; the mean over ranks."""
    group_size = min(world_size, max(2, topology.near_sqrt(world_size)))
    groups = [len(topology.groups(v, world_size, group_size)) for v in range(3)]
    group_sums = 2 * (world_size - sum(groups) / 3) / world_size * size
    return ((period - 1) * group_sums + reduce_bytes(world_size, size)) / period


def push_bytes(world_size: int, size: int) -> float:
    """A share of the weights, with a push weight, to another rank."""
    return (world_size > 1) * (size + 8)


def pair_bytes(world_size: int, size: float) -> float:
    """One message from each rank that has a partner; the mean over ranks."""
    return (world_size - world_size % 2) / world_size * size


def pending_and_unapplied(algorithm: EagerSGD) -> Tensor:
    """The sums that a rank has not applied yet lack on one of P ranks."""
    return algorithm.pending + algorithm.unapplied / algorithm.net.world_size


def entry_bytes(count: float, span: float | None = None) -> float:
    """A message of values of 8 bytes, side by side or over so many places, with a bit for each."""
    return 24 + 8 * count + math.ceil((span or 0) / 8)


def oktopk_bytes(p: int, span: int) -> float:
    """Of K entries over so many places: a region's to its owner, its places to all, and a sum."""
    thresholds = 2 * (p - 1) / p * 16 * 64 / 5  # by digits, once in five exchanges
    chosen = (p - 1) * entry_bytes(0, span / p) + 2 * (p - 1) / p * 8 * K
    return (p - 1) * entry_bytes(K / p, span / p) + chosen + thresholds


SYNC = "sync_period=4"
EAGER_WAGMA = f"wagma:{SYNC}:grace_s=0.05"
LATE: dict[str, Any] = {"is_synchronous": False, "accuracy": 1.0}
"""Of those whose averages depend on who is late."""
GRADIENTS: dict[str, Any] = {"mixes_weights": False}
SPARSE: dict[str, Any] = {"mixes_weights": False, "is_sparse": True, "accuracy": 1.0}
"""Errors that were fed back come in bursts: what is left moves around the minimum."""


def averaged(num_flags: int = 1) -> Callable[[int, int], float]:
    """A sum of all weights once in four steps."""
    return lambda p, size: (reduce_bytes(p, size) + num_flags * flag_bytes(p)) / 4


def wagma(options: str = "", base: str = EAGER_WAGMA, **promises: Any) -> Row:
    return Row(
        base + options,
        lambda p, size: wagma_bytes(p, size, 4),
        **{"period": 4, "slack": 0.05, **LATE, **promises},
    )


def hpsgd_bytes(world_size: int, size: int) -> float:
    return reduce_bytes(world_size, size) + 3 * flag_bytes(world_size)


ROUNDED_NOW = "hpsgd_int4"
"""The row whose sums are rounded and that stands for all such rows in `make test`."""
TABLE = {
    "allreduce": Row(
        "allreduce", lambda p, size: reduce_bytes(p, size) + flag_bytes(p), **GRADIENTS
    ),
    "allreduce_delay": Row(
        "allreduce:delay=1",
        lambda p, size: reduce_bytes(p, size) + flag_bytes(p),
        **GRADIENTS,
        is_delayed=True,
    ),
    "allreduce_delay_overlap_int4": Row(
        "allreduce:delay=1:overlap=true:num_buckets=3:wire_dtype=int4",
        lambda p, size: rounded_bytes(p, size, 4, 3) + flag_bytes(p),
        **GRADIENTS,
        is_rounded=True,
        accuracy=0.1,
    ),
    "no_sync": Row("no_sync", lambda p, size: 0.0),
    "local_sgd": Row(f"local_sgd:{SYNC}", averaged(), period=4),
    "local_sgd_overlap": Row(
        f"local_sgd:{SYNC}:num_fragments=2:overlap_steps=2", averaged(2), period=4, accuracy=1.0
    ),
    "diloco": Row(
        f"diloco:{SYNC}:outer_momentum=0.5", averaged(), period=4, has_outer_optimizer=True
    ),
    "diloco_mixing": Row(
        f"diloco:{SYNC}:outer_lr=1.0:outer_momentum=0.0:num_fragments=2:overlap_steps=2:mixing=0.5"
        ":wire_dtype=e3m0",
        lambda p, size: (rounded_bytes(p, size, 4, 2) + 2 * flag_bytes(p)) / 4,
        period=4,
        has_outer_optimizer=True,
        is_rounded=True,
        accuracy=1.0,
    ),
    "noloco": Row(
        f"noloco:{SYNC}:outer_momentum=0.3",
        lambda p, size: pair_bytes(p, size + 8) / 4,
        period=4,
        copies=2,
        has_outer_optimizer=True,
        accuracy=1.0,
    ),
    "dpsgd": Row("dpsgd", lambda p, size: len(topology.neighbours("ring", 0, p)) * size),
    "wagma": wagma(copies=2),
    "wagma_overlap": wagma(":overlap=true", copies=3),
    "wagma_paper": wagma(base=f"wagma:{SYNC}:paper=true", copies=2, is_delayed=True),
    "wagma_overlap_int4": Row(
        f"{EAGER_WAGMA}:overlap=true:wire_dtype=int4", is_rounded=True, **LATE
    ),
    "wagma_synchronous": wagma(
        base=f"wagma:{SYNC}:grace_s=Infinity", copies=0, is_synchronous=True, accuracy=1e-6
    ),
    "wagma_group_period": Row(
        f"{EAGER_WAGMA}:group_period=2",
        lambda p, size: wagma_bytes(p, size, 2) / 2,
        period=4,
        slack=0.05,
        **LATE,
    ),
    "hpsgd": Row("hpsgd", hpsgd_bytes, copies=2, **LATE),
    "hpsgd_paper": Row("hpsgd:paper=true", hpsgd_bytes, copies=3, is_delayed=True, **LATE),
    "hpsgd_bounded": Row("hpsgd:max_local_steps=1", hpsgd_bytes, is_synchronous=False),
    "hpsgd_outer": Row(
        "hpsgd:outer_lr=0.7:outer_momentum=0.9",
        hpsgd_bytes,
        copies=4,
        mixes_weights=False,  # if they differ from the start on
        has_outer_optimizer=True,
        **LATE,
    ),
    "hpsgd_int4": Row("hpsgd:wire_dtype=int4", is_rounded=True, **GRADIENTS, **LATE),
    "eager_solo": Row(
        "eager_sgd:quorum=solo",
        reduce_bytes,
        slack=0.05,
        held_back=pending_and_unapplied,
        **GRADIENTS,
        **LATE,
    ),
    "eager_majority": Row(
        "eager_sgd:sync_period=5",
        lambda p, size: reduce_bytes(p, size) * 6 / 5,
        period=5,
        slack=0.05,
        held_back=pending_and_unapplied,
        **GRADIENTS,
        **LATE,
    ),
}
# What gossip leaves between the ranks moves their mean as soon as messages are late.
TABLE |= {
    "sgp": Row("sgp", push_bytes),
    "sgp_overlap": Row("sgp:overlap=1", push_bytes, has_push_weights=True, **LATE),
    "sgp_paper_overlap": Row(
        "sgp:paper=true:overlap=2",
        lambda p, size: push_bytes(p, size) / 2,
        period=2,
        has_push_weights=True,
        **LATE,
    ),
    "sgp_int8": Row(
        "sgp:wire_dtype=int8",
        lambda p, size: push_bytes(p, block_bytes(size, 8)),
        is_rounded=True,
        accuracy=0.1,
    ),
    "popsgd_blocking": Row("popsgd:blocking=true", lambda p, size: pair_bytes(p, size + 16)),
    "popsgd_paper": Row("popsgd:paper=true", is_delayed=True, accuracy=1.0),
    "popsgd_blocking_local_steps": Row(
        "popsgd:blocking=true:local_steps=3:topology=cycle",
        lambda p, size: pair_bytes(p, size + 16) / 3,
        period=3,
    ),
    "popsgd_blocking_int8": Row(
        "popsgd:blocking=true:wire_dtype=int8",
        lambda p, size: pair_bytes(p, size + 16),  # a first meeting: in full
    ),
    "popsgd": Row("popsgd", lambda p, size: pair_bytes(p, size + 32), **LATE),
    "popsgd_bfloat16": Row("popsgd:local_steps=2:wire_dtype=bfloat16", is_rounded=True, **LATE),
    "adpsgd": Row("adpsgd", pair_bytes, **LATE),
    "adpsgd_int8": Row(
        "adpsgd:wire_dtype=int8",
        lambda p, size: pair_bytes(p, block_bytes(size, 8)),
        is_rounded=True,
        **LATE,
    ),
}
DENSITY = f"density={K / N}"
# What local steps have changed is summed as gradients are, once per period.
TABLE |= {
    "oktopk": Row(
        f"oktopk:{DENSITY}:threshold_period=5:repartition_period=10",
        lambda p, size: oktopk_bytes(p, K),
        period=10,
        slack=0.1,
        **SPARSE,
    ),
    "topk_allgather": Row(
        f"topk_allgather:{DENSITY}",
        lambda p, size: (p - 1) * entry_bytes(K) + flag_bytes(p),
        **SPARSE,
    ),
    "topk_dsa": Row(
        f"topk_dsa:{DENSITY}", lambda p, size: 2 * (p - 1) / p * entry_bytes(K), slack=0.1, **SPARSE
    ),
    "gtopk": Row(
        f"gtopk:{DENSITY}",
        lambda p, size: 2 * (p - 1) / p * entry_bytes(K) + flag_bytes(p),
        **SPARSE,
    ),
    "gaussian_topk": Row(  # which takes all of equal entries
        f"gaussian_topk:{DENSITY}",
        lambda p, size: (p - 1) * entry_bytes(N) + flag_bytes(p),
        **SPARSE,
    ),
    "oktopk_local_steps": Row(
        f"oktopk:{DENSITY}:local_steps=3:threshold_period=5:repartition_period=10",
        lambda p, size: oktopk_bytes(p, N) / 3,  # of changes that are hardly ever equal
        period=30,
        slack=0.1,
        **SPARSE,
    ),
    "sparse_loco": Row(  # of 10 chunks, with a bit for each place
        "sparse_loco:density=0.25:local_steps=3:decay=0.5:chunk_size=104",
        lambda p, size: ((p - 1) * (24 + 72 * math.ceil(K / 256) + N / 8) + flag_bytes(p)) / 3,
        period=3,
        slack=0.01,
        **SPARSE,
    ),
}


def cautious(algorithm: type[Algorithm]) -> Row:
    """What may be asked of any algorithm."""
    mixes = not algorithm().traits.uses_gradient
    return Row(algorithm.name, mixes_weights=mixes, is_synchronous=False, accuracy=1.0)


made = {type(row.make()) for row in TABLE.values()}
TABLE |= {name: cautious(a) for name, a in ALGORITHMS.items() if a not in made}


def start_at(rank: int, spread: float) -> Tensor:
    x = torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own = torch.randn(N, generator=torch.Generator().manual_seed(100 + rank)).double()
    return x.add_(own, alpha=spread)


def target(rank: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(rank)).double()


def start(net: Transport, row: Row, *, spread: float = 0.0) -> Rank:
    """An algorithm with weights that are the same on all ranks, or `spread` apart."""
    return Rank(net, row.make(), start_at(net.rank, spread))
