"""With whom a rank talks: pure functions of (rank, world_size)."""

from __future__ import annotations

from itertools import pairwise, zip_longest


def ring(rank: int, world_size: int) -> list[int]:
    """The neighbours on the ring, each once: none for one rank, one for two, else two."""
    neighbours = {(rank - 1) % world_size, (rank + 1) % world_size} - {rank}
    return sorted(neighbours)


def ring_matrix(world_size: int) -> list[list[float]]:
    """W of the ring: equal weights for a rank and its neighbours; symmetric, doubly stochastic."""
    rows = []
    for rank in range(world_size):
        members = [rank, *ring(rank, world_size)]
        rows.append([1 / len(members) if j in members else 0.0 for j in range(world_size)])
    return rows


def near_sqrt(world_size: int) -> int:
    """The power of two nearest sqrt(P): WAGMA's group size."""
    exponents = range(world_size.bit_length())
    return min((1 << e for e in exponents), key=lambda size: abs(size - world_size**0.5))


def groups(version: int, world_size: int, group_size: int) -> list[list[int]]:
    """Who averages with whom at a version: a partition of the ranks that changes with it.

    At powers of two, Algorithm 1 of WAGMA-SGD: a butterfly whose phases move on by log2 S a version, so
    that every update reaches every rank within log_S P versions, rounded up.  At other numbers, groups
    whose sizes differ by at most one; the members of each are dealt to different groups of the next
    version, and every update reaches every rank within 2 log_S P versions, rounded up.
    """
    if _is_power_of_two(world_size) and _is_power_of_two(group_size):
        return _butterfly_groups(version, world_size, group_size)
    return _dealt_groups(version, world_size, group_size)


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def _butterfly_groups(version: int, world_size: int, group_size: int) -> list[list[int]]:
    global_phases, group_phases = world_size.bit_length() - 1, group_size.bit_length() - 1
    if not global_phases:
        return [[0]]
    shift = version * group_phases % global_phases
    masks = [1 << (shift + r) % global_phases for r in range(group_phases)]
    members: dict[int, list[int]] = {}
    for rank in range(world_size):
        members.setdefault(rank & ~sum(masks), []).append(rank)
    return list(members.values())


def _dealt_groups(version: int, world_size: int, group_size: int) -> list[list[int]]:
    num_groups = -(-world_size // group_size)
    bounds = [-(-world_size * g // num_groups) for g in range(num_groups + 1)]
    dealt = _deal(list(range(world_size)), bounds)
    order = _iterate(dealt, version)
    return [sorted(order[a:b]) for a, b in pairwise(bounds)]


def _deal(order: list[int], bounds: list[int]) -> list[int]:
    """The first member of each group, then the second of each, and so on."""
    cards = [order[a:b] for a, b in pairwise(bounds)]
    return [rank for row in zip_longest(*cards) for rank in row if rank is not None]


def _iterate(permutation: list[int], times: int) -> list[int]:
    """A permutation applied `times` times, in log2(times) steps."""
    result = list(range(len(permutation)))
    while times:
        if times & 1:
            result = [result[i] for i in permutation]
        permutation = [permutation[i] for i in permutation]
        times >>= 1
    return result


def binomial_children(root: int, rank: int, world_size: int) -> list[int]:
    """To whom a rank passes on what began at `root`, along the binomial tree rooted there."""
    place = (rank - root) % world_size
    children = []
    distance = 1 << place.bit_length()
    while place + distance < world_size:
        children.append((rank + distance) % world_size)
        distance <<= 1
    return children
