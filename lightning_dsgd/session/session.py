"""One training or evaluation on one rank: what lives as long as its network, and how ranks meet.

Whoever drives a session is its face, and does what only that face can (`duties`).  Where a session
stands, and what may follow, is the table in `phases`.  Which ranks there are, and what the loss of
one means, the session asks its `ranks`.

Threads: the training thread owns a session.  Signal handlers run in that thread, between any two of
its instructions: they read the phase and the training, set `AgreedBatch.leaves`, or call
`AgreedBatch.request` or `interrupt`.  The mesh's thread and a timer's read the phase, where a rank
is lost (`LastResort`).  A read of one attribute is whole, which the interpreter's lock sees to.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from typing import Any, Final, Generic, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dsgd.agreement import everyones
from lightning_dsgd.data.unequal import Samples
from lightning_dsgd.primitives.own_device import await_step
from lightning_dsgd.replica.held_back import unclipped
from lightning_dsgd.session.duties import Duties
from lightning_dsgd.session.ending import LastResort, all_fail, end_fork, reason_of, say
from lightning_dsgd.session.meeting import (
    AFTER_BATCH,
    END_TRAINING,
    NUM_FIGURES,
    NUM_PURPOSES,
    OTHER,
    REDUCE,
    Lateness,
    check_together,
)
from lightning_dsgd.session.phases import APART, ENDS, FOLLOWING, Phase, no_change
from lightning_dsgd.session.ranks import Ranks
from lightning_dsgd.session.sharding import Sharding
from lightning_dsgd.session.signals import Signals
from lightning_dsgd.session.stopping import END_SIGNALS, STOP, Stopping
from lightning_dsgd.session.under_way import TrainingT, opened
from lightning_dsgd.transport import PeerLost, Transport

_log: Final = logging.getLogger("lightning_dsgd")


class Session(Duties, Generic[TrainingT]):
    """Leads one rank through a training or an evaluation; the head of the file tells how.

    Attributes:
        rank: the number of this process, once it is known
        world_size: how many ranks there are, once it is known
        ranks: which ranks there are, and what the loss of one means
        consensus_distance: the ranks' distance from their mean, relative to its norm
        clip: clips the gradients of an optimizer as training does, where the face knows how
        signals: what SIGTERM and Ctrl-C do to this rank
        sharding: which ranks of the newest view hold the same shard of a replica, or all of it
        samples: of how many samples steps are made, where means are weighted by them
        reads_indices: whether ranks could claim what they train on, as far as the face knows it

    Args:
        ranks: the ranks; by default a loss ends the job
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._phase = Phase.OPENING
        self.rank = 0
        self.world_size = 1
        self.ranks = Ranks() if ranks is None else ranks
        self.ranks.belong_to(self)
        self.training: TrainingT | None = None
        self.consensus_distance: float | None = None
        self.clip: Callable[[Optimizer], None] = unclipped
        self.sharding = Sharding()
        self.samples: Samples | None = None
        self.reads_indices = True
        self._net: Transport | None = None
        self._meetings: Transport | None = None
        self._lateness: Lateness | None = None
        self.signals = Signals(self)
        self._last_resort = LastResort(self)

    def open(self, net: Transport) -> None:
        """Takes over a network that is open."""
        self.take(self.ranks.open(net))
        net.on_lost(self._last_resort.await_notice)
        net.expect_at_most(0)  # until there is a replica

    def take(self, net: Transport) -> None:
        """Goes on over this network, whose ranks are there."""
        self._net, self._meetings = net, net.sub("meetings")
        self._lateness = Lateness(net)

    # ---- where it stands ----

    @property
    def phase(self) -> Phase:
        """Where this session stands."""
        return self._phase

    def enter(self, phase: Phase) -> None:
        """Goes on to another phase; nothing follows an end.

        Raises:
            AssertionError: unless the table of phases has that change
        """
        if phase is not self._phase and self._phase not in ENDS:
            assert phase in FOLLOWING[self._phase], no_change(self._phase, phase)
            self._phase = phase

    @property
    def net(self) -> Transport:
        """The open network."""
        if self._net is None:
            self.ranks.check_stays()
        return self._net if self._net is not None else opened(self._net)

    @property
    def net_if_open(self) -> Transport | None:
        """The network, if it is open; any thread may ask."""
        return self._net

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
        return self.is_open and self._phase is not Phase.BROKEN

    @property
    def takes_part(self) -> bool:
        """Whether this rank makes the calls that all ranks make together."""
        return self._phase not in APART

    @property
    def is_fork(self) -> bool:
        """Whether this process was forked from a rank in the midst of its training."""
        return self._net is not None and self._net.is_forks

    @property
    def is_training(self) -> bool:
        """Whether ranks train on batches."""
        return self._phase in (Phase.TRAINING, Phase.IN_BATCH, Phase.JOINED)

    @property
    def has_ended(self) -> bool:
        """Whether this rank ends, alone or with all others."""
        return self._phase in ENDS

    def check_process(self) -> None:
        """Raises `TransportError` in a process that was forked from a rank."""
        if self._net is not None:
            self._net.check_process()

    def check_peers(self) -> None:
        """Raises `PeerLost` if a rank is known to be lost."""
        if self._net is not None:
            self.ranks.check_peers()

    def blaming(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Runs another library's collective; raises `PeerLost` if it failed for a lost rank."""
        return contextlib.nullcontext() if self._net is None else self._net.blaming(what)

    # ---- training ----

    def begin_training(self) -> None:
        """Notes, once, that ranks train on batches from now on."""
        if self.training is not None and self._phase in (Phase.READY, Phase.JOINED):
            self.ranks.begin()
            self.begin_to_count()
            if self.takes_part:
                self.enter(Phase.TRAINING)

    def begin_to_count(self) -> None:
        """Begins to count who is late, where all ranks are."""
        opened(self._lateness).begin()

    def begin_batch(self, batch: Any = None) -> None:
        """Begins a batch; stops here, at the same batch on all ranks, if one was told to stop."""
        if self.samples is not None:
            self.samples.begin(batch)
        training = self.training
        if training is None:  # Fabric's begins with its first step
            self.net.check()
            return
        if self._phase is Phase.READY:
            self.begin_training()
        self.ranks.before_batch()
        self.ranks.step(lambda: self._begin_batch(training), again=True)

    def _begin_batch(self, training: TrainingT) -> None:
        if self._phase is Phase.IN_BATCH:
            return  # another rank of this replica has not begun, and makes the step again
        self.net.check()
        if not training.agreed.begin_batch():
            self.meet(STOP)
        self.enter(Phase.IN_BATCH)

    def end_batch(self) -> None:
        """Notes that this batch is over."""
        self.check_process()
        if self.training is not None and self.training.claiming is not None:
            self.training.claiming.end_batch()
        if self._phase is Phase.IN_BATCH:
            self.enter(Phase.TRAINING)

    def count(self, num_samples: int) -> None:
        """Takes this for the number of samples of the batch, before its backward pass."""
        if self.samples is None:
            raise RuntimeError(
                'samples count with weigh_by="samples", got weigh_by="ranks"; set the option, or '
                "leave the call out"
            )
        self.samples.count(num_samples)

    def request_stop(self, signum: int) -> None:
        """Has all ranks stop after the same batch; called in a signal handler."""
        if self.training is not None:
            self.training.agreed.request(signum)

    def before_update(self, optimizer: Optimizer) -> None:
        """Hands the gradients, which are ready, to the replica."""
        if self._phase is Phase.READY:
            self.begin_training()
        self.check_process()
        if self.samples is not None:
            self.samples.before_update(optimizer)
        if self.training is not None:
            replica = self.training.replica
            self.ranks.step(lambda: replica.before_update(optimizer), again=True)

    def after_update(self, optimizer: Optimizer) -> None:
        """Tells the replica that the optimizer has stepped."""
        if self.training is not None and self._lateness is not None:
            replica = self.training.replica
            self.ranks.step(lambda: replica.after_update(optimizer), again=False)
            self._lateness.num_steps += 1
        if self.samples is not None:
            self.samples.after_update(optimizer)

    def follow(self) -> None:
        """Follows the others, on a rank without a batch, if they train other parameters."""
        if self.training is not None:
            self.ranks.step(self.training.replica.follow, again=True)

    def show_consensus(self) -> None:
        """Puts the consensus into the model, on all ranks."""
        training = self.training
        if training is not None:
            self.ranks.show(lambda: self._show_consensus(training))
            self.consensus_distance = training.replica.consensus_distance

    def _show_consensus(self, training: TrainingT) -> None:
        self.meet()
        training.replica.show_consensus()

    def show_own(self) -> None:
        """Puts this rank's own weights back."""
        if self.training is not None:
            self.training.replica.show_own()

    def end_training(self) -> None:
        """Leaves the consensus in the model, once all ranks are here."""
        training = self.training
        if training is not None and self._phase is not Phase.BROKEN:
            self.ranks.end_training(lambda: self._end_training(training))

    def _end_training(self, training: TrainingT) -> None:
        agreed = training.agreed
        self.meet(END_TRAINING if agreed.stopping is Stopping.NOT_ASKED else STOP)
        self.enter(Phase.TRAINED)
        if agreed.requested in END_SIGNALS:  # since: the others may know, or may not
            self.ranks.stop()
            self.end_by(agreed.requested, f"rank {self.rank} received")
        training.replica.finish(self.clip)

    def end_alike(self) -> None:
        """Makes the model the same on all ranks, where it was changed after training had ended."""
        training = self.training
        if training is not None and self._phase is Phase.TRAINED:
            self.ranks.together(lambda: self._end_alike(training))

    def _end_alike(self, training: TrainingT) -> None:
        self.meet()
        training.replica.end_alike()

    # ---- meeting the others ----

    def meet(self, what: int = OTHER) -> bool:
        """Serves ranks that still train until all are here; all stop here if one of them has to.

        A rank that is out of data waits at the end of its epoch, and never comes to the batch at
        which the others stop.

        Args:
            what: what this rank is here for, as `meeting` names it

        Returns:
            Whether all are here for the same purpose.

        Raises:
            ValueError: on every rank, where ranks have come for what they cannot do together
        """
        self.check_process()
        training = self.training
        if training is None or self._phase in (Phase.IN_BATCH, Phase.STOPPING):
            return False
        return self.ranks.together(lambda: self._meet(what, training), apart=True)

    def _meet(self, what: int, training: TrainingT) -> bool:
        lateness, meetings = opened(self._lateness), self.meetings
        for part in training.replica.parts:  # what the host has queued counts as not made yet
            await_step(self.net, part.x)
        mine = lateness.figures()
        while True:
            agreed = training.agreed
            if agreed.stopping is Stopping.MISSED:
                self._stop_here(training)
            training.replica.settle()
            told = torch.zeros(NUM_PURPOSES + meetings.world_size * NUM_FIGURES, dtype=torch.int64)
            votes, figures = told[:NUM_PURPOSES], told[NUM_PURPOSES:]
            votes[what] = 1
            figures.view(-1, NUM_FIGURES)[meetings.rank] = mine
            meetings.all_reduce(told).wait()
            if votes[STOP]:
                self._stop_here(training)
            agreed.forget([p for p in AFTER_BATCH if votes[p] and p != what])
            are_all_here = int(votes[what]) == self.world_size
            are_between_batches = not votes[[*AFTER_BATCH]].any()
            if are_between_batches:
                late = lateness.end(
                    figures,
                    self.ranks.members,
                    training.algorithm,
                    claims=training.claiming is not None,
                    may_claim=self.reads_indices and not self.sharding.in_rows,
                )
                if late and self.ranks.is_first:
                    _log.warning(late)  # a Python warning could end what some ranks do
            are_all_here = self._agree(what, votes, are_all_here=are_all_here)
            if are_all_here or what in AFTER_BATCH:
                return are_all_here
            if are_between_batches:
                check_together(meetings, what, votes)
                return False
            # others go on with their batches: serves them until they are here as well

    def _stop_here(self, training: TrainingT) -> NoReturn:
        agreed = training.agreed
        agreed.await_stop()
        self.stop()
        where = f"rank {self.rank} after {agreed.num_begun} batches"
        begin, end = f"rank {agreed.origin} received", f"; all ranks stopped, {where}"
        self.end_by(agreed.signum, begin, end)

    def stop(self) -> None:
        """Notes that all ranks stop here."""
        self.enter(Phase.STOPPING)
        self.quiet_observer()
        self.ranks.stop()

    def barrier(self) -> None:
        """Waits for all ranks, if they can be met."""
        if self.can_meet:
            self.ranks.together(self._barrier)

    def _barrier(self) -> None:
        self.meet()
        self.meetings.barrier().wait()

    def reduce(self, tensor: Tensor, *, is_mean: bool) -> Tensor:
        """Returns the sum over all ranks, or the mean, once all are here."""
        return self.ranks.together(lambda: self._reduce(tensor, is_mean=is_mean), apart=tensor)

    def _reduce(self, tensor: Tensor, *, is_mean: bool) -> Tensor:
        self.meet(REDUCE)
        total = (tensor.float() if is_mean and not tensor.is_floating_point() else tensor).clone()
        flat = total.reshape(-1).contiguous()
        self.meetings.all_reduce(flat).wait()
        return (flat / self.world_size if is_mean else flat).view(total.shape)

    def texts(self, text: str) -> list[str]:
        """Returns the texts of all ranks."""
        return self.ranks.together(lambda: self._texts(text), apart=[text])

    def _texts(self, text: str) -> list[str]:
        self.meet()
        return everyones(self.meetings, text)

    def text_of_rank_0(self, text: str) -> str:
        """Returns rank 0's text on all ranks."""
        return str(json.loads(self.texts(json.dumps(text))[0])) if self.can_meet else text

    # ---- the end ----

    def leave(self) -> None:
        """Ends the threads beside the training, once all ranks are here or one is lost."""
        if self.is_training:
            self.enter(Phase.TRAINED)
        try:
            if self._net is not None and self.can_meet and self.takes_part:
                self.ranks.leave()
            self._stop_lanes()
        except BaseException as exception:
            self.fail(exception)
            raise
        finally:
            try:
                self._close()
            finally:
                self.signals.give_back()

    def depart(self) -> None:
        """Ends the part of a rank that has left: the others go on, and wait for nothing of it."""
        self.enter(Phase.LEFT)
        self.quiet_observer()
        self._stop_lanes()
        self._close()

    def _stop_lanes(self) -> None:
        """Ends the threads beside the training, which fail with this rank."""
        for stop in self.training.stop_lanes() if self.training is not None else ():
            try:
                stop()
            except Exception as error:
                if self._phase is not Phase.BROKEN and not self.ranks.forgives(error):
                    raise

    def _close(self) -> None:
        net, self.training = self._net, None
        self._net = self._meetings = None
        self.enter(Phase.OVER)
        if net is not None:
            net.close()
        self._last_resort.cancel()

    def fail(self, exception: BaseException) -> str:
        """Ends this rank's part; tells the others unless all stop; returns what became of it."""
        if self.is_fork:
            end_fork(exception)
        self.ranks.fail(exception)
        before, reason = self._phase, reason_of(exception, self.rank)
        if not self.has_ended:
            self._fail(exception, reason)
        self.ranks.failed(reason, before)
        return reason

    def _fail(self, exception: BaseException, reason: str) -> None:
        was_training = self.is_training
        self.enter(Phase.BROKEN)
        if isinstance(exception, PeerLost):
            say(f"[rank {self.rank}] training ends: {exception}")
        self.quiet_observer()
        net, training = self._net, self.training
        if net is not None:
            if not was_training and not isinstance(exception, PeerLost) and all_fail(net):
                net.close()
            else:
                net.fail(reason)
        if training is not None:
            with contextlib.suppress(Exception):  # lanes fail with the network
                training.replica.stop()
