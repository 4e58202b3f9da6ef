"""How all ranks stop at the same batch when one of them is told to.

    a rank gets a signal    request to rank 0
    rank 0                  hold to every rank
    every rank              reply: how many batches it has begun; it begins no other from here on
    rank 0                  stop_at = the largest reply + 1, to every rank
    every rank              goes on until it has begun stop_at batches, then stops

Lanes answer, so that no agreement waits for a training thread that itself waits for another rank's:
who has begun fewer batches than stop_at goes on, who has not is not needed by anyone.
"""

from __future__ import annotations

import contextlib
import math
import threading

import torch

from lightning_dsgd.transport import ANY, Lane, Timeout, Transport, TransportError

_CHECK_PERIOD_S = 0.2
_REQUEST, _HOLD, _REPLY, _STOP_AT = range(4)


class AgreedStop:
    """One rank's part in the agreement.

    Attributes:
        signum: the signal that began it, once it is decided
        origin: the rank that got the signal
        stop_at: how many batches every rank begins
        num_begun: how many this rank has begun
        requested: the signal that this rank got itself, or 0
    """

    def __init__(self, net: Transport) -> None:
        self.signum = 0
        self.origin = -1
        self.stop_at = -1
        self._net = net
        self._lock = threading.Lock()
        self.num_begun = self.requested = 0
        self._holding = False
        self._decided = threading.Event()
        self._replies: dict[int, int] = {}  # on rank 0
        self._lane: Lane | None = net.spawn_lane(self._serve, "stop")
        self._channel: Transport = self._lane.net

    def request(self, signum: int) -> None:
        """Asks all ranks to stop; safe in a signal handler."""
        self.requested = signum
        # A handler may have interrupted the very code that sending needs: hence the thread.
        threading.Thread(target=self._request, args=(signum,), daemon=True).start()

    def may_begin_batch(self) -> bool:
        """To be asked before every batch; counts those that may."""
        with self._lock:
            if not self._holding:
                self.num_begun += 1
                return True
        self.await_decision()
        if self.num_begun >= self.stop_at:
            return False
        self.num_begun += 1
        return True

    def await_decision(self) -> None:
        """Waits until all is decided, which some rank has been told to already."""
        deadline = self._net.now() + self._net.timeout_s
        while not self._decided.wait(_CHECK_PERIOD_S):
            self._net.check()
            if self._net.now() > deadline:
                raise Timeout(
                    f"rank {self._net.rank} has waited {self._net.timeout_s:g} s for rank 0 to say "
                    "at which batch all ranks stop"
                )

    @property
    def is_asked(self) -> bool:
        """Whether this rank knows that one of them was told to stop."""
        return self._holding

    def close(self) -> None:
        """Ends the lane."""
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.stop()

    def _request(self, signum: int) -> None:
        with contextlib.suppress(TransportError):  # a rank is lost: all stop because of that
            if self._net.rank == 0:
                self._begin(signum, 0)
            else:
                self._send(0, _REQUEST, signum, self._net.rank)

    def _begin(self, signum: int, origin: int) -> None:
        with self._lock:
            if self._holding:
                return
            self._holding = True
            self.signum, self.origin = signum, origin
            self._replies[0] = self.num_begun
        self._send_all(_HOLD, 0, 0)
        self._decide_if_complete()

    def _decide_if_complete(self) -> None:
        if len(self._replies) == self._net.world_size:
            self.stop_at = max(self._replies.values()) + 1
            self._send_all(_STOP_AT, self.stop_at, self.origin, self.signum)
            self._decided.set()

    def _serve(self, net: Transport) -> None:
        self._channel = net  # here too: the first message may come before there is a lane
        while True:
            receipt = net.recv(torch.empty(0, dtype=torch.int64), ANY)
            kind, value, origin, signum = receipt.wait(timeout_s=math.inf).tolist()
            if kind == _REQUEST:
                self._begin(value, origin)
            elif kind == _HOLD:
                with self._lock:
                    self._holding = True
                    begun = self.num_begun
                self._send(0, _REPLY, begun, net.rank)
            elif kind == _REPLY:
                self._replies[origin] = value
                self._decide_if_complete()
            else:
                self.stop_at, self.origin, self.signum = value, origin, signum
                self._decided.set()

    def _send_all(self, *words: int) -> None:
        for rank in range(1, self._net.world_size):
            self._send(rank, *words)

    def _send(self, rank: int, *words: int) -> None:
        padded = [*words, 0, 0, 0][:4]
        self._channel.send(torch.tensor(padded), rank)
