"""Claims over a network: a lane answers them, the training thread waits for its own.

    training thread   claims, begins, waits
    lane              hears all messages of `claims`

Both hold `_lock` while they use the machine, and send once they have let go of it.

A training thread that must wait for an answer says so, and its lane then sends it a message.  So a
wait for a claim is a wait like any other: it is counted, it has a limit, and a lost rank ends it.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable
from typing import Final

import torch

from lightning_dsgd.data.claims.claims import Claims, Epoch, Report
from lightning_dsgd.transport import ANY, Timeout, Transport, TransportError

_WORDS: Final = torch.empty(0, dtype=torch.int64)


class Dealing:
    """One rank's end of the claims, in one view.

    Args:
        net: the network, with channels of its own
        claims: the machine to go on with; None: none has been used yet
    """

    def __init__(self, net: Transport, claims: Claims | None = None) -> None:
        self._net = net
        self._claims = claims or Claims(net.rank, net.world_size)
        self._lock = threading.Lock()
        self._is_awaited = False
        if claims is not None:
            self._take_part()
        self._lane = net.spawn_lane(self._serve, "claims")

    def in_view(self, net: Transport) -> Dealing:
        """Returns this rank's end among the members of another view, all of which call it."""
        with contextlib.suppress(TransportError):  # of which the lane has failed
            self._lane.stop()
        return Dealing(net, self._claims)

    def close(self) -> None:
        """Ends the lane."""
        self._lane.stop()

    # ---- the training thread ----

    @property
    def num_begun(self) -> int:
        """How many positions of its order lie behind this rank."""
        return self._claims.num_begun

    def unit(self, position: int) -> int:
        """Returns the unit that was claimed at this position; NONE where it was given back."""
        return self._claims.order[position]

    def begin_epoch(self, epoch: Epoch) -> None:
        """Begins an epoch; see `Claims.begin_epoch`."""
        with self._lock:
            self._claims.begin_epoch(epoch)
        self._check_alike(epoch)

    def resume(self, epoch: Epoch, trained: Iterable[int]) -> None:
        """Begins in the midst of an epoch; see `Claims.resume`."""
        with self._lock:
            self._claims.resume(epoch, trained)

    def secure(self, position: int, *, is_urgent: bool) -> bool:
        """Claims units until there is one at this position; returns whether there is.

        Args:
            position: the number of the unit among all that this rank has claimed in this epoch
            is_urgent: whether this rank has nothing else to do
        """
        claims, was_urgent = self._claims, False
        while True:
            with self._lock:
                if position < len(claims.order):
                    return True
                if not claims.is_asking:
                    if claims.is_dry and (was_urgent or not is_urgent):
                        return False
                    claims.ask(is_urgent=is_urgent)
                    was_urgent = is_urgent
                self._is_awaited = True
            self._send()
            self._await_answer()
            if claims.refused is not None:
                self._check_alike(claims.epoch)

    def begin(self, position: int) -> bool:
        """Begins a unit, unless it was given back; claims another where this was the last."""
        with self._lock:
            has_begun = self._claims.begin(position)
            if has_begun and position + 1 == len(self._claims.order):
                self._claims.ask(is_urgent=False)
        self._send()
        return has_begun

    def end(self) -> None:
        """Notes that the unit that was begun is trained on, and tells others."""
        with self._lock:
            self._claims.end()
        with contextlib.suppress(TransportError):  # the view changes: all members report then
            self._send()

    def num_free(self) -> int:
        """Returns how many units nobody has, on the dealer; 0 on the others."""
        with self._lock:
            return self._claims.num_free

    def report(self) -> Report:
        """Returns what this rank has, and what it knows to be trained on."""
        with self._lock:
            return self._claims.report()

    def _send(self) -> None:
        with self._lock:
            outbox, self._claims.outbox = self._claims.outbox, []
        for receiver, words in outbox:
            self._lane.net.send(torch.tensor(words), receiver)

    def _await_answer(self) -> None:
        try:
            self._net.recv(_WORDS, self._net.rank).wait()
        except Timeout as err:
            raise Timeout(
                f"rank {self._net.job_rank} has waited {self._net.timeout_s:g} s for the first "
                "member to deal it a batch"
            ) from err

    def _check_alike(self, epoch: Epoch) -> None:
        refused = self._claims.refused
        if refused is not None:
            raise ValueError(
                'with data="claimed" all ranks must have the same batches in the same order, got '
                f"{_in_words(epoch)} on rank {self._net.job_rank} and {_in_words(refused)} on the "
                "first member or in the checkpoint; give samplers that draw by a seed of their own "
                "the same seed on all ranks, and leave no epoch on some ranks alone"
            )

    # ---- where the view changes ----

    def share(self, net: Transport) -> None:
        """Tells all members what each knows to be trained on, before some leave; all call it."""
        reports = _reports(net, self.report())
        with self._lock:
            self._claims.learn(reports)

    def _take_part(self) -> None:
        """Tells all members what this one has, and goes on among them."""
        reports = _reports(self._net, self._claims.report())
        self._claims.change_view(self._net.rank, reports)

    # ---- the lane ----

    def _serve(self, net: Transport) -> None:
        while True:
            receipt = net.recv(_WORDS, ANY)
            words = receipt.wait(timeout_s=math.inf).tolist()
            with self._lock:
                claims = self._claims
                claims.hear(receipt.source, tuple(words))
                outbox, claims.outbox = claims.outbox, []
                wakes = self._is_awaited and not claims.is_asking
                self._is_awaited = self._is_awaited and not wakes
            for receiver, answer in outbox:
                net.send(torch.tensor(answer), receiver)
            if wakes:
                self._net.send(_WORDS, self._net.rank)


def _in_words(epoch: Epoch) -> str:
    return f"epoch {epoch.number} of {epoch.num_units} with the checksum {epoch.checksum}"


def _reports(net: Transport, own: Report) -> list[Report]:
    """Returns what each member tells, this one included."""
    gathered = net.all_gather(torch.tensor(_packed(own))).wait()
    return [_unpacked(theirs.tolist()) for theirs in gathered]


def _packed(report: Report) -> list[int]:
    parts = report.trained, report.begun, report.ahead
    return [*report.epoch, *map(len, parts), *(unit for part in parts for unit in part)]


def _unpacked(words: list[int]) -> Report:
    epoch, (num_trained, num_begun, _), units = Epoch(*words[:3]), words[3:6], words[6:]
    rest = units[num_trained:]
    return Report(epoch, units[:num_trained], rest[:num_begun], rest[num_begun:])
