"""Calls that end although a rank is lost: in the next view, with the same result everywhere.

All that one rank calls goes through `Calls`: a loss in it changes the view, and the call goes on.

**Calls of all ranks** (`Calls.together`): a settling, a barrier, a mean of metrics, a checkpoint.
All ranks make the same calls in the same order, and no rank completes a call before all have begun
it.  So when a view changes, the numbers of calls that ranks have completed differ by one at most.
The members of the new view tell each other how many calls they have completed, and the result of
the last one.  A rank that has completed one call less takes that result over (`adopt`); if no
member has completed the call, all ranks that were in it make it again, from its beginning.

**Steps** (`Calls.step`): a rank makes them by itself, and the other ranks may be anywhere.  A step
that is made again meets the next step of the ranks that had completed it.

Why no rank waits for a rank that is in another call: after a change no rank is ahead of another by
a call that the other has yet to make, and algorithms begin anew.

A rank that is lost during the change itself makes it begin again, with the view after that.

**Where several ranks hold a replica together** they wait for each other in collectives of their own
too, which the loss of a rank of another replica does not end.  So while one of them changes the
view, no other may be in such a collective and wait for it.  All ranks of a replica make the same
calls and steps in the same order.  At the end of each they ask each other, in a collective of their
own as well, whether any of them has met a loss (`Row`).  If so, all change the view there: who was
through asks for a next view (`ChangingViews.renew`), and a step is made again by all of them, or by
none.  A change is over for a replica once all of its ranks have begun anew in the same view.  They
ask each other that for each number of a view in turn, also for those that a rank has skipped.

- A rank that waits for another of its replica, in a collective of theirs or in such a question,
  waits for one that comes there: between two questions a rank that meets a loss waits for nobody.
- A rank that waits for one of another replica waits in a view: a loss ends that.
- Where this rank has lost one of its replica, no view holds it any more; the collective fails, as
  the lost rank's connections end, or else this process ends itself (`Survival`).  A loss of which
  others have told alone may be no loss: the view that follows may hold that rank, which asks.

**Newcomers** are let in where all members are in the same call (`admit`), and take over the number
of calls and the last result.  As no member comes back from a change before all have begun its last
exchange, none goes on before each newcomer has what it needs.  Where they are to hold a replica
together, they ask each other from the first view on, as all such ranks do.

**Threads.**  The training thread's.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_dsgd.agreement import everyones
from lightning_dsgd.devices import is_on_host
from lightning_dsgd.elastic.rows import Row
from lightning_dsgd.elastic.views import JOINS, LEAVES, views_of
from lightning_dsgd.transport import PeerLost
from lightning_dsgd.transport.endpoint import Endpoint
from lightning_dsgd.transport.view import View

T = TypeVar("T")


class Alone:
    """Answers where this rank holds all of its replica."""

    def has_lost(self, lost: PeerLost | None) -> bool:
        """Returns whether this rank has met a loss."""
        return lost is not None

    def meet(self) -> None:
        """Waits for nobody."""


class Calls:
    """Makes one rank's calls, in whatever view the rank is.

    Attributes:
        view: the newest view that this rank has entered
        lost: the loss behind the last change of the view, as far as this rank knows
        changing_since: when this rank learnt of that loss
        net: the network of all ranks

    Args:
        net: the network of all ranks, which goes on after a loss
        change: begins anew in a view; all its members call it
        is_newcomer: whether this rank is in no view yet; then `join` comes first
        device: this rank's, for what a call has returned on devices
    """

    def __init__(
        self,
        net: Endpoint,
        change: Callable[[View], None],
        *,
        is_newcomer: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self._device = device
        self.view = View(net, (net.rank,) if is_newcomer else range(net.world_size), 0)
        self.net = net
        self._change = change
        self.lost: PeerLost | None = None
        self.changing_since = 0.0
        self._num_done = -1 if is_newcomer else 0
        self._result: Any = None
        self._is_within = False
        self._row: Row = Alone()

    def hold_together(self, row: Row) -> None:
        """Has all ranks of this replica change views together from now on; all of them call it."""
        self._row = row

    def together(self, call: Callable[[], T], adopt: Callable[[], None] | None = None) -> T:
        """Returns what `call` returns, which all ranks call: None, a number, text, or tensors.

        Args:
            call: may be made again, from its beginning
            adopt: does what `call` does to this rank, where others have come back from it and all
                hold the consensus; called in its place
        """
        if self._is_within:
            return call()
        while True:
            num_done = self._num_done
            lost = self._try(call)
            is_done = self._num_done > num_done
            if lost is not None:
                has_taken_over = self.change_view(lost)
                if not (is_done or has_taken_over):
                    continue
                if not is_done and adopt is not None:
                    adopt()
            result: T = self._result
            return result

    def _try(self, call: Callable[[], Any]) -> PeerLost | None:
        """Makes a call of all ranks; returns the loss for which the view is to change, if any."""
        result, lost = self._made(call)
        if lost is None:
            self._result = result
            self._num_done += 1
        return self._lost_to_any(lost)

    def _made(self, call: Callable[[], T]) -> tuple[T | None, PeerLost | None]:
        """Returns a call's result, and the loss with which the call ended, if any."""
        self._is_within = True
        try:
            return call(), None
        except PeerLost as failure:
            return None, failure
        finally:
            self._is_within = False

    def _lost_to_any(self, lost: PeerLost | None) -> PeerLost | None:
        """Returns the loss for which all ranks of this replica change the view now, or None."""
        if not self._has_lost(lost):
            return None
        if lost is None:
            views_of(self.net).renew()
            lost = PeerLost(self.net.rank, "goes on with those that hold its replica with it")
        return lost

    def _has_lost(self, lost: PeerLost | None) -> bool:
        """Returns whether any rank of this replica has met a loss; they ask each other.

        A rank that no view holds asks no other: one of the others may never answer then.  A loss of
        which another rank alone has told is not known before the next view.
        """
        return (lost is not None and views_of(self.net).is_outside) or self._row.has_lost(lost)

    def once(self, call: Callable[[], T]) -> T | None:
        """Makes a call as `together` does; a change of the view ends it, and all ranks get None."""
        result, lost = self._made(call)
        lost = self._lost_to_any(lost)
        if lost is None:
            return result
        self.change_view(lost)
        return None

    def leave(self) -> None:
        """Makes the last call; no rank comes back from it before all have begun it.

        A rank that has come back has left, so a rank that meets its loss then may leave as well.
        No collective of this replica follows, so its ranks need not change views together.
        """
        self._row = Alone()
        with contextlib.suppress(PeerLost):
            self.together(lambda: self.view.sub("leaving").barrier().wait())

    def join(self) -> None:
        """Waits to be let in, and begins in the first view that has this rank as a member.

        Raises:
            PeerLost: if no member lets this rank in
        """
        self.change_view(PeerLost(self.net.rank, JOINS))

    def admit(self, newcomers: Sequence[int]) -> None:
        """Goes on in a view with these newcomers; all members call it, with the same newcomers.

        The ranks of a replica ask each other: one of them alone may know that all newcomers are
        lost, and that there is no such view.
        """
        if {*newcomers} <= {*self.view.members}:
            return
        is_admitted = views_of(self.net).admit(newcomers)
        lost = self._lost_to_any(PeerLost(newcomers[0], JOINS) if is_admitted else None)
        if lost is not None:
            self.change_view(lost)

    def dismiss(self, leavers: Sequence[int]) -> None:
        """Goes on in a view without these ranks; all members call it, with the same ranks.

        Raises:
            PeerLost: on the ranks that leave
        """
        if {*leavers} & {*self.view.members} and views_of(self.net).dismiss(leavers):
            self.change_view(PeerLost(leavers[0], LEAVES))

    def step(self, call: Callable[[], None], *, again: bool) -> None:
        """Makes a step of this rank alone.

        Args:
            call: makes the step
            again: whether it is made again after a change of the view, by all ranks of a replica
        """
        while True:
            lost = None
            try:
                call()
            except PeerLost as failure:
                lost = failure
            lost = self._lost_to_any(lost)
            if lost is None:
                return
            self.change_view(lost)
            if not again:
                return

    def change_view(self, lost: PeerLost) -> bool:
        """Goes on in the next view; returns whether others have done a call that this rank has not.

        Raises:
            PeerLost: where this rank cannot go on
        """
        num_done = self._num_done
        self.changing_since = time.monotonic()
        while True:
            self.lost = lost
            number, members = self.net.views.next_view(lost)
            for _ in range(self.view.number + 1, number):
                self._has_lost(lost)  # others of this replica may have entered that view
            self.view = View(self.net, members, number)
            another = self._lost_to_any(self._begin_in_view())
            if another is None:
                return self._num_done > num_done
            lost = another

    def _begin_in_view(self) -> PeerLost | None:
        """Begins anew in the view; returns the loss that has kept this rank from it, if any."""
        try:
            self._change(self.view)
            self._take_over_result()
        except PeerLost as lost:
            return lost
        return None

    def _take_over_result(self) -> None:
        text = json.dumps([self._num_done, _encoded(self._result)])
        told = [json.loads(theirs) for theirs in everyones(self.view.sub("calls"), text)]
        num_done, result = max(told, key=lambda each: int(each[0]))
        if int(num_done) > self._num_done:
            self._num_done, self._result = int(num_done), _decoded(result, self._device)


def _encoded(value: Any) -> Any:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        flat, on_host = value.detach().cpu().reshape(-1), is_on_host(value)
        shape = list(value.shape)
        return {"dtype": dtype, "shape": shape, "values": flat.tolist(), "on_host": on_host}
    if isinstance(value, (list, tuple)):
        return [_encoded(each) for each in value]
    return {"value": value}


def _decoded(value: Any, device: torch.device | None) -> Any:
    """Returns what `_encoded` was given; tensors of a device on this rank's."""
    if isinstance(value, list):
        return [_decoded(each, device) for each in value]
    if "dtype" in value:
        x = torch.tensor(value["values"], dtype=getattr(torch, value["dtype"]))
        return x.view(value["shape"]).to("cpu" if value["on_host"] else device)
    return value["value"]
