"""Claims over a network: a rank's end of their dealing (`data.dealing`).

training thread   claims, begins, ends
lane              hears and sends all messages of `claims`; deals, on the first member
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lightning_dsgd.data.claims.claims import Claims, Epoch, Report
from lightning_dsgd.data.dealing import Dealing, Words
from lightning_dsgd.transport import Transport


class ClaimDealing(Dealing):
    """One rank's end of the claims, in one view.

    Args:
        net: the network, with channels of its own
        claims: the machine to go on with; None: none has been used yet
    """

    _name = "claims"
    _awaited = "member to deal it a batch"

    def __init__(self, net: Transport, claims: Claims | None = None) -> None:
        super().__init__()
        self._claims = claims or Claims(net.rank, net.world_size)
        if claims is not None:  # tells all members what this one has, and goes on among them
            claims.change_view(net.rank, _reports(net, claims.report()))
        self._open(net)

    def in_view(self, net: Transport) -> ClaimDealing:
        """Returns this rank's end among the members of another view, all of which call it."""
        self._stop()
        return ClaimDealing(net, self._claims)

    # ---- the training thread ----

    @property
    def num_begun(self) -> int:
        """How many positions of its order lie behind this rank."""
        return self._claims.num_begun

    def portion(self, position: int) -> int:
        """Returns the portion that was claimed at this position; NONE where it was given back."""
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
        """Claims portions until there is one at this position; returns whether there is.

        Args:
            position: the number of the portion among all that this rank has claimed in this epoch
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
            self._wait(lambda: not claims.is_asking)
            if claims.refused is not None:
                self._check_alike(claims.epoch)

    def begin(self, position: int) -> bool:
        """Begins a portion, unless it was given back; claims another where this was the last."""
        with self._lock:
            has_begun = self._claims.begin(position)
            if has_begun and position + 1 == len(self._claims.order):
                self._claims.ask(is_urgent=False)
        self._wake()
        return has_begun

    def end(self) -> None:
        """Notes that the portion that was begun is trained on, and tells others."""
        with self._lock:
            self._claims.end()
        self._wake()

    def num_free(self) -> int:
        """Returns how many portions nobody has, on the dealer; 0 on the others."""
        with self._lock:
            return self._claims.num_free

    def report(self) -> Report:
        """Returns what this rank has, and what it knows to be trained on."""
        with self._lock:
            return self._claims.report()

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

    # ---- the lane ----

    def _hear(self, sender: int, words: Words) -> None:
        with self._lock:
            self._claims.hear(sender, words)

    def _outgoing(self) -> list[tuple[int, Words]]:
        outgoing, self._claims.outbox = self._claims.outbox, []
        return outgoing


def _in_words(epoch: Epoch) -> str:
    return f"epoch {epoch.number} of {epoch.num_portions} with the checksum {epoch.checksum}"


def _reports(net: Transport, own: Report) -> list[Report]:
    """Returns what each member tells, this one included."""
    gathered = net.all_gather(torch.tensor(_packed(own))).wait()
    return [_unpacked(theirs.tolist()) for theirs in gathered]


def _packed(report: Report) -> list[int]:
    parts = report.trained, report.begun, report.ahead
    return [*report.epoch, *map(len, parts), *(portion for part in parts for portion in part)]


def _unpacked(words: list[int]) -> Report:
    epoch, (num_trained, num_begun, _), portions = Epoch(*words[:3]), words[3:6], words[6:]
    rest = portions[num_trained:]
    return Report(epoch, portions[:num_trained], rest[:num_begun], rest[num_begun:])
