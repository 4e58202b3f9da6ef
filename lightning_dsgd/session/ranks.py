"""The ranks of a session, and what the loss of one means to it: here it ends the job.

A session, and the face that leads it, ask the ranks, and never which kind they are.  With
`on_loss="continue"` the ranks are `elastic.members`: there the others go on, and ranks may join.

Threads: the training thread; a signal handler calls `request_end`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch

from lightning_dsgd.agreement import refuse_unless_alike
from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.replica.replica import Replica
from lightning_dsgd.session.collectives import Collectives
from lightning_dsgd.session.phases import Phase
from lightning_dsgd.transport import Transport

T = TypeVar("T")


class Ranks:
    """The ranks of one session, of which none may be lost.

    Attributes:
        session: the session that these ranks belong to
        collectives: makes the collectives that a face is asked for
    """

    session: Any = None
    collectives: Collectives
    go_on: ClassVar[bool] = False
    """Whether the others go on where one is lost."""

    def belong_to(self, session: Any) -> None:
        """Notes the session of these ranks; called once, when the session is made."""
        self.session = session
        self.collectives = Collectives(session)

    # ---- who they are ----

    @property
    def number(self) -> int:
        """The number of the view that this rank is in."""
        return 0

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that train, by the numbers that they had at the start."""
        return tuple(range(self.session.world_size))

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all: the first rank alone prints and logs."""
        return bool(self.session.rank == 0)

    @property
    def can_be_joined(self) -> bool:
        """Whether a process that is started later can join the others."""
        return False

    @property
    def has_changed(self) -> bool:
        """Whether ranks have been lost, or have joined; known also once the network is closed."""
        return False

    # ---- setting up ----

    def check(self, algorithm: Algorithm, num_replicas: int, device: torch.device) -> None:
        """Raises `ValueError` unless the algorithm suits all numbers of ranks that there may be."""

    def check_start(self, method: str) -> None:
        """Raises `ValueError` where Lightning starts the ranks in a way that binds them."""

    def check_unchanged(self) -> None:
        """Raises `ValueError` where ranks were lost or have joined in a training before."""

    def check_may_load(self, way_out: str) -> None:
        """Raises `RuntimeError` where it is too late to load a checkpoint."""

    def find_training(
        self, address: tuple[str, int], calls: str | None = None, num_shards: int = 1
    ) -> None:
        """Finds out whether others train already, whom this process is to join.

        Args:
            address: where the ranks meet
            calls: which function of the Trainer's was called
            num_shards: how many ranks hold a replica together
        """

    def in_row(self, work: Callable[[], T], what: str) -> T:
        """Returns what `work` gives, which the ranks of a replica do together before they train.

        Args:
            work: what they do
            what: what it does, for errors: "connect"
        """
        return work()

    def open_network(self, open_network: Callable[[], Transport]) -> Transport:
        """Returns the network over which this rank trains."""
        return open_network()

    def open(self, net: Transport) -> Transport:
        """Returns the network of the ranks that train, once this rank has a network."""
        self.session.enter(Phase.READY)
        return net

    def check_alike(self, text: str) -> None:
        """Raises `ValueError`, on every rank, unless all ranks were given the same options."""
        way_out = "give every rank the same arguments"
        refuse_unless_alike(self.session.meetings, text, "the strategy", way_out)

    def make_replica(self, *args: Any, **options: Any) -> Replica:
        """Returns this rank's replica."""
        return Replica(*args, **options)

    def join(self) -> dict[str, Any] | None:
        """Joins the others; returns what they give a newcomer, None on all other ranks."""
        return None

    def share(self, first: dict[str, Any]) -> dict[str, Any]:
        """Returns a sampler's arguments for this rank's share of the data."""
        return first

    # ---- training ----

    def begin(self) -> None:
        """Notes that the ranks begin to train; all ranks call it, once."""

    def before_batch(self) -> None:
        """Does what is to be done before a batch; a loop may have left the last one by `break`."""
        self.session.enter(Phase.TRAINING)

    def end_epoch(self) -> None:
        """Notes that this rank has done its batches of an epoch."""

    def together(
        self,
        call: Callable[[], T],
        adopt: Callable[[], None] | None = None,
        *,
        apart: Any = None,
    ) -> T:
        """Returns what `call` returns; all ranks make their calls in the same order.

        Args:
            call: what all ranks do; it may be made again, from its beginning
            adopt: has the same effect on this rank, where others have come back from `call` before
                a loss
            apart: what a rank gets that makes no calls with the others
        """
        return call()

    def step(self, call: Callable[[], None], *, again: bool) -> None:
        """Makes a step of this rank alone.

        Args:
            call: makes the step
            again: whether the step is made again where a loss has ended it
        """
        call()

    def show(self, call: Callable[[], None]) -> None:
        """Has `call` show the consensus, on all ranks."""
        call()

    def end_training(self, call: Callable[[], None]) -> None:
        """Has `call` end training, on all ranks."""
        call()

    def end_leaver(self) -> None:
        """Ends this rank after training if it was told to leave, and no batch was left for that."""

    def check_peers(self) -> None:
        """Raises `PeerLost` if a rank is known to be lost."""
        self.session.net.check()

    def figures(self) -> dict[str, float]:
        """Returns what there is to know of the ranks."""
        return {}

    # ---- the end ----

    def forgives(self, error: Exception) -> bool:
        """Returns whether a thread beside the training may have failed so, with a lost rank."""
        return False

    def check_stays(self) -> None:
        """Raises what this rank ends with if it has left the others, as it was told to."""

    def request_end(self, signum: int) -> None:
        """Handles SIGTERM during training on batches; called in a signal handler."""
        self.session.request_stop(signum)

    def stop(self) -> None:
        """Notes that all ranks stop, before this one ends."""

    def fail(self, exception: BaseException) -> None:
        """Notes that this rank fails, before the others are told."""

    def failed(self, reason: str, before: Phase) -> None:
        """Notes that this rank, which stood there before, has failed, once the others are told."""

    def leave(self) -> None:
        """Waits for all ranks, as the last; a launcher notices a rank that fails from here on."""
        session = self.session
        if session.training is not None:
            session.training.agreed.finish()
        session.net.barrier().wait()
