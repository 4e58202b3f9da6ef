"""What a rank comes to a meeting for, and for which purposes ranks may meet.

    STOP, END, SAVE, MEET      it has done the batch after which all do something (`stopping`)
    VALIDATE, END_EPOCH        it validates; it has done all batches that it has in an epoch
    GO_ON, FINISHED            it has another epoch to train; it has no more to train
    END_TRAINING               it has trained
    REDUCE                     a sum or a mean over ranks
    OTHER                      a barrier, a broadcast, a checkpoint, an evaluation

A rank that comes for one of the first line goes on with its batches, and the others wait on.  Ranks
that come for purposes of one of the other lines go on together.  All others have come apart, and
would wait for each other in different places: each raises an error that names who is where.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from lightning_dsgd.agreement import by_rank, everyones
from lightning_dsgd.session.stopping import END, MEET, SAVE, STOP
from lightning_dsgd.transport import Transport

OTHER: Final = 0
VALIDATE: Final = 5
END_EPOCH: Final = 6
GO_ON: Final = 7
FINISHED: Final = 8
END_TRAINING: Final = 9
REDUCE: Final = 10
NUM_PURPOSES: Final = 11

AFTER_BATCH: Final = (STOP, END, SAVE, MEET)
"""The purposes of ranks that go on with their batches."""
_TOGETHER: Final = ({VALIDATE, END_EPOCH}, {GO_ON, FINISHED})
_WORDS: Final = {
    OTHER: "a barrier, a broadcast, a checkpoint or an evaluation",
    VALIDATE: "a validation",
    END_EPOCH: "the end of its batches of an epoch",
    GO_ON: "the beginning of another epoch",
    FINISHED: "the end of its last epoch",
    END_TRAINING: "the end of its training",
    REDUCE: "a value over all ranks (sync_dist=True, or a decision of all)",
}


def check_together(meetings: Transport, mine: int, votes: Tensor) -> None:
    """Raises `ValueError`, on every rank, where the votes are for what cannot be done together."""
    given = {purpose for purpose, count in enumerate(votes.tolist()) if count}
    if len(given) > 1 and given not in _TOGETHER:
        texts = everyones(meetings, f"{_WORDS[mine]}")
        raise ValueError(
            "all ranks must come to the same points of a training in the same order, got "
            f"{by_rank(texts)}; log the same values on all ranks, and save, evaluate and stop on "
            "all or on none"
        )
