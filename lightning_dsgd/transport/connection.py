"""One TCP connection between two ranks: messages one way, news both ways.

Messages travel on the connection that their sender made, news of life and death (heartbeat,
farewell, loss) in both directions.

**Which links are whole.**  Ranks other than 0 do not send heartbeats to each other; there the
kernel watches.  It asks the other end of a connection on which nothing comes, and gives the
connection up once nothing has been answered for `heartbeat_timeout_s`.  The kernel of a peer that
is busy or stopped answers, but a peer that takes nothing of what is sent to it for so long is lost
as well.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import torch
from torch import Tensor

from lightning_dsgd.buffers import buffer, copy_of
from lightning_dsgd.transport.contract import Work
from lightning_dsgd.transport.mailboxes import Expected, Mailboxes
from lightning_dsgd.transport.messages import DTYPES, HEADER, bytes_of, is_news
from lightning_dsgd.transport.works import Done, Life, Sending

EMPTY: Final = torch.empty(0, dtype=torch.uint8)
_UNREAD_BYTES: Final = 1 << 16
_READS_IN_A_ROW: Final = 16
_CUT: Final = (
    errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN,
)  # fmt: skip
"""The errors with which the kernel gives up a connection over which nothing comes through."""
_LONGEST_KEEPALIVE_S: Final = 32767  # the kernel takes no more
_LONGEST_USER_TIMEOUT_MS: Final = 2**31 - 1


class Owner(Life, Protocol):
    """The mesh, as its connections know it: what they tell it, and what they ask it."""

    mailboxes: Mailboxes
    heartbeat_timeout_s: float

    def lose(self, rank: int, reason: str) -> None:
        """Hears that a rank is lost."""
        ...

    def hear(self, rank: int) -> None:
        """Hears that a rank has shown that it is alive."""
        ...

    def hear_newcomer(self, rank: int) -> None:
        """Hears that a rank has connected whose address was not known."""
        ...

    def hear_news(
        self, connection: Connection, kind: int, key: tuple[int, int], text: bytes
    ) -> None:
        """Hears news from the other end of a connection."""
        ...

    def hear_end(self, connection: Connection) -> None:
        """Hears that a connection has ended."""
        ...

    def accept(self, sender: int, nbytes: int, kind: int, code: int) -> bool:
        """Accepts a header that announces a message, and returns whether the header does."""
        ...


class Connection:
    """A connection whose other end has proved which rank it is.

    Any thread may send: `_lock` guards the queue of what is left to send, the socket's writing end
    and `_failure`.  All else belongs to the mesh's thread, which alone reads, closes, and writes
    `is_ending`.

    Args:
        sock: a socket that `prepare` has made ready
        rank: the rank at the other end
        owner: the mesh
        attend: has the mesh's thread look after this connection, which has something left to send
    """

    def __init__(
        self,
        sock: socket.socket,
        rank: int,
        owner: Owner,
        attend: Callable[[Connection], None],
    ) -> None:
        self.rank = rank
        self.sock = sock
        self.is_ending = False  # the peer has said farewell on it
        self._owner, self._attend = owner, attend
        self._failure: OSError | None = None
        self._lock = threading.Lock()
        self._queue: deque[tuple[memoryview, Sending | None]] = deque()
        self._is_open = False  # a message has begun that comes chunk by chunk
        self._behind: deque[tuple[memoryview, Sending | None]] = deque()  # what leaves after it
        self._unread = bytearray(_UNREAD_BYTES)
        self._filled = 0
        self._header: tuple[int, int, int, int, int] | None = None
        self._payload = EMPTY
        self._expected: Expected | None = None  # the receive that follows the message
        self._target = memoryview(b"")
        self._read = 0

    def is_cut(self) -> bool:
        """Returns whether the connection ended as nothing came through, and not by the peer."""
        with self._lock:  # a thread that has just met the error is to write it down first
            return self._failure is not None and self._failure.errno in _CUT

    # ---- sending, from any thread ----

    def send(self, header: bytes, x: Tensor, *, copy: bool) -> Work[None]:
        """Hands over what the connection takes at once; the mesh's thread sends the rest."""
        payload = bytes_of(x)
        with self._lock:
            queue = self._behind if self._is_open else self._queue
            waits = self._is_open or bool(self._queue)
            sent = 0 if waits else self._try_send([memoryview(header), payload])
            if sent == len(header) + len(payload):
                return Done(None)
            if sent < len(header):
                queue.append((memoryview(header)[sent:], None))
            rest = payload[max(0, sent - len(header)) :]
            sending = Sending(self._owner, self.rank, x)
            if copy:
                rest = bytes_of(copy_of(x.detach().view(torch.uint8)[x.nbytes - len(rest) :]))
            queue.append((rest, sending))
        self._attend(self)
        return Done(None) if copy else sending

    def begin(self, header: bytes) -> None:
        """Begins a message that comes chunk by chunk; what is sent meanwhile leaves behind it."""
        with self._lock:
            self._queue.append((memoryview(header), None))
            self._is_open = True

    def add(self, chunk: Tensor, *, is_last: bool) -> Sending:
        """Adds the next chunk of that message, which must stay as it is until it is sent."""
        sending = Sending(self._owner, self.rank, chunk)
        with self._lock:
            self._queue.append((bytes_of(chunk), sending))
            if is_last:
                self._is_open = False
                self._queue.extend(self._behind)
                self._behind.clear()
        if not self.flush():
            self._attend(self)
        return sending

    def flush(self) -> bool:
        """Sends what the connection takes; returns whether nothing is left."""
        with self._lock:
            while self._queue:
                sent = self._try_send([piece for piece, _ in list(self._queue)[:16]])
                while self._queue and sent >= len(self._queue[0][0]):
                    piece, sending = self._queue.popleft()
                    sent -= len(piece)
                    if sending is not None:
                        sending.finish()
                if self._queue:
                    piece, sending = self._queue[0]
                    self._queue[0] = (piece[sent:], sending)
                    if not sent:
                        return False
            return True

    def drop_queue(self) -> None:
        """Drops what is left to send, which nobody will read."""
        with self._lock:
            self._queue.extend(self._behind)
            self._behind.clear()
            while self._queue:
                sending = self._queue.popleft()[1]
                if sending is not None:
                    sending.finish()

    def _try_send(self, pieces: list[memoryview]) -> int:
        try:
            return self.sock.sendmsg(pieces)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as err:
            # The reading side finds out that the connection has ended, and says so; the kernel
            # tells only once why it has ended.
            self._failure = err
            return sum(len(piece) for piece in pieces)

    # ---- receiving, in the mesh's thread ----

    def read(self) -> bool:
        """Reads what has come and cuts it into messages; returns False at the end of the stream."""
        for _ in range(_READS_IN_A_ROW):
            direct = self._header is not None and len(self._target) - self._read >= _UNREAD_BYTES
            target = (
                self._target[self._read :] if direct else memoryview(self._unread)[self._filled :]
            )
            try:
                count = self.sock.recv_into(target)
            except (BlockingIOError, InterruptedError):
                return True
            except OSError as err:
                with self._lock:
                    self._failure = err
                return False
            if not count:
                return False
            self._owner.hear(self.rank)
            if direct:
                self._read += count
                self._end_message_if_read()
            else:
                self._filled += count
                if not self._cut():
                    return False
        return True

    def _cut(self) -> bool:
        """Cuts headers and payloads out of what was read; returns False at what is no header."""
        unread, at = memoryview(self._unread), 0
        while True:
            left = self._filled - at
            if self._header is None:
                if left < HEADER.size:
                    break
                header = HEADER.unpack_from(unread, at)
                if not self._owner.accept(self.rank, *header[2:]):
                    return False
                self._begin_message(header)
                at += HEADER.size
            else:
                count = min(left, len(self._target) - self._read)
                if not count:
                    break
                self._target[self._read : self._read + count] = unread[at : at + count]
                self._read += count
                at += count
            self._end_message_if_read()
        self._unread[: self._filled - at] = unread[at : self._filled]
        self._filled -= at
        return True

    def _begin_message(self, header: tuple[int, int, int, int, int]) -> None:
        channel, tag, nbytes, kind, code = self._header = header
        if is_news(kind):
            self._payload = torch.empty(nbytes, dtype=torch.uint8)
        else:
            dtype = DTYPES[code]
            numel = nbytes // dtype.itemsize
            expected = self._owner.mailboxes.claim(self.rank, (channel, tag), dtype, nbytes)
            into = None if expected is None else expected.into
            self._payload = buffer(numel, dtype) if into is None else into
            if expected is not None and expected.follows:
                self._expected = expected
                expected.follow(self.rank, kind, self._payload)
        self._target = bytes_of(self._payload)
        self._read = 0

    def read_elsewhere(self) -> None:
        """Reads the rest of a message into other memory: its receive has been broken off."""
        if self._header is not None and not is_news(self._header[3]):
            payload = buffer(self._payload.numel(), self._payload.dtype)
            bytes_of(payload)[: self._read] = self._target[: self._read]
            self._payload, self._target, self._expected = payload, bytes_of(payload), None

    def _end_message_if_read(self) -> None:
        if self._header is None or self._read < len(self._target):
            if self._expected is not None:
                self._expected.num_come = self._read
            return
        self._expected = None
        channel, tag, _, kind, _ = self._header
        payload = self._payload
        self._header, self._payload, self._target = None, EMPTY, memoryview(b"")
        if is_news(kind):
            self._owner.hear_news(self, kind, (channel, tag), bytes(payload.numpy()))
        else:
            self._owner.mailboxes.deliver(self.rank, (channel, tag), kind, payload)


def prepare(sock: socket.socket, within_s: float) -> None:
    """Has the kernel send at once, and give up once the other end has been silent for so long."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ask_every_s = min(max(1, int(within_s / 4)), _LONGEST_KEEPALIVE_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ask_every_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ask_every_s)
    # Limits how long data and the kernel's questions stay unanswered, not how many questions.
    milliseconds = min(int(within_s * 1000), _LONGEST_USER_TIMEOUT_MS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, milliseconds))
    sock.setblocking(False)
