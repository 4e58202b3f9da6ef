"""Messages of tensors on a device, on their way to the wire and from it, beside the training.

    send        training or lane   a mark behind what has made x; a copy on the device, if asked for
    stager      its own thread     the mark has passed -> chunk -> pinned memory -> passed -> wire
    landing     who receives       as it comes: chunk -> pinned memory -> the device, on a stream of
                                   its own

The thread that sends goes on at once, and so does its stream.  Copies run on streams that wait for
nothing: each copy is queued once the host has seen that what it reads is there, and what it has
written is used once the host has seen that it is done.

**Room.**  What has no room at its receiver stays here until it is asked for, also from the CPU: see
`memory`.

**Order.**  Messages of one channel and tag to one rank leave in the order in which they were sent,
also messages of CPU tensors; other messages may overtake them until their first chunk has left.

**Done.**  A send is done once nobody reads the caller's memory any more: once all of it is copied
to pinned memory, or once the wire has read what it takes from where it lies.

**Memory.**  `_SLOTS` chunks of pinned memory for each rank that is sent to; an outlet that takes
messages whole has one piece of pinned memory for each message.  What lands shares a few chunks
(`memory`).

**Threads.**  Any thread may `send`: `_changed` guards `_new` and `_pending`.  All else is the
stager's, which is started by the first message of a tensor that is on a device.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from lightning_dsgd.buffers import copy_of
from lightning_dsgd.devices import (
    LONGEST_PAUSE_S,
    PASSED,
    SHORTEST_PAUSE_S,
    Mark,
    Port,
    is_on_host,
    port_of,
)
from lightning_dsgd.transport.contract import Work, failed
from lightning_dsgd.transport.memory import CHUNK_BYTES, Pinned
from lightning_dsgd.transport.mesh import CLOSE_TIMEOUT_S, Mesh
from lightning_dsgd.transport.messages import HELD, MAILBOX
from lightning_dsgd.transport.works import Done, Sending

_SLOTS: Final = 4


class Outlet(Protocol):
    """A way out for the messages to one rank; the stager's thread calls it."""

    def begin(self, header: bytes) -> None:
        """Begins a message; no other one leaves before this one has ended."""
        ...

    def add(self, chunk: Tensor, *, is_last: bool) -> Work[None]:
        """Adds the message's next bytes, in host memory, which stay until the Work is done."""
        ...


@dataclass(eq=False)
class _Job:
    """A message on its way, and how far it has come."""

    key: tuple[int, bytes]
    """The rank that it goes to, and the header's bytes of its channel and tag."""
    header: bytes
    x: Tensor | None
    """The tensor as bytes; None once nobody reads it any more."""
    port: Port
    mark: Mark
    sending: Sending
    nbytes: int
    is_from_device: bool
    read: int = 0
    copied: deque[tuple[Tensor, int, Mark]] = field(default_factory=deque)
    has_begun: bool = False
    has_room: bool = False
    is_held: bool = False
    num_added: int = 0


@dataclass
class _Way:
    """What leaves for one rank, and the pinned memory for it."""

    outlet: Outlet
    free: list[Tensor] = field(default_factory=list)
    num_slots: int = 0
    leaving: list[tuple[Work[None], Tensor | None, Sending | None]] = field(default_factory=list)
    """Chunks that the wire has; once one has left, its pinned memory is free and its send done."""
    job: _Job | None = None


class Staging:
    """Takes messages from devices to the wire.

    Args:
        mesh: tells whether the other ranks are alive
        outlet_to: makes the outlet to a rank; raises where the rank cannot be reached
        whole: whether outlets take each message as one chunk
        direct: whether outlets read the device's memory
    """

    def __init__(
        self,
        mesh: Mesh,
        outlet_to: Callable[[int], Outlet],
        *,
        whole: bool = False,
        direct: bool = False,
    ) -> None:
        self._mesh = mesh
        self._outlet_to = outlet_to
        self._whole, self._direct = whole, direct
        self._changed = threading.Condition()
        self._new: deque[_Job] = deque()
        self._pending: Counter[tuple[int, bytes]] = Counter()
        self._jobs: list[_Job] = []
        self._ways: dict[int, _Way] = {}
        self._streams: dict[torch.device, Any] = {}
        self._thread: threading.Thread | None = None
        self._closing_at: float | None = None
        self._num_breaks = 0

    # ---- from any thread ----

    def admit_past(self, dst: int, header: bytes, x: Tensor) -> bool:
        """Takes the room of a message that need not be staged; returns False if it must be staged.

        A message is staged that comes from a device, that follows a staged one, or for which the
        receiver has no room.
        """
        if self._pending and self._pending[dst, header[:16]]:
            return False
        return is_on_host(x) and self._mesh.memory.window.admit(dst, x.nbytes)

    def send(self, dst: int, header: bytes, x: Tensor, *, copy: bool) -> Work[None]:
        """Starts sending; with `copy`, `x` may change at once, else once the Work is done."""
        port = port_of(x.device)
        x = x.detach()
        if copy:
            x = copy_of(x) if is_on_host(x) else x.clone()
        sending = Sending(self._mesh, dst, x)
        key = dst, header[:16]
        job = _Job(
            key,
            header,
            x.view(torch.uint8),
            port,
            port.mark(),
            sending,
            x.nbytes,
            not is_on_host(x),
        )
        with self._changed:
            if self._closing_at is not None:
                sending.finish()
                return sending
            self._new.append(job)
            self._pending[key] += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="dsgd-staging", daemon=True
                )
                self._thread.start()
            self._changed.notify()
        return Done(None) if copy else sending

    def close(self) -> None:
        """Sends what is left, for 5 seconds at most; drops what has not begun after a loss."""
        with self._changed:
            self._closing_at = time.monotonic() + CLOSE_TIMEOUT_S
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(2 * CLOSE_TIMEOUT_S)

    # ---- the stager's thread ----

    def _serve(self) -> None:
        pause = SHORTEST_PAUSE_S
        try:
            while self._goes_on():
                if self._advance():
                    pause = SHORTEST_PAUSE_S
                else:
                    time.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_S)
        except Exception as error:
            self._mesh.lose(self._mesh.rank, failed(error))
            raise
        finally:
            self._end()

    def _goes_on(self) -> bool:
        """Returns whether there may be anything to do; waits while there is nothing."""
        with self._changed:
            is_closing = self._closing_at is not None
            while not (self._new or self._jobs or self._is_leaving() or is_closing):
                self._changed.wait()
                is_closing = self._closing_at is not None
            while self._new:
                self._jobs.append(self._new.popleft())
        boxes = self._mesh.mailboxes
        is_lost = boxes.failure is not None and not self._mesh.policy.goes_on
        if boxes.failure is not None or self._num_breaks != boxes.num_breaks:
            self._num_breaks = boxes.num_breaks
            held = {job.key for job in self._jobs if job.is_held and not job.has_room}
            # Nobody will ask for these, or for what is behind them.
            self._drop(lambda job: not job.has_begun and job.key in held)
        if is_lost:
            self._drop(lambda job: not job.has_begun)
            self._finish_all()
        if self._closing_at is None:
            return True
        has_more = bool(self._jobs) or (self._is_leaving() and not is_lost)
        return has_more and time.monotonic() < self._closing_at

    def _is_leaving(self) -> bool:
        return any(way.leaving for way in self._ways.values())

    def _finish_all(self) -> None:
        """Ends all sends, as nobody waits for the wire any more."""
        for job in self._jobs:
            job.sending.finish()
        for way in self._ways.values():
            for _, _, sending in way.leaving:
                if sending is not None:
                    sending.finish()

    def _advance(self) -> bool:
        """Moves every message on; returns whether anything has moved."""
        moved = False
        seen: set[tuple[int, bytes]] = set()
        for job in list(self._jobs):
            is_first = job.key not in seen
            seen.add(job.key)
            job.port.enter()
            if is_first and job.mark.has_passed() and (job.has_room or self._has_room(job)):
                moved |= self._advance_job(job)
        for way in self._ways.values():
            moved |= _take_back(way)
        return moved

    def _has_room(self, job: _Job) -> bool:
        """Returns whether a message may leave; tells its receiver, once, if it may not."""
        (dst, mailbox), window = job.key, self._mesh.memory.window
        if self._closing_at is not None or dst in self._mesh.mailboxes.left:
            job.has_room = True
        elif job.is_held:
            job.has_room = window.admit_if_asked(dst, mailbox, job.nbytes)
        else:
            job.has_room = window.admit(dst, job.nbytes)
            job.is_held = not job.has_room
            if job.is_held:
                self._tell_of(job)
        return job.has_room

    def _tell_of(self, job: _Job) -> None:
        """Tells the receiver that a message is held; drops one that nobody will ask for."""
        channel, tag = MAILBOX.unpack(job.key[1])
        if self._mesh.mailboxes.is_old(channel):
            self._end_job(job)
        elif self._way_to(job) is not None:
            self._mesh.say(job.key[0], HELD, (channel, tag))

    def _advance_job(self, job: _Job) -> bool:
        way = self._way_to(job)
        if way is None:
            return True
        if way.job not in (None, job):
            return False
        way.job = job
        moved = self._copy(job, way)
        while job.copied and job.copied[0][2].has_passed():
            slot, count, _ = job.copied.popleft()
            self._add(job, way, slot, count)
            moved = True
        if not job.nbytes and not job.has_begun:
            self._add(job, way, torch.empty(0, dtype=torch.uint8), 0)
        if job.read == job.nbytes and not job.copied:
            self._end_job(job)
            way.job, moved = None, True
        return moved

    def _way_to(self, job: _Job) -> _Way | None:
        dst = job.key[0]
        if dst not in self._ways:
            try:
                self._ways[dst] = _Way(self._outlet_to(dst))
            except Exception:  # the mesh knows that it is lost
                if self._mesh.mailboxes.failure is None and not self._mesh.policy.goes_on:
                    raise
                self._drop(lambda other: other.key[0] == dst)
                return None
        return self._ways[dst]

    def _copy(self, job: _Job, way: _Way) -> bool:
        """Queues copies into pinned memory, as far as there is room; returns whether there was."""
        moved = False
        while job.x is not None and job.read < job.nbytes:
            at_once = self._whole or not job.is_from_device
            count = job.nbytes if at_once else min(CHUNK_BYTES, job.nbytes - job.read)
            chunk = job.x[job.read : job.read + count]
            if self._lends(job):
                job.copied.append((chunk, count, PASSED))
            else:
                slot = _slot(job.port, way, count, is_kept=not self._whole)
                if slot is None:
                    return moved
                with job.port.using(self._stream_of(job.port)):
                    job.port.copy(slot[:count], chunk)
                    job.copied.append((slot, count, job.port.mark()))
            job.read += count
            moved = True
        return moved

    def _stream_of(self, port: Port) -> Any:
        if port.device not in self._streams:
            self._streams[port.device] = port.new()
        return self._streams[port.device]

    def _add(self, job: _Job, way: _Way, slot: Tensor, count: int) -> None:
        """Hands the next chunk over to the wire."""
        if not job.has_begun:
            way.outlet.begin(job.header)
            job.has_begun = True
        job.num_added += count
        work = way.outlet.add(slot[:count], is_last=job.num_added == job.nbytes)
        is_from_ring = job.is_from_device and count > 0 and not self._whole
        ends_send = self._lends(job) and job.num_added == job.nbytes
        way.leaving.append(
            (work, slot if is_from_ring else None, job.sending if ends_send else None)
        )

    def _lends(self, job: _Job) -> bool:
        """Returns whether the wire reads the sender's memory, and not pinned memory."""
        return self._direct or not job.is_from_device

    def _end_job(self, job: _Job) -> None:
        """Ends a message: the wire has all of it, or it is dropped."""
        job.x = None
        if not (self._lends(job) and job.has_begun):
            job.sending.finish()
        self._jobs.remove(job)
        with self._changed:
            self._pending[job.key] -= 1
            if not self._pending[job.key]:
                del self._pending[job.key]

    def _drop(self, which: Callable[[_Job], bool]) -> None:
        for job in [job for job in self._jobs if which(job)]:
            for way in self._ways.values():
                if way.job is job:
                    way.job = None
            self._end_job(job)

    def _end(self) -> None:
        """Drops all messages, so that every wait for a message to leave ends."""
        with self._changed:
            self._closing_at = self._closing_at or time.monotonic()
            self._jobs.extend(self._new)
            self._new.clear()
        self._drop(lambda _: True)
        self._finish_all()


def _slot(port: Port, way: _Way, count: int, *, is_kept: bool) -> Tensor | None:
    """Returns pinned memory for a chunk; None where all of it is in use."""
    if not is_kept:
        return port.pinned(count, torch.uint8)
    if way.free:
        return way.free.pop()
    if way.num_slots == _SLOTS:
        return None
    way.num_slots += 1
    return port.pinned(CHUNK_BYTES, torch.uint8)


def _take_back(way: _Way) -> bool:
    """Frees pinned memory whose chunk has left; returns whether there was any."""
    still = []
    for work, slot, sending in way.leaving:
        if not work.done():
            still.append((work, slot, sending))
            continue
        if slot is not None:
            way.free.append(slot)
        if sending is not None:
            sending.finish()
    is_any = len(still) < len(way.leaving)
    way.leaving = still
    return is_any


class Landing:
    """A message on its way up to the device, moved on by the thread that waits for it.

    Args:
        port: the device's port
        payload: the message, in host memory
        into: where the message goes; None: into new memory
        mark: the mark after which `into` may be written
        pinned: the pinned memory of the network
    """

    def __init__(
        self, port: Port, payload: Tensor, into: Tensor | None, mark: Mark, pinned: Pinned
    ) -> None:
        self._port, self._into, self._mark = port, into, mark
        self._pinned = pinned
        self._bytes = payload.view(torch.uint8)
        self._dtype, self._numel = payload.dtype, len(payload)
        self._is_new = into is None
        self._num_queued = 0
        self._copied: Mark | None = None  # behind the last chunk, once all are queued

    def has_landed(self, num_come: int) -> bool:
        """Returns whether the message is on the device; waits for neither device nor network.

        It moves the message on, by as many chunks as are free, and have come.

        Args:
            num_come: how many bytes of the message are in host memory
        """
        if self._copied is None and self._mark.has_passed():
            self._copied = self._queue_chunks(num_come)
        return self._copied is not None and self._copied.has_passed()

    def _queue_chunks(self, num_come: int) -> Mark | None:
        """Queues copies of the next chunks; returns the mark behind the last of all of them."""
        port, mark = self._port, PASSED
        with port.using(port.side()):
            if self._into is None:  # memory of that stream: nothing queued elsewhere reads it
                self._into = torch.empty(self._numel, dtype=self._dtype, device=port.device)
            target = self._into.view(torch.uint8)
            while self._num_queued < len(self._bytes):
                end = min(self._num_queued + CHUNK_BYTES, len(self._bytes))
                chunk = self._pinned.take(port) if end <= num_come else None
                if chunk is None:
                    return None
                place = slice(self._num_queued, end)
                piece = self._bytes[place]
                port.copy(target[place], chunk[: len(piece)].copy_(piece))
                mark = port.mark()
                self._pinned.give(chunk, mark)
                self._num_queued += len(piece)
        self._bytes = self._bytes.new_empty(0)
        return mark

    def take(self) -> Tensor:
        """Returns the message, once it has landed."""
        assert self._into is not None
        if self._is_new:
            self._port.keep(self._into)
        return self._into
