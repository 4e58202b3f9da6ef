"""What communication takes of the processors, which the ranks of a machine share.

A thread that sends, adds or selects needs a core of its machine for so long.  Each core does one
piece of work at a time, in the order in which the threads come; a thread that finds no core free
waits for the first.  A message leaves while its sender works on it, and has been worked on while it
arrived, if a core was free then: so processors add nothing to what a link is measured to take,
unless they are busy.  Computation of a step takes none: its time is given.

All of this belongs to the holder of the baton.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapreplace

import torch
from torch import Tensor

from lightning_dsgd.transport.simulated.baton import Baton


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


class Processors:
    """The cores of all machines, and from when on each is free.

    Args:
        baton: the run's baton
        costs: what communication takes; None: nothing
    """

    def __init__(self, baton: Baton, costs: Costs | None) -> None:
        self._baton = baton
        self.costs = costs
        machines = 0 if costs is None else -(-len(baton.threads) // costs.ranks)
        self._free = [[0.0] * (costs.cores if costs else 0) for _ in range(machines)]

    def begin(self, rank: int, seconds: float, since_s: float | None = None) -> float:
        """Takes a core for so long, once one is free; returns when that is.

        Args:
            rank: a rank, on whose machine the core is
            seconds: how long the core is taken
            since_s: when the core may have begun, which may be past; by default now
        """
        clock = self._baton.running.clock if since_s is None else since_s
        if self.costs is None:
            return clock
        cores = self._free[rank // self.costs.ranks]
        begin_s = max(clock, cores[0])
        heapreplace(cores, begin_s + seconds)
        return begin_s

    def work(self, rank: int, seconds: float, since_s: float | None = None) -> None:
        """Has the running thread wait until it has had a core for so long."""
        if seconds > 0:
            self.sleep_until(self.begin(rank, seconds, since_s) + seconds)

    def sleep_until(self, at_s: float) -> None:
        """Moves the running thread's clock on to that time, unless it is later already."""
        clock = self._baton.running.clock
        if at_s > clock:
            self._baton.sleep(at_s - clock)
