"""A resume of `balanced` on another number of ranks keeps the batch of a step.

    P k = P' k'     P ranks of k batches each make a step before, P' ranks of k' batches afterwards

Lightning's sampler deals samples round the ranks, so a step has the same samples with both, and the
weights go on as if nothing had been.  What Lightning has counted in batches of a rank is scaled.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Final

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_dsgd.trainer import seams

_STEP: Final = "lightning_dsgd_step"
"""The key of what a step was made of, in a checkpoint."""


def noted(checkpoint: dict[str, Any], trainer: Any, num_ranks: int) -> dict[str, Any]:
    """Returns a checkpoint that says of what a step is made."""
    made = {"ranks": num_ranks, "batches": trainer.accumulate_grad_batches}
    return {**checkpoint, _STEP: made}


def keep(trainer: Any, checkpoint: dict[str, Any], num_ranks: int) -> None:
    """Has a step be made of as many batches, of all ranks together, as when it was saved."""
    if _STEP not in checkpoint or checkpoint[_STEP]["ranks"] == num_ranks:
        return
    before, num_batches = checkpoint[_STEP]["ranks"], checkpoint[_STEP]["batches"]
    kept = batches_of_each(before, num_batches, num_ranks)
    begun = seams.num_batches_begun(checkpoint) if seams.is_within_epoch(checkpoint) else 0
    if begun * before % num_ranks or seams.schedules_accumulation(trainer):
        raise ValueError(
            "training can go on with another number of ranks where a step ends, and with one "
            f"number of batches a step, got {before} ranks when it was saved and {num_ranks} now, "
            "within a step or with a GradientAccumulationScheduler; resume from a checkpoint of "
            f"an epoch's end, or with {before} ranks"
        )
    seams.scale_batches(checkpoint, Fraction(before, num_ranks))
    trainer.accumulate_grad_batches = kept
    rank_zero_info(
        f"A step is made of {before * num_batches} batches as before: accumulate_grad_batches is "
        f"{kept} on {num_ranks} ranks, for {num_batches} on {before}."
    )


def batches_of_each(num_before: int, num_batches: int, num_ranks: int) -> int:
    """Returns of how many batches of each rank a step is made, on another number of ranks.

    Args:
        num_before: how many ranks there were
        num_batches: how many batches of each of them a step had
        num_ranks: how many ranks there are now
    """
    together = num_before * num_batches
    if together % num_ranks:
        fitting = [n for n in range(1, together + 1) if together % n == 0]
        raise ValueError(
            f"a step must be made of as many batches as before, {together} of all ranks together, "
            f"got a checkpoint of {num_before} ranks with accumulate_grad_batches={num_batches} "
            f"for {num_ranks} ranks; use {', '.join(map(str, fitting))} ranks"
        )
    return together // num_ranks
