"""The network between processes that torch.distributed has joined, over any wire.

    endpoint   the contract             this module: a rank's transport, and its receives
       |
    mailboxes  where messages and receives meet
       |
    wire       carries messages         TCP's, or that of the wing `mpi`
       |
    mesh       knows who is alive       one thread per process, over `connections`

The process group is where ranks find each other's addresses.  On CUDA, NCCL sums and broadcasts
dense tensors, whatever carries messages (see `native` and `native_groups`).  Why not gloo's send
and receive: they can neither be polled nor cancelled, and do not notice a dead peer.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dsgd.devices import PASSED, is_on_host, port_of, until
from lightning_dsgd.transport.contract import PeerLost, Timeout, TransportError, Views, Work, failed
from lightning_dsgd.transport.counters import Counters
from lightning_dsgd.transport.endpoint import Endpoint
from lightning_dsgd.transport.lanes import Lane
from lightning_dsgd.transport.mailboxes import Expected
from lightning_dsgd.transport.mesh import Mesh, encode
from lightning_dsgd.transport.messages import CODES, HEADER, check_message, describe
from lightning_dsgd.transport.staging import Landing
from lightning_dsgd.transport.wire import Wire
from lightning_dsgd.transport.works import SENT

CPU: Final = torch.device("cpu")
_CARD_BYTES: Final = 256


class ProcessTransport(Endpoint):
    """This process's end of a network, without connections yet: see `meet`.

    `mesh` and `wire` are shared by the endpoints of all threads; the rest is the endpoint's own.

    Args:
        rank: this process's rank
        world_size: P
        wire: what carries messages
        timeout_s: how long a wait may take
        heartbeat_timeout_s: after how much silence a rank counts as lost
        device: the device that this rank computes on
        is_newcomer: whether this process comes to ranks that were there before
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        wire: Wire,
        timeout_s: float,
        heartbeat_timeout_s: float,
        device: torch.device = CPU,
        *,
        is_newcomer: bool = False,
    ) -> None:
        super().__init__(rank, world_size, timeout_s, Counters())
        self.wire = wire
        self.mesh = Mesh(
            rank,
            world_size,
            timeout_s,
            heartbeat_timeout_s,
            port_of(device),
            is_newcomer=is_newcomer,
        )
        self.lane: Lane | None = None
        """The lane whose endpoint this is; None for the training thread's."""

    def meet(self) -> None:
        """Connects the ranks of the default process group; all of them call it together."""
        try:
            if self.world_size > 1:
                self._open()
            self.sub("opening").barrier().wait()  # nobody leaves before all have found each other
        except BaseException as exception:
            self.fail(failed(exception))
            raise

    def _open(self) -> None:
        host, port = self.mesh.connections.listen()
        secret = secrets.token_hex(16)
        cards = _gather_json({"host": host, "port": port, "secret": secret, "wire": self.wire.name})
        try:
            self._check_wires([str(card["wire"]) for card in cards])
        except TransportError:
            self.mesh.connections.stop_listening()
            raise
        self._end_with_process()
        addresses = {
            rank: (str(card["host"]), int(card["port"])) for rank, card in enumerate(cards)
        }
        self.mesh.open(addresses, bytes.fromhex(cards[0]["secret"]))
        self.wire.open(self.mesh)

    def _check_wires(self, names: list[str]) -> None:
        """Raises, on every rank, unless all send their messages the same way."""
        kinds = [name.split()[0] for name in names]
        if len(set(kinds)) > 1:
            listed = ", ".join(f"{kind} on rank {rank}" for rank, kind in enumerate(kinds))
            raise TransportError(
                f"the transport must be the same on all ranks, got {listed}; name it: "
                'transport="process_group" or "mpi"'
            )
        self.wire.check_names(names)

    # ---- life and death ----

    def check(self) -> None:
        self.mesh.check("a check between two steps")

    @property
    def is_forks(self) -> bool:
        return self.mesh.is_forks

    def check_process(self) -> None:
        self.mesh.check_process()

    def on_lost(self, callback: Callable[[PeerLost], None]) -> None:
        self.mesh.on_lost = callback
        lost = self.mesh.mailboxes.failure
        if lost is not None and lost.rank != self.rank:
            callback(lost)

    @contextlib.contextmanager
    def blaming(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            self.mesh.blame(what)
            raise

    def await_device(
        self, has_passed: Callable[[], bool], limit: float, left: float, what: str
    ) -> None:
        """Waits for work on a device; raises `Timeout`, or `PeerLost` if a rank is lost.

        Args:
            has_passed: tells whether the work is done
            limit: how long a wait may take
            left: how much of `limit` is left
            what: what is waited for
        """

        def check() -> None:
            if self.lane is not None:
                self.lane.check_stop()
            self.mesh.check(what)

        if not until(has_passed, left, check):
            raise Timeout(f"rank {self.rank} has waited {limit:g} s for {what}")

    @property
    def views(self) -> Views:
        return self.mesh.policy

    def fail(self, reason: str) -> None:
        self.mesh.lose(self.rank, reason)
        self.close()

    def close(self) -> None:
        if self.is_forks:
            return
        if self.mesh.at_exit is not None:
            atexit.unregister(self.mesh.at_exit)
            self.mesh.at_exit = None
        has_carried_messages = self.wire.close()
        self.mesh.close(is_last=not has_carried_messages)

    def _end_with_process(self) -> None:
        """Has the network end with the process, until it is closed on this endpoint or another."""
        self.mesh.at_exit = self.end
        atexit.register(self.mesh.at_exit)

    def end(self) -> None:
        """Ends the network with the process; other threads live while it waits for children."""
        self.mesh.lose(self.rank, "ended before it had closed its network")
        self.close()

    # ---- messages ----

    def now(self) -> float:
        return time.monotonic()

    def sub(self, name: str) -> Self:
        return self._at(f"{self.path}/{name}", self.lane)

    def _at(self, path: str, lane: Lane | None) -> Self:
        twin = copy.copy(self)  # the same mesh and wire
        Endpoint.__init__(twin, self.rank, self.world_size, self.timeout_s, self.counters, path)
        twin.lane = lane
        return twin

    def start_lane(self, fn: Callable[[Any], None], name: str) -> Lane:
        self.check_process()
        lane = Lane(self.mesh)
        lane.start(self._at(name, lane), fn)
        return lane

    def expect_at_most(self, nbytes: int) -> None:
        self.mesh.memory.expect_at_most(nbytes)

    def post(
        self, x: Tensor, dst: int, channel: int, tag: int, kind: int, *, copy: bool
    ) -> Work[None]:
        self.mesh.check(f"sending to rank {dst}")
        if dst == self.rank:
            self.mesh.port.enter()  # this thread may have made no call to the device before
            # Nobody can change what is empty; len(x) would cost as much as all else here.
            x = x.detach().clone() if x.numel() else x
            mark = self.mesh.port.mark()  # also for a CPU tensor: it tells of what this thread did
            self.mesh.mailboxes.deliver(dst, (channel, tag), kind, x, mark)
            return SENT
        most_bytes = self.mesh.memory.most_bytes
        if x.nbytes > most_bytes:
            raise TransportError(
                f"a message must have at most {most_bytes} bytes here, or its receiver "
                f"does not take it, got {x.nbytes} for rank {dst}; send it in several"
            )
        self.counters.count(self.wire.engine, x.nbytes)
        header = HEADER.pack(channel, tag, x.nbytes, kind, CODES[x.dtype])
        return self.wire.send(dst, header, x, copy=copy)

    def collect(
        self, like: Tensor, src: int, channel: int, tag: int, kind: int, into: Tensor | None = None
    ) -> _Receipt:
        self.check_process()
        return _Receipt(self, like, src, channel, tag, kind, into)


class _Receipt(Expected):
    """A receive: waits in its mailbox until its message fills it; its endpoint's thread waits."""

    def __init__(
        self,
        net: ProcessTransport,
        like: Tensor,
        src: int,
        channel: int,
        tag: int,
        kind: int,
        into: Tensor | None,
    ) -> None:
        readable = into if into is not None and is_on_host(into) else None
        goes_up = not is_on_host(like if into is None else into)
        super().__init__(src, (channel, tag), readable, follows=goes_up)
        self._net, self._like, self._into, self._kind = net, like, into, kind
        self._begin = self.end = time.monotonic()
        self._is_taken = False
        self._is_posted = True
        self._landing: Landing | None = None
        self._writable = PASSED
        if readable is None and into is not None:
            self._writable = port_of(into.device).mark()
        net.mesh.mailboxes.collect(self)

    def describe(self) -> str:
        """Says in words what the receive waits for."""
        return describe(self._net.path, self.wanted, self.key[1], self._kind)

    def done(self) -> bool:
        if self._net.lane is not None:
            self._net.lane.check_stop()
        has_landed = self.failure is None and self._has_landed()
        return self.arrived.is_set() and (has_landed or self.failure is not None)

    def wait(self, timeout_s: float | None = None) -> Tensor:
        net = self._net
        net.check_process()
        limit = min(net.timeout_s if timeout_s is None else timeout_s, threading.TIMEOUT_MAX)
        if not self._is_posted:  # an earlier wait gave it up
            self._is_posted = True
            net.mesh.mailboxes.collect(self)
        if not self.arrived.is_set() and not self._arrives_within(limit):
            self._is_posted = not net.mesh.mailboxes.withdraw(self)
            # What cannot be withdrawn is half read: its end may be near.
            if not self._is_posted or not self.arrived.wait(limit):
                raise Timeout(f"rank {net.rank} has waited {limit:g} s for {self.describe()}")
        if self.failure is not None:
            net.mesh.mailboxes.withdraw(self)
            self.raise_failure(self.describe())
        if not self._has_landed():
            what = f"{self.describe()} to be copied to {self._like.device}"
            net.await_device(self._has_landed, limit, limit, what)
        return self._take()

    def _has_landed(self) -> bool:
        """Returns whether the message is where `like` is; copies as `Landing.has_landed` does."""
        payload = self.payload
        if payload is None:
            return False
        if self._landing is None and (is_on_host(self._like) or not is_on_host(payload)):
            return True
        if self._landing is None:
            self._check(payload)
            port = port_of(self._like.device)
            self._landing = Landing(
                port, payload, self._into, self._writable, self._net.mesh.memory.pinned
            )
        return self._landing.has_landed(self.num_come)

    def _has_come(self) -> bool:
        """Returns whether all of the message is here; moves on what is."""
        if self.failure is None:
            self._has_landed()
        return self.arrived.is_set()

    def _arrives_within(self, limit: float) -> bool:
        """Waits for the message, and counts the time if the training thread is held up."""
        net, lane, begin = self._net, self._net.lane, time.monotonic()
        if lane is not None:
            lane.begin_waiting(self)
        if net.wire.expect is not None:
            net.wire.expect()
        in_time = self.begun.wait(limit)
        if in_time and not self.arrived.is_set():  # it comes
            in_time = until(self._has_come, begin + limit - time.monotonic(), net.check_process)
        end = time.monotonic()
        if lane is None:
            net.counters.wait_s += end - begin
        else:
            lane.end_waiting()
        if net.counters.watch is not None:
            net.counters.watch.waited(begin, end, self.source, in_lane=lane is not None)
        return in_time

    def _take(self) -> Tensor:
        """Returns the message, checked and where it belongs."""
        payload = self.payload
        assert payload is not None
        if not self._is_taken:
            self._is_taken = True
            self._net.counters.comm_s += self.end - self._begin
            self._check(payload)
            self.mark.hold()
            if self._landing is not None:
                self.payload = payload = self._landing.take()
            elif not is_on_host(payload):
                port_of(payload.device).keep(payload)
            if self._into is not None and payload.data_ptr() != self._into.data_ptr():
                self._into.copy_(payload)
            if payload.device != self._like.device:
                self.payload = payload = payload.to(self._like.device)
        return payload if self._into is None else self._into

    def _check(self, payload: Tensor) -> None:
        """Raises unless the message is what was asked for."""
        if self._into is None and (payload.dtype, self.kind) == (self._like.dtype, self._kind):
            return
        size, kinds = payload.numel(), (self.kind, self._kind)
        check_message(self._like, self._into, payload.dtype, size, self.source, kinds)


def _gather_json(value: Any) -> list[Any]:
    """Returns every rank's value, through the process group."""
    text = encode(value)
    card = torch.zeros(_CARD_BYTES, dtype=torch.uint8, device=_card_device())
    card[: len(text)] = text
    cards = [torch.empty_like(card) for _ in range(dist.get_world_size())]
    dist.all_gather(cards, card)
    return [json.loads(bytes(card.cpu().numpy()).rstrip(b"\0")) for card in cards]


def _card_device() -> str:
    """Returns a device type whose tensors the default process group moves: the CPU, if it can."""
    found = libraries()
    return "cpu" if "cpu" in found else next(iter(found))


def libraries() -> dict[str, str]:
    """Returns what moves each device type's tensors in the default process group."""
    config = dist.BackendConfig(dist.Backend(dist.get_backend_config()))
    return {kind: str(name) for kind, name in config.get_device_backend_map().items()}
