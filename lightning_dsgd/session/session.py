"""One training or evaluation on one rank: what lives as long as its network, and how ranks meet.

Whoever drives it is its face, and adds what only that face has: the Trainer, in `trainer.training`.

    OPENING -> READY -> TRAINING <-> IN_BATCH
                 ^         |
                 +---------+  training has ended
    from anywhere to STOPPING: a signal has come, and all ranks stop at the same point
    from anywhere to BROKEN: this rank has failed, or another is lost
    from anywhere to OVER: the network is closed

STOPPING and BROKEN last to the end of the session.

A rank that is TRAINING or READY may be asked by ranks that still train, and serves them wherever it
waits: `meet`.  A rank that is IN_BATCH asks nobody but through its algorithm.

Threads: the training thread owns a session.  Signal handlers run in that thread, between any two of
its instructions: they read the phase and the training, set a flag of their session, or call
`AgreedBatch.request` or `interrupt`.  The mesh's thread calls `_await_notice`, which starts a
timer; the timer's thread reads the phase, and ends the process if the training thread has not
noticed a loss by then.  A read of one attribute is whole, which the interpreter's lock sees to.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dsgd.agreement import everyones, refuse_unless_alike
from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.primitives.own_device import await_step
from lightning_dsgd.replica.held_back import unclipped
from lightning_dsgd.replica.replica import Replica
from lightning_dsgd.session import checkpoint as files
from lightning_dsgd.session import options, record
from lightning_dsgd.session.ending import end_fork, say
from lightning_dsgd.session.lateness import NUM_FIGURES, Lateness
from lightning_dsgd.session.purposes import (
    AFTER_BATCH,
    END_TRAINING,
    NUM_PURPOSES,
    OTHER,
    REDUCE,
    check_together,
)
from lightning_dsgd.session.stopping import ENDS, STOP, AgreedBatch
from lightning_dsgd.transport import PeerLost, Transport, TransportError, failed

if TYPE_CHECKING:
    from lightning_dsgd.session.sharding import Sharding

_log: Final = logging.getLogger("lightning_dsgd")

NOTICE_WITHIN_S: Final = 15.0
"""How long a training thread may take to notice a loss before its process is ended."""
_ALIKE_WITHIN_S: Final = 1.0
"""How long a rank that fails before training waits to see whether all do."""


class Phase(Enum):
    """Names where a session stands."""

    OPENING = auto()
    READY = auto()
    TRAINING = auto()
    IN_BATCH = auto()
    STOPPING = auto()
    BROKEN = auto()
    OVER = auto()


@dataclass
class Training:
    """Holds what there is while a model is trained, but not while it is only evaluated."""

    algorithm: Algorithm
    replica: Replica
    agreed: AgreedBatch

    def stop_lanes(self) -> Sequence[Callable[[], None]]:
        """Returns what ends the threads beside the training."""
        return self.replica.stop, self.agreed.close


TrainingT = TypeVar("TrainingT", bound=Training)
T = TypeVar("T")


def opened(part: T | None) -> T:
    """Returns a thing that exists while a network is open, and raises where there is none."""
    if part is None:
        raise RuntimeError(
            "a training or an evaluation must be under way, got none: there is no network; call "
            "this while one is"
        )
    return part


def trained(training: T | None) -> T:
    """Returns a thing that exists while a model is trained, and raises where there is none."""
    if training is None:
        raise RuntimeError(
            "a training must be under way, got none: there is no consensus to save; save while one "
            "is"
        )
    return training


class Session(Generic[TrainingT]):
    """Leads one rank through a training or an evaluation; the head of the file tells how.

    Attributes:
        rank: the number of this process, once it is known
        world_size: how many ranks there are, once it is known
        consensus_distance: the ranks' distance from their mean at the last evaluation, relative to
            its norm
        clip: clips the gradients of an optimizer as training does, where the face knows how
        survives: whether this rank goes on, from now on, where another is lost
        sharding: which ranks hold the same shard, where several hold a replica together; the ranks
            have their numbers in the newest view
    """

    replica_type: ClassVar[type[Replica]] = Replica
    goes_on: ClassVar[bool] = False
    """Whether the other ranks go on where one is lost."""

    def __init__(self) -> None:
        self.phase = Phase.OPENING
        self.rank = 0
        self.world_size = 1
        self.training: TrainingT | None = None
        self.consensus_distance: float | None = None
        self.clip: Callable[[Optimizer], None] = unclipped
        self.survives = False
        self.sharding: Sharding | None = None
        self._net: Transport | None = None
        self._meetings: Transport | None = None
        self._lateness: Lateness | None = None
        self._last_resort: threading.Timer | None = None

    def open(self, net: Transport) -> None:
        """Takes over a network that is open."""
        self._net = net
        self._meetings = net.sub("meetings")
        net.on_lost(self._await_notice)
        self._lateness = Lateness(net)
        net.expect_at_most(0)  # until there is a replica
        self.phase = Phase.READY

    def check_options(self, algorithm: Algorithm, evaluate: str, average_buffers: bool) -> None:
        """Raises `ValueError`, on every rank, unless all ranks were given the same options."""
        refuse_unless_alike(
            self.meetings,
            options.describe(algorithm, evaluate, average_buffers),
            "the strategy",
            "give every rank the same arguments",
        )

    # ---- what a face adds ----

    def _end_by(self, signum: int, begin: str, end: str = "") -> NoReturn:
        """Raises what this rank ends with after a signal; the text surrounds the signal's name."""
        text = f"{begin} {signal.Signals(signum).name}{end}"
        raise KeyboardInterrupt(text) if signum == signal.SIGINT else SystemExit(text)

    def _agree(self, what: int, votes: Tensor, *, are_all_here: bool) -> bool:
        """Notes what others are here for; returns whether all are here to do the same."""
        return are_all_here

    def _quiet_observer(self) -> None:
        """Keeps other code from ending this process before the process can say why it ends."""

    def _end_children(self) -> None:
        """Ends the ranks that this process has started, at once."""

    def _forgive_others(self) -> None:
        """Has a rank that ends badly end no other, where this process would end them."""

    # ---- what a session adds that goes on where a rank is lost: see `surviving` ----

    def begin_to_survive(self) -> None:
        """Has the others go on, from now on, where a rank is lost; all ranks call it, once."""

    def check_stays(self) -> None:
        """Raises what this rank ends with if it has left the others, as it was told to."""

    def together(self, call: Callable[[], Any], adopt: Callable[[], None] | None = None) -> Any:
        """Returns what `call` returns; all ranks make their calls in the same order.

        Args:
            call: what all ranks do; it may be made again, from its beginning
            adopt: has the same effect on this rank, where others have come back from `call` before
                a loss
        """
        return call()

    def hold_shards(self, sharding: Sharding) -> None:
        """Tells which ranks hold a replica together; to be called before the replica is made."""
        self.sharding = sharding

    @property
    def view_number(self) -> int:
        """The number of the view that this rank is in."""
        return 0

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that train."""
        return tuple(range(self.world_size))

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all: only the first rank prints and logs."""
        return self.rank == 0

    # ---- what there is ----

    @property
    def net(self) -> Transport:
        """The open network."""
        return opened(self._net)

    @property
    def meetings(self) -> Transport:
        """The same network with channels of its own, for points where all ranks meet."""
        return opened(self._meetings)

    @property
    def is_open(self) -> bool:
        """Whether there is a network."""
        return self._net is not None

    @property
    def can_meet(self) -> bool:
        """Whether the other ranks can be met."""
        return self.is_open and self.phase is not Phase.BROKEN

    @property
    def is_fork(self) -> bool:
        """Whether this process was forked from a rank in the midst of its training."""
        return self._net is not None and self._net.is_forks

    @property
    def is_training(self) -> bool:
        """Whether ranks train on batches; not where the Trainer only evaluates."""
        return self.phase in (Phase.TRAINING, Phase.IN_BATCH)

    @property
    def has_ended(self) -> bool:
        """Whether this rank ends, alone or with all others."""
        return self.phase in (Phase.STOPPING, Phase.BROKEN)

    def check_process(self) -> None:
        """Raises `TransportError` in a process that was forked from a rank."""
        if self._net is not None:
            self._net.check_process()

    def check_peers(self) -> None:
        """Raises `PeerLost` if a rank is known to be lost."""
        if self._net is not None:
            self._net.check()

    def blaming(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Runs another library's collective; raises `PeerLost` if it failed for a lost rank."""
        return contextlib.nullcontext() if self._net is None else self._net.blaming(what)

    # ---- training ----

    def _enter(self, phase: Phase) -> None:
        if not self.has_ended:
            self.phase = phase

    def begin_training(self) -> None:
        """Notes that ranks train on batches from now on."""
        opened(self._lateness).begin()
        self._enter(Phase.TRAINING)

    def begin_batch(self) -> None:
        """Begins a batch; stops here, at the same batch on all ranks, if one was told to stop."""
        self.net.check()
        self._enter(Phase.TRAINING)
        if self.training is not None and not self.training.agreed.may_begin_batch():
            self.meet(STOP)
        self._enter(Phase.IN_BATCH)

    def end_batch(self) -> None:
        """Notes that this batch is over."""
        self.check_process()
        self._enter(Phase.TRAINING)

    def request_stop(self, signum: int) -> None:
        """Has all ranks stop after the same batch; called in a signal handler."""
        if self.training is not None:
            self.training.agreed.request(signum)

    def request_end(self, signum: int) -> None:
        """Handles SIGTERM during training on batches; called in a signal handler."""
        self.request_stop(signum)

    def before_update(self, optimizer: Optimizer) -> None:
        """Hands the gradients, which are ready, to the replica."""
        self.check_process()
        if self.training is not None:
            self.training.replica.before_update(optimizer)

    def after_update(self, optimizer: Optimizer) -> None:
        """Tells the replica that the optimizer has stepped."""
        if self.training is not None:
            self.training.replica.after_update(optimizer)
            opened(self._lateness).num_steps += 1

    def follow(self) -> None:
        """Follows the others, on a rank without a batch, if they train other parameters."""
        if self.training is not None:
            self.training.replica.follow()

    def show_consensus(self) -> None:
        """Puts the consensus into the model, on all ranks."""
        if self.training is not None:
            self.meet()
            self.training.replica.show_consensus()
            self.consensus_distance = self.training.replica.consensus_distance

    def show_own(self) -> None:
        """Puts this rank's own weights back."""
        if self.training is not None:
            self.training.replica.show_own()

    def end_training(self) -> None:
        """Leaves the consensus in the model, once all ranks are here."""
        if self.training is None or self.phase is Phase.BROKEN:
            return
        agreed = self.training.agreed
        self.meet(STOP if agreed.is_asked else END_TRAINING)
        self._enter(Phase.READY)
        if agreed.requested in ENDS:  # since: the others may know, or may not
            self._end_by(agreed.requested, f"rank {self.rank} received")
        self.training.replica.finish(self.clip)

    # ---- meeting the others ----

    def meet(self, what: int = OTHER) -> bool:
        """Serves ranks that still train until all are here; all stop here if one of them has to.

        A rank that is out of data waits at the end of its epoch, and never comes to the batch at
        which the others stop.

        Args:
            what: what this rank is here for, as `purposes` names it

        Returns:
            Whether all are here for the same purpose.

        Raises:
            ValueError: on every rank, where ranks have come for what they cannot do together
        """
        self.check_process()
        training = self.training
        if training is None or self.phase in (Phase.IN_BATCH, Phase.STOPPING):
            return False
        lateness, meetings = opened(self._lateness), self.meetings
        for part in training.replica.parts:  # what the host has queued counts as not made yet
            await_step(self.net, part.x)
        mine = lateness.figures()
        while True:
            if training.agreed.others_stopped:
                self._stop_here(training)
            training.replica.settle()
            told = torch.zeros(NUM_PURPOSES + meetings.world_size * NUM_FIGURES, dtype=torch.int64)
            votes, figures = told[:NUM_PURPOSES], told[NUM_PURPOSES:]
            votes[what] = 1
            figures.view(-1, NUM_FIGURES)[meetings.rank] = mine
            meetings.all_reduce(told).wait()
            if votes[STOP]:
                self._stop_here(training)
            are_all_here = int(votes[what]) == self.world_size
            are_between_batches = not votes[[*AFTER_BATCH]].any()
            if are_between_batches:
                self._tell_who_is_late(lateness.end(figures, self.members, training.algorithm))
            are_all_here = self._agree(what, votes, are_all_here=are_all_here)
            if are_all_here or what in AFTER_BATCH:
                return are_all_here
            if are_between_batches:
                check_together(meetings, what, votes)
                return False
            # others go on with their batches: serves them until they are here as well

    def _tell_who_is_late(self, text: str) -> None:
        """Says on the first rank who is late; a Python warning could end what some ranks do."""
        if text and self.is_first:
            _log.warning(text)

    def _stop_here(self, training: TrainingT) -> NoReturn:
        agreed = training.agreed
        agreed.await_stop()
        self.phase = Phase.STOPPING
        self._quiet_observer()
        where = f"rank {self.rank} after {agreed.num_begun} batches"
        begin, end = f"rank {agreed.origin} received", f"; all ranks stopped, {where}"
        self._end_by(agreed.signum, begin, end)

    def reduce(self, tensor: Tensor, *, is_mean: bool) -> Tensor:
        """Returns the sum over all ranks, or the mean, once all are here."""
        self.meet(REDUCE)
        total = (tensor.float() if is_mean and not tensor.is_floating_point() else tensor).clone()
        flat = total.reshape(-1).contiguous()
        self.meetings.all_reduce(flat).wait()
        return (flat / self.world_size if is_mean else flat).view(total.shape)

    def texts(self, text: str) -> list[str]:
        """Returns the texts of all ranks."""
        self.meet()
        return everyones(self.meetings, text)

    def text_of_rank_0(self, text: str) -> str:
        """Returns rank 0's text on all ranks."""
        return str(json.loads(self.texts(json.dumps(text))[0])) if self.can_meet else text

    def figures(self) -> dict[str, float]:
        """Returns what this rank has sent and waited for so far, and the algorithm's figures."""
        counters = self.net.counters
        hidden = 1 - counters.wait_s / counters.comm_s if counters.comm_s > 0 else 1.0
        figures = {
            "bytes_sent": float(counters.bytes_sent),
            "messages_sent": float(counters.messages_sent),
            "wait_s": counters.wait_s,
            "comm_overlap": max(0.0, hidden),
        }
        if self.consensus_distance is not None:
            figures["consensus_distance"] = self.consensus_distance
        return figures | (self.training.replica.metrics() if self.training is not None else {})

    def gather_figures(self, figures: dict[str, float]) -> list[dict[str, float]]:
        """Returns every rank's figures, by rank; all ranks call it, between steps."""
        return [json.loads(text) for text in self.texts(json.dumps(figures))]

    # ---- checkpoints ----

    def save(
        self,
        io: files.FileIO,
        path: str,
        checkpoint: dict[str, Any],
        storage_options: Any = None,
        *,
        has_replicas: bool,
    ) -> None:
        """Saves what all ranks agree on, and each rank's own beside it; on all ranks together.

        Args:
            io: writes a file
            path: the file with the consensus; rank 0's path counts
            checkpoint: a checkpoint with this rank's weights under "state_dict"
            storage_options: passed to `io`
            has_replicas: whether training is to go on from the checkpoint
        """
        training = trained(self.training)
        # Ranks with other numbers of steps have other names for it.
        path = self.text_of_rank_0(path)
        algorithm, replica = training.algorithm, training.replica
        shared = record.with_record(replica.consensus(checkpoint), record.of_model(algorithm))
        own = None
        if has_replicas:
            mine = record.of_replica(algorithm, replica)
            own = record.with_record(replica.own(checkpoint), mine)
        files.save(io, self.meetings, path, shared, own, storage_options)
        opened(self._lateness).begin()  # one rank writes, the others wait

    # ---- the end ----

    def leave(self) -> None:
        """Ends the threads beside the training, once all ranks are here or one is lost."""
        training, self.training = self.training, None
        net = self._net
        if self.is_training:
            self.phase = Phase.READY
        try:
            if net is not None and self.phase is not Phase.BROKEN:
                if training is not None:
                    training.agreed.finish()
                net.barrier().wait()  # a rank that fails from here on is noticed by its launcher
            for stop in training.stop_lanes() if training is not None else ():
                self._stop_lanes(stop)
        except BaseException as exception:
            self.fail(exception)
            raise
        finally:
            self._net = self._meetings = None
            self._enter(Phase.OVER)
            if net is not None:
                net.close()
            self._cancel_last_resort()

    def _stop_lanes(self, stop: Callable[[], None]) -> None:
        try:
            stop()
        except Exception:
            if self.phase is not Phase.BROKEN:  # else lanes have failed too, for the same reason
                raise

    def fail(self, exception: BaseException) -> str:
        """Ends this rank's part in the training; tells the others why, unless all stop together.

        Returns:
            What became of this rank.
        """
        if self.is_fork:
            end_fork(exception)
        reason = self._reason(exception)
        if self.has_ended:
            return reason
        was_training, self.phase = self.is_training, Phase.BROKEN
        if isinstance(exception, PeerLost):
            say(f"[rank {self.rank}] training ends: {exception}")
        self._quiet_observer()
        net, training = self._net, self.training
        if net is not None:
            if not was_training and not isinstance(exception, PeerLost) and _all_fail(net):
                net.close()
            else:
                net.fail(reason)
        if training is not None:
            with contextlib.suppress(Exception):  # lanes fail with the network
                training.replica.stop()
        return reason

    def _reason(self, exception: BaseException) -> str:
        """Says what became of this rank, for the others, who put its name before the text."""
        if isinstance(exception, KeyboardInterrupt):
            return "was interrupted"
        text = str(exception)
        if isinstance(exception, SystemExit) and "received SIGTERM" in text:
            return text.removeprefix(f"rank {self.rank} ")
        return failed(exception)

    def _await_notice(self, lost: PeerLost) -> None:
        """Ends the process if its training thread, which may hang in a library, misses a loss."""
        net = self._net
        if net is not None and net.ends_with_peers:
            say(f"[rank {self.rank}] {lost}")

        def end() -> None:
            if self.is_open and self.phase is not Phase.BROKEN:  # also in another view by now
                say(
                    f"[rank {self.rank}] ends: {lost}, and training did not come back to notice "
                    f"within {NOTICE_WITHIN_S:g} s"
                )
                self._end_children()
                os._exit(1)

        self._quiet_observer()
        if net is None:
            return  # training is over
        self._last_resort = threading.Timer(NOTICE_WITHIN_S, end)
        self._last_resort.daemon = True
        self._last_resort.start()

    def _cancel_last_resort(self) -> None:
        """Cancels the timer of `_await_notice`, as training is over and the network closed."""
        if self._last_resort is not None:
            self._last_resort.cancel()


def _all_fail(net: Transport) -> bool:
    """Returns whether every rank fails, as where all refuse their options and say so themselves."""
    try:
        net.sub("failing").barrier().wait(_ALIKE_WITHIN_S)
    except TransportError:
        return False
    return True
