"""How the newcomers that are to hold a replica together find each other, at the register.

A lost rank ends the others of its row, and the launcher starts each of them again, by itself, at
whatever time.  They gather, in one attempt or several:

    row/1            the attempt in which row 1 gathers now, from 0 on
    row/1/4/3        which process has come to its attempt 4 as rank 3
    row/1/4/number   the first of the numbers that its newcomers take

    a process of rank 3   writes itself into the attempt of now
    another is there      that was an earlier process of rank 3, which has ended: this attempt is
                          in vain.  The process begins the next one, unless another has
    all k are there       the first of them takes k numbers for all, and writes them; then all
                          connect a process group, whose keys name the attempt
    the next attempt is begun before all are there       who waits goes there as well
    the next attempt is begun while these work together  a rank of this one has ended: an error

Whoever looks for both looks first whether all are there.  A rank may still leave an attempt that
the last one makes whole just then: those that go on with it find the next one begun, which is an
error, and are started again.

**Why two starts of a rank never mix.**  The launcher starts a rank again once its process has
ended.  A rank is written into an attempt once, and a later process of it finds that done.

**Why nobody waits for ever.**  A rank that ends before all are there is started again, and begins
another attempt, to which the others go.  A rank that is not started again is `gone`: its launcher
says so, and the others end at once.  Beyond that, a process waits for `limit_s`, and names whom it
waits for.

What the row does together before the mesh watches it is done under `watch`, which sees both too: a
rank that ends meanwhile ends the others, which are started again, and each such work has `limit_s`.

    connect the process group
    lay the mesh of devices, which makes groups over the store: no end of a rank ends that by itself
    meet, before each asks to join (`Entrance.ask_to_join`)

Between these stand collectives of the user's `configure_model`.  The end of a process ends them, as
its connections end; of a machine that falls silent, they wait for `torch_waits_s`.

Threads: the training thread; one more for each such work, which is left behind if that hangs.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, TypeVar

import torch.distributed as dist

from lightning_dsgd.elastic.register import GOES_ON, Register
from lightning_dsgd.transport.contract import PeerLost, Timeout, TransportError
from lightning_dsgd.transport.rendezvous import Task

T = TypeVar("T")

_LOOK_EVERY_S: Final = 0.1


class Gathering:
    """One process's way to its row.

    Args:
        register: of the training that it comes to
        rank: the rank that it was started as
        row: the ranks that the processes of its row were started as
        limit_s: how long to wait for them
        torch_waits_s: how long a collective of their process group waits
    """

    def __init__(
        self,
        register: Register,
        rank: int,
        row: Sequence[int],
        limit_s: float,
        torch_waits_s: float,
    ) -> None:
        self._torch_waits_s = torch_waits_s
        self._register = register
        self._rank, self._row, self._limit_s = rank, row, limit_s
        self._column = row.index(rank)
        self._key = f"row/{row[0] // len(row)}"
        self._attempt = 0

    def gather(self, first_size: int) -> int:
        """Waits for the others of the row; returns the number of this newcomer.

        Args:
            first_size: how many ranks there were at the start

        Raises:
            Timeout: with the ranks that have not come
            TransportError: if one of them is not started again, or training does not go on
        """
        register, own = self._register, uuid.uuid4().hex
        end = time.monotonic() + self._limit_s
        while True:
            self._attempt = self._now()
            if register.replace(self._of(self._rank), "", own) != own:
                before = str(self._attempt) if self._attempt else ""
                register.replace(self._key, before, str(self._attempt + 1))
            elif self._await_all(end):
                break
        if self._column == 0:
            numbers = register.new_numbers(len(self._row), first_size)
            register.say(self._of("number"), str(numbers[0]))
            register.read(self._of("number"))  # the store knows, before the others ask it
        self.watch(self._connect, "connect")
        return int(register.read(self._of("number"))) + self._column

    def _now(self) -> int:
        """Returns the attempt in which the row gathers now."""
        return int(self._register.read(self._key) or 0)

    def _of(self, name: object) -> str:
        return f"{self._key}/{self._attempt}/{name}"

    def _await_all(self, end: float) -> bool:
        """Waits until all have come to this attempt; returns False once there is another."""
        register = self._register
        while True:
            missing = [rank for rank in self._row if not register.read(self._of(rank))]
            if not missing:
                return True
            if self._now() != self._attempt:
                return False
            self._check()
            if time.monotonic() > end:
                listed = " and ".join(map(str, missing))
                raise Timeout(
                    f"{self._in_words} must be started again within "
                    f"startup_timeout_s={self._limit_s:g}, as they hold a replica together, but "
                    f"rank {listed} has not come; look at what its launcher printed"
                )
            time.sleep(_LOOK_EVERY_S)

    @property
    def _in_words(self) -> str:
        return f"the ranks {' and '.join(map(str, self._row))}"

    def _check(self) -> None:
        """Raises where to wait for the others of the row is in vain."""
        register = self._register
        others = [rank for rank in self._row if rank != self._rank]
        gone = [rank for rank in others if register.is_gone(rank)]
        if gone:
            raise PeerLost(gone[0], f"is not started again, and rank {self._rank} joins with it")
        training = register.training()
        if training not in GOES_ON:
            raise TransportError(
                f"rank {self._rank} must come while the others train, but their training was "
                f"{training} before the rest of its replica had come; start the job anew"
            )

    def _connect(self) -> None:
        dist.init_process_group(
            "gloo",
            store=self._register.store(self._of("group")),
            rank=self._column,
            world_size=len(self._row),
            timeout=timedelta(seconds=self._torch_waits_s),
        )

    def watch(self, work: Callable[[], T], what: str) -> T:
        """Returns what `work` gives, which all ranks of the row do together, once they are there.

        Args:
            work: is called in another thread, which is left behind if `work` does not return
            what: what they do, for errors: "connect"

        Raises:
            PeerLost: if one of them is not started again
            Timeout: if it takes longer than the limit
            TransportError: if one of them has ended, or training does not go on
        """
        task, end = Task(work), time.monotonic() + self._limit_s
        while not task.wait(_LOOK_EVERY_S):
            if self._now() != self._attempt:
                raise TransportError(
                    f"{self._in_words} gather anew, as one of them has ended while they were to "
                    f"{what}"
                )
            self._check()
            if time.monotonic() > end:
                raise Timeout(
                    f"{self._in_words} must {what} within startup_timeout_s={self._limit_s:g}, as "
                    f"they join together, but rank {self._rank} waits still; look at what the "
                    "others printed"
                )
        try:
            return task.result()
        except TransportError:
            raise
        except RuntimeError as err:
            raise TransportError(
                f"{self._in_words} must {what}, as they join together, got {err}; look at what the "
                "others printed"
            ) from err
