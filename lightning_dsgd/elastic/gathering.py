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
    the next attempt is begun while the group connects   a rank of this one has ended: an error

Whoever looks for both looks first whether all are there, which stays true.  So of all that have
come to one attempt, none goes on to the next where another stays.

**Why two starts of a rank never mix.**  The launcher starts a rank again once its process has
ended.  A place in an attempt is written once, and a later process finds it taken.

**Why nobody waits for ever.**  A rank that ends before all are there is started again, and begins
another attempt, to which the others go; so does one that ends while the group connects, and then
the others end too, and are started again.  A rank that is not started again is `gone`: its launcher
says so, and the others end at once.  Beyond that, a process waits for `limit_s` at each of the two
points, and names whom it waits for.  Once the group is connected, the end of a rank ends every
collective in it (`Row.meet`); and from `Entrance.ask_to_join` on the mesh watches.

Threads: the training thread; one more connects the process group, and is left behind if it hangs.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from lightning_dsgd.elastic.register import GOES_ON, Register
from lightning_dsgd.transport.contract import PeerLost, Timeout, TransportError
from lightning_dsgd.transport.rendezvous import Task

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
        self._place = row.index(rank)
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
        if self._place == 0:
            numbers = register.new_numbers(len(self._row), first_size)
            register.say(self._of("number"), str(numbers[0]))
            register.read(self._of("number"))  # the store knows, before the others ask it
        self._watch(self._connect)
        return int(register.read(self._of("number"))) + self._place

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
            self._check(missing)
            if time.monotonic() > end:
                listed = " and ".join(map(str, missing))
                raise Timeout(
                    f"the ranks {' and '.join(map(str, self._row))} must be started again within "
                    f"startup_timeout_s={self._limit_s:g}, as they hold a replica together, but "
                    f"rank {listed} has not come; look at what its launcher printed"
                )
            time.sleep(_LOOK_EVERY_S)

    def _check(self, missing: Sequence[int]) -> None:
        """Raises where to wait for these ranks is in vain."""
        register = self._register
        gone = [rank for rank in missing if register.is_gone(rank)]
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
            rank=self._place,
            world_size=len(self._row),
            timeout=timedelta(seconds=self._torch_waits_s),
        )

    def _watch(self, connect: Callable[[], Any]) -> None:
        """Has the process group connected; raises if that cannot come about any more."""
        task, end = Task(connect), time.monotonic() + self._limit_s
        while not task.wait(_LOOK_EVERY_S):
            if self._now() != self._attempt:
                raise TransportError(
                    f"the ranks {' and '.join(map(str, self._row))} gather anew, as one of them "
                    f"has ended while rank {self._rank} connected to it"
                )
            if time.monotonic() > end:
                raise Timeout(
                    f"rank {self._rank} has waited {self._limit_s:g} s to connect to the others of "
                    f"the ranks {' and '.join(map(str, self._row))}, which join with it"
                )
        task.result()
