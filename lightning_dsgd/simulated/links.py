"""Messages on their way: what each costs, and which receive takes it.

What a message of b bytes costs on the links, with s its sender, d its receiver:

    start   = max(clock of s, egress_free[s])            egress_free[s]  <- start + b / bandwidth
    arrival = max(start + latency, ingress_free[d])      ingress_free[d] <- arrival
              + b / bandwidth

so that each rank sends one message at a time and receives one at a time, both at once (a
full-duplex link), in the order in which messages reach it.  With `shared_link` all ranks have one
link between them, which carries one message at a time.  Sending takes none of the sender's time but
what `Processors` say: its Work is done at once, and the tensor is copied even where the caller
would leave it alone.

All of this belongs to the holder of the baton.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

from torch import Tensor

from lightning_dsgd.simulated.baton import Awaited, Baton
from lightning_dsgd.simulated.faults import Faults
from lightning_dsgd.transport.contract import ANY
from lightning_dsgd.transport.messages import describe

_Box = tuple[int, int, int]
"""Receiver, channel and tag: what a message and its receive have in common, but for the sender."""


@dataclass(eq=False)
class Message:
    """A message; `at_s` is when all of it is there."""

    payload: Tensor
    src: int
    dst: int
    channel: int
    tag: int
    kind: int
    path: str
    number: int = -1
    start_s: float = math.inf
    num_bytes: int = 0
    transfer_s: float = 0.0
    at_s: float = math.inf


class Expected(Awaited):
    """A receive, bound to its message as soon as the message reaches this rank."""

    def __init__(self, rank: int, src: int, channel: int, tag: int) -> None:
        self.src = src
        self.box = rank, channel, tag
        self.number = 0
        self.message: Message | None = None


class Links:
    """The links of all ranks, and what is on them.

    Args:
        baton: the run's baton
        faults: tell which messages are taken away
        latency_s: from the end of a message's departure to its arrival
        bandwidth_bytes_s: the bandwidth of each link, in each direction
        shared_link: all ranks share one link, in place of one each
        message_bytes: gives the bytes of each message
    """

    def __init__(
        self,
        baton: Baton,
        faults: Faults,
        latency_s: float,
        bandwidth_bytes_s: float,
        shared_link: bool,
        message_bytes: Callable[[Tensor], float],
    ) -> None:
        self._baton, self._faults = baton, faults
        self._latency_s, self._bandwidth_bytes_s = latency_s, bandwidth_bytes_s
        self._shared_link, self._message_bytes = shared_link, message_bytes
        num_ranks = len(baton.threads)
        self._egress_free = [0.0] * (1 if shared_link else num_ranks)
        self._ingress_free = [0.0] * num_ranks
        self._numbers = count()
        self._under_way: dict[int, Message] = {}
        self._arrived: dict[_Box, dict[int, deque[Message]]] = {}
        self._expected: dict[tuple[_Box, int], deque[Expected]] = {}

    def send(self, message: Message) -> int:
        """Puts a message on its way; returns how many bytes count for it."""
        clock = self._baton.running.clock
        message.number, message.start_s = next(self._numbers), clock
        self._under_way[message.number] = message
        if message.dst == message.src:  # between the threads of one rank there is no link
            message.at_s = clock
            self._offer(message)
            return 0
        message.num_bytes = num_bytes = self.bytes_of(message.payload)
        latency_s, bandwidth_bytes_s = self._rates_of(message)
        link = 0 if self._shared_link else message.src
        message.transfer_s = transfer_s = num_bytes / bandwidth_bytes_s
        start_s = self._leave(message, max(clock, self._egress_free[link]))
        message.start_s = start_s
        self._egress_free[link] = free_s = start_s + transfer_s
        # Added as the next message's start is: another order lets that message overtake this one.
        there_s = (free_s if self._shared_link else start_s) + latency_s
        if there_s <= clock:
            self._deliver(clock, message)
        else:
            self._baton.plan(there_s, partial(self._deliver, there_s, message))
        return num_bytes

    def bytes_of(self, x: Tensor) -> int:
        """Returns how many bytes count for a message."""
        return round(self._message_bytes(x))

    def _rates_of(self, message: Message) -> tuple[float, float]:
        """Returns the latency and the bandwidth of a message's way."""
        return self._latency_s, self._bandwidth_bytes_s

    def _leave(self, message: Message, at_s: float) -> float:
        """Returns when a message begins to leave that its sender's link has room for by then."""
        return at_s

    def _come(self, message: Message, at_s: float) -> float:
        """Returns when a message that comes then is at its receiver's link."""
        return at_s

    def _deliver(self, there_s: float, message: Message) -> None:
        """Takes the message to the receiver's link, which takes one at a time."""
        dst = message.dst
        if self._faults.takes_away(message.src, dst, message.start_s):
            del self._under_way[message.number]
            return
        if self._shared_link:
            message.at_s = there_s
        else:
            there_s = max(self._come(message, there_s), self._ingress_free[dst])
            message.at_s = there_s + message.transfer_s
            self._ingress_free[dst] = message.at_s
        self._offer(message)

    def _offer(self, message: Message, *, first: bool = False) -> None:
        """Binds the message to the first receive that matches, or keeps it for the next."""
        box = message.dst, message.channel, message.tag
        matching = [
            self._expected[box, src][0]
            for src in (message.src, ANY)
            if (box, src) in self._expected
        ]
        if matching:
            expected = min(matching, key=lambda expected: expected.number)
            self._forget(expected)
            expected.message = message
            self._baton.ready(expected, message.at_s)
            return
        queue = self._arrived.setdefault(box, {}).setdefault(message.src, deque())
        queue.insert(0 if first else len(queue), message)

    def expect(self, expected: Expected) -> None:
        """Binds the receive to the first message that matches, or to the next that comes."""
        box, src = expected.box, expected.src
        senders = self._arrived.get(box, {})
        if src == ANY and senders:
            src = min(senders, key=lambda sender: _place(senders[sender][0]))
        if src not in senders:
            expected.number = next(self._numbers)
            self._expected.setdefault((box, src), deque()).append(expected)
            return
        expected.message = senders[src].popleft()
        expected.at_s = expected.message.at_s
        if not senders[src]:
            del senders[src]
            if not senders:
                del self._arrived[box]

    def withdraw(self, expected: Expected) -> None:
        """Takes back a receive that was given to `expect`."""
        message, expected.message, expected.at_s = expected.message, None, math.inf
        if message is None:
            self._forget(expected)
        else:  # the message would come too late
            self._offer(message, first=True)

    def _forget(self, expected: Expected) -> None:
        queue = self._expected[expected.box, expected.src]
        queue.remove(expected)
        if not queue:
            del self._expected[expected.box, expected.src]

    def take(self, message: Message) -> None:
        """Notes that the receiver has the message."""
        del self._under_way[message.number]

    def undelivered(self) -> list[str]:
        """Returns the messages that nobody has taken, in words."""
        return [
            f"rank {m.dst} never took {describe(m.path, m.src, m.tag, m.kind)}, {len(m.payload)} "
            f"elements of {m.payload.dtype}, sent at {m.start_s:.9g} s"
            for m in self._under_way.values()
        ]


class Processors:
    """Tells what communication takes of the processors: nothing here, as each thread has a core.

    This is a door to the wing `lab`: see `lab.simulate.processors`.

    Args:
        baton: the run's baton
    """

    def __init__(self, baton: Baton) -> None:
        self._baton = baton

    def begin_sending(self, rank: int, num_bytes: int) -> float:
        """Waits until a message may leave; returns until when its sender works on it."""
        return 0.0

    def take(self, rank: int, message: Message, *, is_placed: bool) -> None:
        """Has the running thread work on a message of another rank that it has received."""

    def work(self, rank: int, seconds: float) -> None:
        """Has the running thread wait until it has had a core for so long."""
        self.sleep_until(self._baton.running.clock + seconds)

    def sleep_until(self, at_s: float) -> None:
        """Moves the running thread's clock on to that time, unless it is later already."""
        clock = self._baton.running.clock
        if at_s > clock:
            self._baton.sleep(at_s - clock)


def _place(message: Message) -> tuple[float, int]:
    return message.at_s, message.number
