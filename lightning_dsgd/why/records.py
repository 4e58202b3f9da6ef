"""What is known of a job: plain records that know no files, no clock and no processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_dsgd.why.stacks import Frame


@dataclass(frozen=True)
class Collective:
    """Holds one collective of one process group, as one rank has entered it."""

    group: str
    number: int
    name: str
    size: int = 0
    is_over: bool = True


@dataclass(frozen=True)
class Group:
    """Holds how far a rank has come in one process group.

    Args:
        ranks: the members
        entered: the number of the last collective that the rank has entered
        over: the number of the last one that is over
        still_s: for how long neither has changed
        recent: the last collectives, by number
    """

    ranks: tuple[int, ...]
    entered: int
    over: int
    still_s: float
    recent: dict[int, Collective] = field(default_factory=dict)


@dataclass(frozen=True)
class Ending:
    """Holds how a rank has ended.

    Args:
        how: "left", its program was through; "raised"; "killed", nothing was heard of it any more;
            "terminated", by SIGTERM; "crashed", by a fatal signal
        error: what it raised, or the signal's name
        frames: where it was then, the innermost first
        at_s: when, on the watcher's clock: when it was first seen
    """

    how: str
    error: str = ""
    frames: tuple[Frame, ...] = ()
    at_s: float = 0.0


@dataclass(frozen=True)
class Rank:
    """Holds what is known of one rank.

    Args:
        rank: its number
        stage: "starting", "joining" a process group, or "joined"
        still_s: for how long the stage has been this one, as the watcher saw it
        idle_s: for how long neither the rank nor its children have worked
        usual_s: how long it usually takes from one collective to the next
        silent_s: for how long its record has not changed
        groups: its process groups by name
        frames: what its main thread does, the innermost first; empty if that is not known
        ending: how it has ended; None while it runs
    """

    rank: int
    stage: str = "joined"
    still_s: float = 0.0
    idle_s: float = 0.0
    usual_s: float = 0.0
    silent_s: float = 0.0
    groups: dict[str, Group] = field(default_factory=dict)
    frames: tuple[Frame, ...] = ()
    ending: Ending | None = None


@dataclass(frozen=True)
class Job:
    """Holds what is known of all ranks.

    Args:
        ranks: those that have been seen, by number
        world_size: how many there are to be; 0 while nobody has said so
        exit_status: of the command; None while it runs
    """

    ranks: dict[int, Rank]
    world_size: int
    exit_status: int | None = None
