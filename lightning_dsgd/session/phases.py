"""Where a session stands, and the one table of what may follow.

    OPENING    there is no network
    READY      the network is open, and the ranks do not train on batches yet
    TRAINING   the ranks train; this rank is between two batches
    IN_BATCH   this rank is in a batch, and asks nobody but through its algorithm
    TRAINED    this rank has done its training
    NEWCOMER   others train already, and this rank lacks their state
    JOINED     this rank has their state, and takes part from its first batch on
    LEFT       this rank has left, and the others go on
    STOPPING   a signal has come, and all ranks stop at the same point
    BROKEN     this rank has failed, or another is lost
    OVER       the network is closed

A rank that is READY or TRAINING may be asked by ranks that still train, and serves them wherever it
waits (`Session.meet`).  With `on_loss="continue"` the others go on without this rank from TRAINING
on; a loss before that ends the job.

LEFT, STOPPING and BROKEN are the ends: the rest of the program may still tell the session what it
does, and nothing follows.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final


class Phase(Enum):
    """Names where a session stands."""

    OPENING = auto()
    READY = auto()
    TRAINING = auto()
    IN_BATCH = auto()
    TRAINED = auto()
    NEWCOMER = auto()
    JOINED = auto()
    LEFT = auto()
    STOPPING = auto()
    BROKEN = auto()
    OVER = auto()


_P = Phase
_FAILS: Final = {_P.BROKEN: "this rank fails, or another is lost"}
_CLOSES: Final = {_P.OVER: "the network is closed"}
_STOPS: Final = {_P.STOPPING: "all ranks stop after the same batch"}
FOLLOWING: Final[dict[Phase, dict[Phase, str]]] = {
    _P.OPENING: {
        _P.READY: "the network is open",
        _P.NEWCOMER: "the others are found training",
        **_FAILS,
        **_CLOSES,
    },
    _P.READY: {_P.TRAINING: "the ranks begin to train", **_STOPS, **_FAILS, **_CLOSES},
    _P.TRAINING: {
        _P.IN_BATCH: "a batch begins",
        _P.TRAINED: "training has ended",
        _P.LEFT: "this rank was told to leave, and the others know",
        **_STOPS,
        **_FAILS,
    },
    _P.IN_BATCH: {
        _P.TRAINING: "the batch is over, or was left by break",
        _P.TRAINED: "training has ended within the batch",
        **_FAILS,
    },
    _P.TRAINED: {**_STOPS, **_FAILS, **_CLOSES},
    _P.NEWCOMER: {_P.JOINED: "the others have given their state", **_FAILS, **_CLOSES},
    _P.JOINED: {
        _P.TRAINING: "the first batch begins",
        _P.TRAINED: "training has ended before it",
        **_FAILS,
    },
    _P.OVER: {
        _P.READY: "Fabric has launched again, and the network is open",
        _P.NEWCOMER: "Fabric has launched again, and the others are found training",
        **_FAILS,
    },
    _P.LEFT: {},
    _P.STOPPING: {},
    _P.BROKEN: {},
}
"""For each phase, the phases that may follow it, and on what."""
ENDS: Final = frozenset({_P.LEFT, _P.STOPPING, _P.BROKEN})
APART: Final = frozenset({_P.NEWCOMER, _P.JOINED, _P.LEFT})
"""The phases of a rank that makes none of the calls that the others make together."""


def no_change(before: Phase, after: Phase) -> str:
    """Says that the table has no such change."""
    listed = ", ".join(each.name for each in FOLLOWING[before])
    return f"a session that is {before.name} may become {listed}, got {after.name}"
