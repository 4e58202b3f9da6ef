"""Whether an algorithm suits all numbers of ranks that a training may come to have."""

from __future__ import annotations

import torch

from lightning_dsgd.algorithm import Algorithm, Conditions


def check_survival(
    algorithm: Algorithm,
    world_size: int,
    min_ranks: int | None,
    device: torch.device,
    max_ranks: int | None = None,
    num_shards: int = 1,
) -> None:
    """Raises unless training can go on with fewer ranks, or more, where some are lost or join.

    With shards, `min_ranks` counts the ranks in whole replicas, and None asks that more than
    half be left to vote, the broken replica's ranks included: one replica may be left.
    """
    if device.type != "cpu" and num_shards > 1:
        raise ValueError(
            "shards must be on CPUs to go on without a lost rank, as NCCL, which joins them, does "
            f'not, got on_loss="continue" with shards on {device.type}; train whole replicas, '
            'or use on_loss="end"'
        )
    fewest, most = min_ranks or 2, max_ranks or world_size
    if most < world_size:
        raise ValueError(
            "max_ranks must be at least the number of ranks at the start, got "
            f"max_ranks={max_ranks} with {world_size} ranks; leave it out, or try "
            f"max_ranks={2 * world_size}"
        )
    one, many = "rank", "ranks"
    if num_shards > 1:
        one, many = f"replica of {num_shards} ranks", f"replicas of {num_shards} ranks"
        fewest, most = -(-(min_ranks or 1) // num_shards), world_size // num_shards
    for size in range(min(fewest, most), most + 1):
        try:
            algorithm.check(size, Conditions())
        except ValueError as err:
            ways = "min_ranks" if max_ranks is None else "min_ranks or max_ranks"
            if num_shards > 1:
                ways = f"min_ranks={num_shards * _fewest_suitable(algorithm, most)}"
            raise ValueError(
                f'with on_loss="continue", strategy="{algorithm.name}" must be able to go on with '
                f"{size} {one if size == 1 else many}, but {err}; choose it so that it suits "
                f'{fewest} to {most} {many}, set {ways}, or use on_loss="end"'
            ) from err


def _fewest_suitable(algorithm: Algorithm, most: int) -> int:
    """Returns the smallest size from which on an algorithm suits all sizes up to `most`."""
    for size in range(most - 1, 0, -1):
        try:
            algorithm.check(size, Conditions())
        except ValueError:
            return size + 1
    return 1
