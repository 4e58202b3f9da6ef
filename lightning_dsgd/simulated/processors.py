"""What communication takes of the processors: here nothing; a door to the wing `lab`.

All of this belongs to the holder of the baton.
"""

from __future__ import annotations

from lightning_dsgd.simulated.baton import Baton
from lightning_dsgd.simulated.links import Message


class Processors:
    """Has a core for each thread.

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
