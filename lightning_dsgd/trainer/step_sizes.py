"""A resume of `balanced` on another number of ranks keeps the batches of a step.

    P k     P homes of k batches each make a step, however many ranks there are

Units stay those of the P ranks with which training began: their samplers draw them.  A rank that is
one of the P computes its own first; what is left of homes without a rank is shared, as after a loss
(`data.units.losses`).  So a step has the same samples, and what Lightning has counted stays true.
"""

from __future__ import annotations

from typing import Any, Final

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_dsgd.trainer import seams

_STEP: Final = "lightning_dsgd_step"
"""The key of what a step is made of, in a checkpoint."""


def noted(checkpoint: dict[str, Any], trainer: Any, num_homes: int) -> dict[str, Any]:
    """Returns a checkpoint that says of what a step is made."""
    made = {"homes": num_homes, "batches": trainer.accumulate_grad_batches}
    return {**checkpoint, _STEP: made}


def kept(trainer: Any, checkpoint: dict[str, Any], num_ranks: int) -> int:
    """Has a step be made of the same batches as when it was saved; returns how many homes it has.

    Args:
        trainer: the Trainer
        checkpoint: from which training goes on
        num_ranks: how many ranks there are now
    """
    step = checkpoint.get(_STEP)
    if step is None:
        return num_ranks
    # Before there were homes, a step had the batches of the ranks that saved.
    num_homes, num_batches = int(step.get("homes") or step["ranks"]), int(step["batches"])
    if num_homes == num_ranks:
        return num_ranks
    if not seams.schedules_accumulation(trainer):
        trainer.accumulate_grad_batches = num_batches
    rank_zero_info(
        f"A step is made of the batches of {num_homes} ranks as before, {num_batches} of each, "
        f"which {num_ranks} ranks share."
    )
    return num_homes
