"""What communication takes of the processors, which the ranks of a machine share.

A thread that sends, adds or selects needs a core of its machine for so long.  Each core does one
piece of work at a time, in the order in which the threads come; a thread that finds no core free
waits for the first.  A message leaves while its sender works on it, and has been worked on while it
arrived, if a core was free then: so processors add nothing to what a link is measured to take,
unless they are busy.  Computation of a step takes none: its time is given.

All of this belongs to the holder of the baton.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heapreplace

import torch
from torch import Tensor

from lightning_dsgd.simulated.baton import Baton
from lightning_dsgd.simulated.links import Message, Processors


@contextmanager
def on_one_core() -> Iterator[None]:
    """Keeps this process on one core: one rank runs at a time, and the baton passes faster."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[os.getpid() % len(before)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True)
class Costs:
    """What communication takes, in seconds of a core.

    Args:
        cores: how many cores each machine has
        ranks: how many ranks share a machine
        send_s: for a message that leaves
        send_s_per_byte: for each byte of it
        receive_s: for a message that is taken
        receive_s_per_byte: for each byte of it
        add_s_per_byte: for each byte that is added to something, as numbers that are not received
            into a place of their own are
        unpack_s_per_byte: for each byte of selected entries, which come packed in bytes
        placed_s_per_byte: for each byte that is received into a place of its own
    """

    cores: int
    ranks: int
    send_s: float = 0.0
    send_s_per_byte: float = 0.0
    receive_s: float = 0.0
    receive_s_per_byte: float = 0.0
    add_s_per_byte: float = 0.0
    unpack_s_per_byte: float = 0.0
    placed_s_per_byte: float = 0.0

    def to_send(self, num_bytes: float) -> float:
        """Returns the seconds that a message takes as it leaves."""
        return self.send_s + num_bytes * self.send_s_per_byte

    def to_receive(self, num_bytes: float) -> float:
        """Returns the seconds that a message takes while it arrives."""
        return self.receive_s + num_bytes * self.receive_s_per_byte

    def to_take(self, x: Tensor, num_bytes: float, *, is_placed: bool) -> float:
        """Returns the seconds that a message takes once it has arrived."""
        if x.dtype == torch.uint8:
            return num_bytes * self.unpack_s_per_byte
        if x.is_floating_point():
            return num_bytes * (self.placed_s_per_byte if is_placed else self.add_s_per_byte)
        return 0.0


def usual_costs(cores: int, ranks: int) -> Costs:
    """Returns what messages take where nobody has measured it, over TCP.

    So it was with four ranks on two cores (docs/results/simulate/turns_4_1gbit.json).
    """
    return Costs(
        cores,
        ranks,
        send_s=1.8e-5,
        send_s_per_byte=3.8e-10,
        receive_s=2.6e-4,
        receive_s_per_byte=9.5e-10,
        add_s_per_byte=7.3e-11,
        unpack_s_per_byte=5.8e-9,
    )


class SharedProcessors(Processors):
    """The cores of all machines, and from when on each is free.

    Args:
        costs: what communication takes
        baton: the run's baton
    """

    def __init__(self, costs: Costs, baton: Baton) -> None:
        super().__init__(baton)
        self._costs = costs
        num_machines = -(-len(baton.threads) // costs.ranks)
        self._free = [[0.0] * costs.cores for _ in range(num_machines)]

    def begin_sending(self, rank: int, num_bytes: int) -> float:
        """Waits for a core; returns until when the message takes it."""
        seconds = self._costs.to_send(num_bytes)
        begin_s = self._begin(rank, seconds, self._baton.running.clock)
        self.sleep_until(begin_s)
        return begin_s + seconds

    def take(self, rank: int, message: Message, *, is_placed: bool) -> None:
        """Has the running thread work on a message, from when it has begun to arrive."""
        costs, num_bytes = self._costs, message.num_bytes
        seconds = costs.to_receive(num_bytes)
        self._work(rank, seconds, message.at_s - seconds)
        self.work(rank, costs.to_take(message.payload, num_bytes, is_placed=is_placed))

    def work(self, rank: int, seconds: float) -> None:
        """Has the running thread wait until it has had a core for so long."""
        self._work(rank, seconds, self._baton.running.clock)

    def _work(self, rank: int, seconds: float, since_s: float) -> None:
        if seconds > 0:
            self.sleep_until(self._begin(rank, seconds, since_s) + seconds)

    def _begin(self, rank: int, seconds: float, since_s: float) -> float:
        """Takes a core for so long, once one is free; returns when that is.

        Args:
            rank: a rank, on whose machine the core is
            seconds: how long the core is taken
            since_s: when the core may have begun, which may be past
        """
        cores = self._free[rank // self._costs.ranks]
        begin_s = max(since_s, cores[0])
        heapreplace(cores, begin_s + seconds)
        return begin_s
