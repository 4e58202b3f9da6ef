"""Sums and broadcasts by torch's own collectives, which must be called in one order: NCCL's.

    thread      all_reduce, broadcast: asks for a ticket, gives a `NativeCollective`
    starter     once all ranks have asked: calls torch's collective, on a stream of its own
    thread      wait: until that is called, then until the result is on the device

This module serves all ranks together; for groups and pairs see `native_groups` and `native_sends`.
All of these travel on communicators of all ranks: pairs on two, as their colour says, the rest on
the first.  `tickets` says in which order they are begun, one for both communicators, and why nobody
waits for ever.

**On a device.**  The ask is a message to the own rank, so the starter's stream waits for what has
made the argument.  A thread that waits for a result asks again and again whether it is there, as
for a message: the stream that trains never waits for a rank.  So a lost rank, `timeout_s` and the
end of a lane end the wait, and not torch's watchdog, which would end the process.

**Halves.**  Sums of bf16 travel as bf16, as with DDP: these are gradients, as weights are averaged
in fp32.  Sums of fp16 are made in fp32, as fp16 might not hold the sum of what all ranks have.

**After a loss.**  The starter aborts the communicators, which ends the kernels that wait for the
lost rank.  No thread can be inside NCCL then, as no other one calls it while collectives are under
way.  A starter that is itself held up there is left behind, and the communicators with it; the
waits of the other threads end all the same.

**Threads.**  `ask` is called by any thread, which puts the collective into `_asked`; the starter
takes it out.  All other fields are the starter's, whose methods are `launch`, `refuse` and
`abandon`; once it has ended they belong to the thread that closes the network.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dsgd.devices import PASSED, Port, backend_for, is_on_host, library_for, port_of
from lightning_dsgd.transport.collectives import Call, num_children
from lightning_dsgd.transport.contract import Timeout, TransportError, failed
from lightning_dsgd.transport.counters import Counters
from lightning_dsgd.transport.mailboxes import Expected
from lightning_dsgd.transport.mesh import CLOSE_TIMEOUT_S
from lightning_dsgd.transport.messages import CODES, DTYPES
from lightning_dsgd.transport.processes import ProcessTransport
from lightning_dsgd.transport.tickets import (
    ALL,
    EXCHANGE,
    GATHER,
    PUSH,
    SUM,
    SWAP,
    Form,
    Key,
    Members,
    Tickets,
)

TAKEN: Final = frozenset(
    {torch.float32, torch.float64, torch.bfloat16, torch.float16}
    | {torch.int64, torch.int32, torch.int8, torch.uint8}
)
"""The dtypes that NCCL and gloo can sum and broadcast."""
NUM_COLOURS: Final = 2
"""So many communicators are there."""
W = TypeVar("W", bound="NativeCollective")
_DONE_WITH: Final = {
    SUM: "to sum",
    EXCHANGE: "to exchange",
    GATHER: "to gather",
    SWAP: "to swap",
    PUSH: "to push",
}
LEFT_TO_US: Final = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "0"}
"""We end waits ourselves, and torch's calls return at once."""


def make_group(device: torch.device, timeout_s: float) -> Any:
    """Makes a process group of all ranks for these collectives; all ranks call this together.

    The communicator is made at once where the device is known, and not in the first sum.

    Args:
        device: the device that this rank computes on
        timeout_s: after which waits for a collective end; torch's own limit is longer
    """
    world = dist.group.WORLD
    assert world is not None
    is_known = device.type == "cpu" or world.bound_device_id is not None
    with environment(LEFT_TO_US):
        return dist.new_group(
            backend=backend_for(device),
            timeout=timedelta(seconds=2 * timeout_s),
            device_id=None if is_known else port_of(device).device,
        )


def destroy_group(group: Any) -> None:
    """Ends a group that nothing waits for; torch complains where another rank has ended it."""
    with contextlib.suppress(Exception):
        dist.destroy_process_group(group)


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Sets variables within the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Native:
    """One rank's end of the collectives by a process group; all ranks make it together.

    Args:
        net: the network over which the ranks agree on an order
        groups: groups of all ranks, from `make_group`, one for each colour
    """

    def __init__(self, net: ProcessTransport, groups: Sequence[Any]) -> None:
        self._net = net
        self._port = net.mesh.port
        self.engine = library_for(self._port.device)
        self._groups = groups
        self._second = self._port.new()  # what has the second colour waits for nothing of the first
        self._asked: dict[Key, NativeCollective] = {}
        self._under_way: list[NativeCollective] = []
        self._is_aborted = False
        control = net.sub("native")
        control.counters = Counters()  # tickets are news, which nobody counts
        self._tickets = Tickets(control, self)

    # ---- any thread ----

    def can_take(self, x: Tensor) -> bool:
        """Returns whether torch's calls can move this tensor."""
        return x.dtype in TAKEN and x.device == self._port.device

    def ask(self, work: W) -> W:
        """Has a collective begun once all its members have asked; counts what this rank sends."""
        net, x = work.net, work.x
        net.counters.count(self.engine, work.bytes_sent, work.messages_sent)
        work.tickets = self._tickets
        self._asked[work.ticket] = work
        net.mesh.mailboxes.collect(work)
        self._tickets.ask(work.ticket, work.root, CODES[x.dtype], len(x))
        return work

    def close(self) -> None:
        """Ends the starter and the group; after a loss, collectives may still be under way."""
        with contextlib.suppress(Exception):  # of which all ranks know
            try:
                self._tickets.stop(CLOSE_TIMEOUT_S)
            except Timeout:
                return  # it is inside torch's collectives, where no other thread may come
        is_idle = all(work.has_passed() for work in self._under_way)
        if self._net.mesh.mailboxes.failure is not None or not is_idle:
            self.abandon()
        if not self._is_aborted:
            for group in self._groups:
                destroy_group(group)

    # ---- the starter ----

    def launch(self, key: Key, lengths: Mapping[int, int]) -> None:
        """Calls torch's collective, whose ticket has come."""
        self._under_way = [work for work in self._under_way if not work.has_passed()]
        work = self._asked.pop(key)
        stream = self._second if work.colour else self._port.current()
        with self._net.blaming(work.describe()), self._port.using(stream):
            work.launch(self._groups[work.colour], self._port, lengths)
        self._under_way.append(work)

    def refuse(self, key: Key, least: Form, greatest: Form) -> None:
        """Fails a collective in its thread, as ranks have asked for different ones."""
        asked = ", ".join(
            f"rank {rank} has {n} of {DTYPES[code]} " + _DONE_WITH.get(root, f"from {root}")
            for root, code, n, rank in (least, greatest)
        )
        work = self._asked.pop(key)
        work.release(
            TransportError(
                "all must sum, or take from one rank, as many elements of one dtype in "
                f"{work.describe()}, but {asked}"
            )
        )

    def abandon(self, failure: Exception | None = None) -> None:
        """Ends the kernels that wait for others; first tells all what this rank failed with.

        So a rank that finds that its kernel has ended, as it was aborted, knows of the loss.
        """
        if failure is not None:
            self._net.mesh.lose(self._net.rank, failed(failure))
        if not self._is_aborted:
            self._is_aborted = True
            abort(self._groups, self._port)


def abort(groups: Sequence[Any], port: Port) -> None:
    """Aborts groups, each in a thread of its own, as torch may not come back from this."""

    def end(group: Any) -> None:
        with contextlib.suppress(Exception):  # the job ends all the same
            port.enter()
            group.abort()

    threads = [threading.Thread(target=end, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


class NativeCollective(Expected, ABC):
    """A collective under way: waits in the mailboxes, as a receive does, until it is launched.

    The starter writes `_work` and `_mark` before it sets `arrived`; whoever has called
    the collective reads them after that.  The mesh's thread reads `_is_launching` at any time.

    Args:
        net: the endpoint on which the collective was called
        x: the argument and result
        call: who takes part, and which call it is
        root: the rank whose x all take, or a name of `tickets`
        group: the members, or ALL
    """

    tickets: Tickets
    """They tell who else has called it."""
    bytes_sent = 0
    """How many bytes leave this rank."""
    messages_sent = 0
    """In how many messages they would leave without an engine."""
    awaited = -1
    """For which rank its caller waits; -1: all."""
    colour = 0
    """On which of the communicators it travels."""

    def __init__(
        self, net: ProcessTransport, x: Tensor, call: Call, root: int, group: Members
    ) -> None:
        super().__init__(net.rank, (call.channel, call.number), None)
        self.net, self.x, self.root = net, x, root
        self.ticket = group, call.channel, call.number
        self._members, self._kind = call.members, call.kind
        self._y = x  # as it travels
        self._begin = time.monotonic()
        self._works: Sequence[Any] = ()
        self._mark = PASSED
        self._is_launching = self._is_taken = False

    def missing(self, left: set[int]) -> int | None:
        # A rank may leave before the ticket of an empty collective is here; it may leave another
        # collective once all have called that, before this rank's starter goes on.
        if not len(self._y) or self._is_launching:
            return None
        return min(left.intersection(self._members), default=None)

    def describe(self) -> str:
        """Says in words which collective this is."""
        members, _, number = self.ticket
        whose = f"ranks {', '.join(map(str, members))}" if members else "all ranks"
        path = self.net.path.strip("/")
        return f"{self._kind} number {number} of {whose}" + (f" [{path}]" if path else "")

    # ---- the starter ----

    def launch(self, group: Any, port: Port, lengths: Mapping[int, int]) -> None:
        """Calls torch's collective, which goes on behind all that has made the argument.

        Args:
            group: the process group
            port: the device
            lengths: of what each of two ranks sends, where this is no collective
        """
        self._works = self.call(group, lengths)
        if self._works and not is_on_host(self._y):
            for work in self._works:
                work.wait()  # holds up the starter's stream, and not the starter
            self._mark = port.mark()
        self.release(None)

    @abstractmethod
    def call(self, group: Any, lengths: Mapping[int, int]) -> Sequence[Any]:
        """Calls torch, unless there is nothing to do, and returns torch's works.

        Sets `_is_launching` before that: no other rank has the result, and so leaves, earlier.
        """

    def release(self, failure: TransportError | None) -> None:
        """Lets the thread that called it go on: it is launched, or will not be."""
        self.net.mesh.mailboxes.withdraw(self)
        if self.failure is None:
            self.failure = failure
        self.arrived.set()

    def has_passed(self) -> bool:
        """Returns whether the result is there, once it is launched; never blocks."""
        if is_on_host(self.x):
            return all(work.is_completed() for work in self._works)
        return self._mark.has_passed()

    # ---- who has called it ----

    def done(self) -> bool:
        if self.net.lane is not None:
            self.net.lane.check_stop()
        return self.arrived.is_set() and (self.failure is not None or self.has_passed())

    def wait(self, timeout_s: float | None = None) -> Tensor:
        net, begin = self.net, time.monotonic()
        net.check_process()
        if self._is_taken:
            return self.result
        limit = min(net.timeout_s if timeout_s is None else timeout_s, threading.TIMEOUT_MAX)
        try:
            self._await_launch(limit)
            self._await_end(limit, begin + limit - time.monotonic())
        finally:
            end = time.monotonic()
            if net.lane is None:
                net.counters.wait_s += end - begin
            if net.counters.watch is not None:
                net.counters.watch.waited(begin, end, self.awaited, in_lane=net.lane is not None)
        net.counters.comm_s += end - self._begin
        self._is_taken, self._works = True, ()
        self.take()
        return self.result

    def _await_launch(self, limit: float) -> None:
        lane = self.net.lane
        if lane is not None:
            lane.begin_waiting(self)
        in_time = self.arrived.wait(limit)
        if lane is not None:
            lane.end_waiting()
        if not in_time:
            callers = ", ".join(map(str, self.tickets.known_callers(self.ticket)))
            raise Timeout(
                f"rank {self.net.rank} has waited {limit:g} s for all to call "
                f"{self.describe()}; it knows of calls of ranks {callers}"
            )
        if self.failure is not None:
            self.raise_failure(self.describe())

    def _await_end(self, limit: float, left: float) -> None:
        what = f"{self.describe()}, which all have called, to end on {self.x.device}"
        self.net.await_device(self.has_passed, limit, left, what)
        for work in self._works if is_on_host(self.x) else ():
            with self.net.blaming(what):
                work.wait()  # returns at once; raises what it has failed with
        self.net.mesh.check(what)  # a kernel that was aborted has ended, too

    @property
    def result(self) -> Tensor:
        """What `wait` gives."""
        return self.x

    def take(self) -> None:
        """Brings the result, which is on the device, to where its caller wants it."""
        if self._y is not self.x:
            self.x.copy_(self._y)
            if not is_on_host(self._y):
                port_of(self._y.device).keep(self._y)
        self._y = self.x


def members_of(net: ProcessTransport, call: Call) -> Members:
    """Returns who takes part in a call; ALL where it is all ranks, in their order."""
    return ALL if call.members == tuple(range(net.world_size)) else call.members


class OfAll(NativeCollective):
    """A sum or a broadcast of all ranks.

    Args:
        net: the endpoint on which it was called
        x: the argument, which will hold the result
        call: which of all ranks' collectives it is
        place: the rank that broadcasts; None: a sum
    """

    def __init__(self, net: ProcessTransport, x: Tensor, call: Call, place: int | None) -> None:
        super().__init__(net, x, call, SUM if place is None else place, ALL)
        if place is None:
            if x.dtype == torch.float16:
                self._y = x.float()
            own = len(x) * (call.me + 1) // call.size - len(x) * call.me // call.size
            sent, self.messages_sent = len(x) - own + own * (call.size - 1), 2 * (call.size - 1)
        else:
            self.messages_sent = num_children((call.me - place) % call.size, call.size)
            sent = self.messages_sent * len(x)
        self.bytes_sent = sent * self._y.itemsize

    def call(self, group: Any, lengths: Mapping[int, int]) -> Sequence[Any]:
        """Calls torch's collective, unless there is nothing to do."""
        if not len(self._y):
            return ()
        self._is_launching = True
        if self.root == SUM:
            return [dist.all_reduce(self._y, group=group, async_op=True)]
        return [dist.broadcast(self._y, group=group, async_op=True, group_src=self.root)]
