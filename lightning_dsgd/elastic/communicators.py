"""Communicators that are aborted and made anew where the members of a training change.

Where the user asks for it (`Opening.makes_sums`), the members of a view have a communicator of a
library such as NCCL.  It makes their sums and broadcasts; all else travels through the host's
memory, as everything does by default.

    the members change    every member: its starter ends, and aborts the communicator (`native`)
    the next view         every member, once newcomers have told their options: `renew`
    its first member      opens a store of the view's own
    all                   tell each other what library they have, and where the store is
    all                   connect there as the ranks that they have in the view, each in a thread
    all                   tell each other whether that went well

Where libraries differ, or it did not go well, this view's sums are messages.

**Who decides.**  The agreement on views: a view says who makes a communicator with whom, and every
member that enters it does.  A communicator serves one view, so no collective of an old view meets
one of a new view.

**Why nobody waits for ever.**

- A collective is begun once all its members have asked for it (`tickets`).  Whoever waits for its
  end asks the mesh again and again: a lost rank ends that wait, whatever the library does.
- All ranks say before they train what makes their sums (`sums_in_words`); so does a newcomer,
  before the members make a communicator with it.  Who differs ends with an error.
- Where the library fails first, as a dead rank's connection has ended, the rank waits until it
  hears of the loss, for `heartbeat_timeout_s`.  Without a loss it fails as with any error.
- A second loss, while the communicator is made, ends the wait for the thread that connects, and
  aborts what it makes.  The next view is entered; the thread may be left behind.
- Where a view follows, or a rank is lost, a communicator is aborted, as others may not answer any
  more; it is shut down where training ends.
- A communicator that cannot be aborted is left behind, as gloo's where a rank is silent, or one
  with a starter in it.  So a sum of the host's memory is made in a copy: what is left behind writes
  to nothing that is read.

**What is under way** when the members change is lost, as messages are: `Calls` makes it again.  A
sum on a device may have torn x, which the replica puts back.

**Threads.**  `renew` and `close` belong to the training thread, the rest is as in `native`.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor

from lightning_dsgd.agreement import everyones
from lightning_dsgd.devices import COLLECTIVES, is_on_host, library_for, until
from lightning_dsgd.elastic.survival import Survival
from lightning_dsgd.session.ending import say
from lightning_dsgd.transport import Counters, PeerLost, Timeout, TransportError
from lightning_dsgd.transport.collectives import Call
from lightning_dsgd.transport.contract import Work, failed
from lightning_dsgd.transport.endpoint import Endpoint
from lightning_dsgd.transport.mesh import CLOSE_TIMEOUT_S
from lightning_dsgd.transport.native import LEFT_TO_US, Native, abort, environment
from lightning_dsgd.transport.process_group import ProcessGroupTransport
from lightning_dsgd.transport.processes import ProcessTransport
from lightning_dsgd.transport.tickets import ALL, Key, Tickets
from lightning_dsgd.transport.view import View

_KINDS: Final = {"nccl": "ProcessGroupNCCL", "xccl": "ProcessGroupXCCL", "gloo": "ProcessGroupGloo"}
_CONNECT_WITHIN_S: Final = 60.0
_ABORTED_WITHIN_S: Final = 1.0
_left_behind: Final[list[Any]] = []
"""Communicators with a sum that nothing ends: to drop one would wait for it."""


class SurvivingTransport(ProcessGroupTransport):
    """A process's end of a network that goes on after a loss: sums by its view's communicator."""

    makes_sums: bool = True
    """Whether the members of a view make a communicator; a newcomer may be told not to."""

    @property
    def library(self) -> str:
        """What torch calls the library that makes the sums of a view; empty: messages do."""
        return COLLECTIVES.get(self.mesh.port.device.type, "") if self.makes_sums else ""

    def engines(self) -> str:
        """Says in one line what carries messages and what makes sums, once ranks train."""
        if not self.library:
            return super().engines()
        return (
            f"Messages travel over {self.wire.engine}; {library_for(self.mesh.port.device)} makes "
            "the sums of all ranks, by a communicator that is made anew where their members change."
        )

    @contextlib.contextmanager
    def blaming(self, what: str) -> Iterator[None]:
        """Has `_Sum` ask once who is lost: ranks with communicators hold no replica together."""
        yield

    def natively(self, call: Call, x: Tensor, *more: Any) -> Work[Any] | None:
        """Begins a sum or a broadcast of all members of the newest view."""
        sums, is_ours = _sums_of(self), call.kind in ("all_reduce", "broadcast")
        if sums is None or not is_ours or not sums.can_take(x, call.members):
            return None
        self.check()
        return sums.begin_in_view(self, x, call, *more)

    def close(self) -> None:
        """Ends the communicator, and then the network."""
        sums = _sums_of(self)
        if sums is not None and not self.is_forks:
            sums.close(view_follows=False)
        super().close()


def _sums_of(net: ProcessTransport) -> Sums | None:
    policy = net.mesh.policy
    return policy.sums if isinstance(policy, Survival) else None


def sums_in_words(net: Endpoint) -> str:
    """Says what makes the sums of a view, as a text that must be equal on all ranks."""
    library = net.library if isinstance(net, SurvivingTransport) else ""
    return f"sums by {library or 'messages'}"


def renew(view: View, net: SurvivingTransport) -> None:
    """Has the members of a view make a communicator, in the place of that of the view before.

    All members call it.  Does nothing where they make none, or where this rank has one for this
    view.

    Args:
        view: the newest view
        net: the network of all ranks

    Raises:
        PeerLost: if the members change meanwhile; then it is called for the next view
    """
    policy = net.views
    assert isinstance(policy, Survival)
    old: Sums | None = policy.sums
    if not net.makes_sums or (old is not None and old.number == view.number):
        return
    policy.sums = None
    if old is not None:
        old.close(view_follows=True)
    if view.world_size == 1:
        return
    made, why_not = _made(view, net)
    if not why_not:
        policy.sums = Sums(net, view, made)
    elif view.rank == 0:
        say(f"view {view.number}: sums are made of messages, as {why_not}")


def _made(view: View, net: SurvivingTransport) -> tuple[list[Any], str]:
    """Makes this rank's end of a communicator, and its store; or says why all have none."""
    limit_s, library = _limit_s(net), net.library
    own, host, number, why = None, "", 0, ""
    if view.rank == 0:
        try:
            own = _store(net.mesh.connections.own()[0], 0, limit_s, serves=True)
            host, number = own.host, own.port
        except Exception as err:  # all go on without a communicator
            why = f"has no store: {failed(err)}"
    texts = everyones(view.sub("stores"), json.dumps([library, host, number, why]))
    told = [json.loads(text) for text in texts]
    libraries = [library for library, *_ in told]
    if not all(libraries) or len({*libraries}) > 1:
        each = zip(view.members, libraries, strict=True)
        return [], ", ".join(f"rank {rank} has {name or 'no library'}" for rank, name in each)
    _, host, number, why = told[0]
    if why:
        return [], f"rank {view.members[0]} {why}"
    begun: list[Any] = []
    try:
        made, why = _connected(view, net, begun, lambda: own or _store(host, number, limit_s))
        whys = everyones(view.sub("made"), why)
    except BaseException:
        abort(begun, net.mesh.port)
        raise
    failures = [f"rank {rank} {why}" for rank, why in zip(view.members, whys, strict=True) if why]
    if failures:
        abort(begun, net.mesh.port)
    return made, ", ".join(failures)


def _connected(
    view: View, net: SurvivingTransport, begun: list[Any], store_of: Callable[[], Any]
) -> tuple[list[Any], str]:
    """Makes a communicator and has it connect; returns it and its store, or why that failed.

    Args:
        view: its members
        net: the network of all ranks
        begun: is given the communicator before that connects
        store_of: makes the store
    """
    port, name = net.mesh.port, net.library
    limit_s = _limit_s(net)
    later = timedelta(seconds=2 * net.timeout_s)  # our own limit ends waits before it
    made: list[Any] = []
    why_not: list[str] = []

    def connect() -> None:
        try:
            port.enter()
            store, kind = store_of(), getattr(dist, _KINDS[name])
            given: Any = timedelta(seconds=limit_s)
            if name != "gloo":
                given = kind.Options()
                given._timeout = later  # noqa: SLF001
            with environment(LEFT_TO_US):
                group = kind(store, view.rank, view.world_size, given)
            begun.append(group)
            if name == "gloo":  # which has connected
                group._set_default_timeout(later)  # noqa: SLF001
            else:
                group.eager_connect_single_device(port.device)
            made.extend([group, store])
        except Exception as err:
            why_not.append(failed(err))

    thread = threading.Thread(target=connect, name="dsgd-communicator", daemon=True)
    thread.start()
    until(lambda: not thread.is_alive(), limit_s, view.check)
    if made:
        return made, ""
    return [], why_not[0] if why_not else f"has not connected within {limit_s:g} s"


def _limit_s(net: SurvivingTransport) -> float:
    """Returns how long to connect, while a rank that has failed waits to say so."""
    return min(net.timeout_s / 2, _CONNECT_WITHIN_S)


def _store(host: str, port: int, limit_s: float, *, serves: bool = False) -> Any:
    limit = timedelta(seconds=limit_s)
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, None, is_master=serves, timeout=limit, wait_for_workers=False
    )


class Sums(Native):
    """One rank's end of the sums of one view; all its members make it together.

    Args:
        net: the network of all ranks
        view: the view
        made: the communicator, and its store
    """

    def __init__(self, net: ProcessTransport, view: View, made: Sequence[Any]) -> None:
        self.number = view.number
        self._net, self._port = net, net.mesh.port
        self.engine = library_for(self._port.device)
        self._groups, self._store = [made[0]], made[1]
        self._numbers = {tuple(view.members): ALL}
        self._asked, self._under_way, self._is_aborted = {}, [], False
        control = net.sub("native")
        control.counters = Counters()  # tickets are news, which nobody counts
        self._tickets = Tickets(View(control, view.members, view.number), self)

    def begin_in_view(
        self, net: ProcessTransport, x: Tensor, call: Call, place: int | None = None
    ) -> Work[Tensor]:
        """Begins a sum, or a broadcast, as `Native.begin` does."""
        y = x.clone() if is_on_host(x) else x
        return _Sum(net, self.begin(net, y, call, place), x)

    def close(self, *, view_follows: bool) -> None:  # type: ignore[override]
        """Ends the starter and the communicator.

        Args:
            view_follows: whether others may have gone on, and so not answer any more
        """
        with contextlib.suppress(Exception):  # of which all ranks know
            try:
                self._tickets.stop(CLOSE_TIMEOUT_S)
            except Timeout:  # it may be inside the library, where no other thread may come
                _left_behind.append(self._groups)
                return

        def has_passed() -> bool:
            return all(work.has_passed() for work in self._under_way)

        has_failed = self._net.mesh.mailboxes.failure is not None
        if view_follows or has_failed or not has_passed():
            self.abandon()
        else:
            with contextlib.suppress(Exception):
                self._groups[ALL].shutdown()
        if not until(has_passed, _ABORTED_WITHIN_S, lambda: None):
            _left_behind.append(self._groups)
        # The starter's tickets know this object, and so it stays until Python looks for cycles.
        self._groups, self._store, self._under_way = [], None, []

    # ---- the starter ----

    def launch(self, key: Key, lengths: Mapping[int, int]) -> None:
        """Begins a sum whose ticket has come."""
        self._under_way = [work for work in self._under_way if not work.has_passed()]
        work = self._asked.pop(key)
        try:
            work.launch(self._groups[ALL], self._port, lengths)
            self._under_way.append(work)
        except Exception as err:  # a member may be lost: its thread waits to hear of that
            work.release(TransportError(f"{work.describe()} {failed(err)}"))

    def abandon(self, failure: Exception | None = None) -> None:
        """Aborts the communicator; where the view is over, no failure in it ends this rank."""
        is_over = _sums_of(self._net) is not self
        super().abandon(None if is_over else failure)


class _Sum:
    """A sum or broadcast of a view, as its caller sees it.

    Args:
        net: the endpoint on which it was called
        work: makes it in x, or in a copy of x
        x: will hold the result
    """

    def __init__(self, net: ProcessTransport, work: Work[Tensor], x: Tensor) -> None:
        self._net, self._work, self._x = net, work, x
        self._is_taken = False

    def wait(self, timeout_s: float | None = None) -> Tensor:
        """Waits for the result; raises `PeerLost` where the library fails as a rank is lost."""
        if self._is_taken:
            return self._x
        try:
            y = self._work.wait(timeout_s)
        except (PeerLost, Timeout):
            raise
        except RuntimeError:
            mesh = self._net.mesh
            is_lost = lambda: mesh.mailboxes.failure is not None  # noqa: E731
            until(is_lost, mesh.heartbeat_timeout_s, self._net.check_process)
            mesh.check("a sum that has failed")
            raise
        self._is_taken = True
        if y is not self._x:
            self._x.copy_(y)
        return self._x

    def done(self) -> bool:
        """Returns whether `wait` would return at once."""
        return self._work.done()
