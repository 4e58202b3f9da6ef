"""With whom a rank talks: pure functions of (rank, world_size)."""

from __future__ import annotations

import random
from functools import lru_cache
from itertools import pairwise, zip_longest
from typing import Final


def near_sqrt(world_size: int) -> int:
    """Returns the power of two nearest sqrt(P) by ratio, of two the larger: WAGMA's group size."""
    return 1 << ((2 * world_size).bit_length() - 1) // 2  # rounds log2 of the root


def groups(version: int, world_size: int, group_size: int) -> list[list[int]]:
    """Returns the groups that average at a version: a partition of the ranks that changes with it.

    At powers of two, Algorithm 1 of WAGMA-SGD: a butterfly whose phases move on by log2 S a
    version, so that every update reaches every rank within log_S P versions, rounded up.  At other
    numbers, groups whose sizes differ by at most one; the members of each are dealt to different
    groups of the next version, and every update reaches every rank within 2 log_S P versions,
    rounded up.
    """
    if not (_is_power_of_two(world_size) and _is_power_of_two(group_size)):
        return list(map(list, _dealt_groups(version, world_size, group_size)))
    within = sum(_butterfly_masks(version, world_size, group_size))
    firsts = (rank for rank in range(world_size) if not rank & within)
    return [list(group_of(first, version, world_size, group_size)) for first in firsts]


def group_of(rank: int, version: int, world_size: int, group_size: int) -> tuple[int, ...]:
    """Returns the group of `groups` that a rank is in, without making the other groups."""
    if _is_power_of_two(world_size) and _is_power_of_two(group_size):
        masks = _butterfly_masks(version, world_size, group_size)
        members = [rank & ~sum(masks)]
        for mask in sorted(masks):
            members += [member | mask for member in members]
        return tuple(members)
    partition = _dealt_groups(version, world_size, group_size)
    return next(group for group in partition if rank in group)


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def _butterfly_masks(version: int, world_size: int, group_size: int) -> list[int]:
    """Returns the bits in which the ranks of one group differ."""
    global_phases, group_phases = world_size.bit_length() - 1, group_size.bit_length() - 1
    if not global_phases:
        return []
    shift = version * group_phases % global_phases
    return [1 << (shift + r) % global_phases for r in range(group_phases)]


@lru_cache(maxsize=32)  # many ranks of one process ask for the same ones
def _dealt_groups(version: int, world_size: int, group_size: int) -> tuple[tuple[int, ...], ...]:
    num_groups = -(-world_size // group_size)
    bounds = [-(-world_size * g // num_groups) for g in range(num_groups + 1)]
    dealt = _deal(list(range(world_size)), bounds)
    order = _iterate(dealt, version)
    return tuple(tuple(sorted(order[a:b])) for a, b in pairwise(bounds))


def _deal(order: list[int], bounds: list[int]) -> list[int]:
    """Deals the first member of each group, then the second of each, and so on."""
    cards = [order[a:b] for a, b in pairwise(bounds)]
    return [rank for row in zip_longest(*cards) for rank in row if rank is not None]


def _iterate(permutation: list[int], times: int) -> list[int]:
    """Applies a permutation `times` times, in log2(times) steps."""
    result = list(range(len(permutation)))
    while times:
        if times & 1:
            result = [result[i] for i in permutation]
        permutation = [permutation[i] for i in permutation]
        times >>= 1
    return result


# ---- directed graphs that change with the step: to whom a rank pushes ----

GRAPHS: Final = (
    "exponential",
    "ring",
    "bipartite_exponential",
    "complete",
    "random_exponential",
    "random",
)


def out_peers(
    graph: str, step: int, rank: int, world_size: int, num_peers: int = 1, seed: int = 0
) -> list[int]:
    """Returns the ranks to which a rank sends at a step: `num_peers`, or fewer in a small graph.

    exponential: 1, 2, 4, ... hops ahead in turn, the hops below P (SGP, appendix A.1); with two
        peers the next two of them, moving on by one a step
    ring: one hop ahead; with two peers, also one back
    bipartite_exponential: odd ranks and even ones in pairs, 1, 3, 7, ... hops ahead and back in
        turn; where P is odd, one even rank is left out of each step
    complete: 1, 2, 3, ... P - 1 hops ahead in turn
    random_exponential: drawn from the peers of "exponential", by each rank for itself
    random: drawn from all ranks

    The draw depends on the seed, the step and the rank alone, so the receiver knows it too.
    """
    if graph == "bipartite_exponential":
        shifts = _bipartite_shifts(world_size)
        found = [_across(rank, world_size, shift) for shift in _in_turn(shifts, step, num_peers)]
        return [peer for peer in found if peer is not None]
    if graph == "ring":
        return [(rank + hop) % world_size for hop in _hops(graph, world_size)[:num_peers]]
    hops = _hops(graph, world_size)
    if graph.startswith("random"):
        draw = random.Random(f"{seed}/{step}/{rank}")
        chosen = draw.sample(hops, min(num_peers, len(hops)))
    else:
        chosen = _in_turn(hops, step, num_peers)
    return [(rank + hop) % world_size for hop in chosen]


def in_peers(
    graph: str, step: int, rank: int, world_size: int, num_peers: int = 1, seed: int = 0
) -> list[int]:
    """Returns the ranks that send to a rank at a step, in a fixed order."""
    if graph in ("exponential", "complete", "ring"):  # mirrored
        mirrored = out_peers(graph, step, 0, world_size, num_peers)
        return [(rank - hop) % world_size for hop in mirrored]
    if graph == "bipartite_exponential":  # both ways
        return out_peers(graph, step, rank, world_size, num_peers)
    return [
        other
        for other in neighbours(graph, rank, world_size)
        if rank in out_peers(graph, step, other, world_size, num_peers, seed)
    ]


def neighbours(graph: str, rank: int, world_size: int) -> list[int]:
    """Returns the ranks that a rank sends to or hears from at any step, in ascending order."""
    if graph == "bipartite_exponential":
        across = (_across(rank, world_size, shift) for shift in _bipartite_shifts(world_size))
        return sorted({peer for peer in across if peer is not None})
    hops = _hops(graph, world_size)
    return sorted({(rank + sign * hop) % world_size for hop in hops for sign in (1, -1)})


def _hops(graph: str, world_size: int) -> list[int]:
    if graph in ("exponential", "random_exponential"):
        return [1 << e for e in range((world_size - 1).bit_length())]
    if graph == "ring":
        return sorted({1, world_size - 1} - {0, world_size})
    return list(range(1, world_size))


def _in_turn(options: list[int], step: int, num_peers: int) -> list[int]:
    return [options[(step + i) % len(options)] for i in range(min(num_peers, len(options)))]


def _bipartite_shifts(world_size: int) -> list[int]:
    """Returns hops of 2^k - 1 from odd to even ranks, as differences between their places.

    Odd rank 2 j + 1 and even rank 2 (j + shift) mod P: where P is odd, there is one even rank more,
    and places counted modulo their number still lead from different odd ranks to different even
    ones.
    """
    num_even = (world_size + 1) // 2
    shifts: list[int] = []
    hop = 1
    while hop < world_size:
        for shift in ((1 + hop) // 2, (1 - hop) // 2):
            if shift % num_even not in shifts:
                shifts.append(shift % num_even)
        hop = 2 * hop + 1
    return shifts


def _across(rank: int, world_size: int, shift: int) -> int | None:
    """Returns the partner of a rank on the other side, if the rank has one at this shift."""
    num_even = (world_size + 1) // 2
    if rank % 2:
        return 2 * ((rank // 2 + shift) % num_even)
    place = (rank // 2 - shift) % num_even
    return 2 * place + 1 if 2 * place + 1 < world_size else None


# ---- pairs ----


@lru_cache(maxsize=128)
def random_partners(
    version: int, world_size: int, topology: str = "complete", seed: int = 0
) -> tuple[int, ...]:
    """Returns each rank's partner at a version, itself if it has none; the same draw on all ranks.

    complete: a perfect matching, drawn uniformly from all; where P is odd, one rank is left out
    cycle: a matching along the cycle; each of its P edges is as likely as any other
    """
    draw = random.Random(f"{seed}/{version}")
    partners = list(range(world_size))
    if topology == "cycle":
        start = draw.randrange(world_size)
        order = [(start + i) % world_size for i in range(world_size)]
    else:
        order = draw.sample(range(world_size), world_size)
    for a, b in zip(order[::2], order[1::2], strict=False):
        partners[a], partners[b] = b, a
    return tuple(partners)


@lru_cache(maxsize=128)
def random_pair(
    version: int, world_size: int, topology: str = "complete", seed: int = 0
) -> tuple[int, ...]:
    """Returns the same of one pair, drawn uniformly from all; all others are their own partners."""
    draw = random.Random(f"{seed}/pair/{version}")
    a = draw.randrange(world_size)
    hop = draw.choice((1, -1)) if topology == "cycle" else draw.randrange(1, max(2, world_size))
    b = (a + hop) % world_size
    partners = list(range(world_size))
    partners[a], partners[b] = b, a
    return tuple(partners)
