"""At which part of a step a rank's device is, and until when.

The host queues the parts of a step long before the device comes to them, so that their times on the
host say little.  Where a part begins, a mark is put into the stream that computes; the part lasts
until the device has come to the next mark.  So a part has what was queued in it, and also the time
in which the device had nothing to do, as the host was still at that part.

Marks are read once the device has passed them, some steps later.  **No thread waits for one.**
Where a device falls behind by more marks than are kept, no part is timed any more.

The training thread alone calls this.  On a CPU nothing is marked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from lightning_dsgd.lab.accelerators import DeviceTimes, Times

_MOST_UNDER_WAY: Final = 4096


class DeviceParts:
    """Times the parts of one rank's steps on its device.

    Args:
        times: the device's clock; nothing is timed where it is the host's

    Attributes:
        is_on: whether parts are timed at the moment
    """

    def __init__(self, times: Times) -> None:
        self.is_on = False
        self._times = times
        self._has_clock = isinstance(times, DeviceTimes)
        self._part = ""
        self._of_step: list[tuple[str, Any]] = []
        """The marks of the step that has not ended, each with the part that begins there."""
        self._under_way: deque[tuple[str, Any, int]] = deque()
        """The same of steps that have ended, with the step, until they are read."""
        self._at: tuple[str, float, int] = "", 0.0, 0
        """The last mark that was read: the part that begins there, when, and the step."""

    def begin(self) -> None:
        """Times the device's parts from now on, and forgets those before."""
        self._of_step = []
        self._under_way.clear()
        self._part, self._at = "", ("", 0.0, 0)
        self.is_on = self._has_clock

    def end(self) -> None:
        """Times the device's parts no more; marks that are queued are not read."""
        self.is_on = False

    def turn_to(self, part: str) -> str:
        """Ends a part and begins another; returns the one that has ended.

        Args:
            part: as the recorder names it; empty where the device has nothing to do, as a rule
        """
        before = self._part
        if self.is_on and part != before:
            self._part = part
            self._of_step.append((part, self._times.mark()))
            self.is_on = len(self._of_step) + len(self._under_way) < _MOST_UNDER_WAY
        return before

    def end_step(self, number: int) -> Iterator[tuple[str, float, float, int]]:
        """Ends the step of this number.

        Yields:
            each part that the device has ended by now, once: which, since when, until when, and
            its step
        """
        self._under_way.extend((part, mark, number) for part, mark in self._of_step)
        self._of_step = []
        while self._under_way:
            part, mark, step = self._under_way[0]
            times = self._times.seconds([mark])
            if times is None:
                return
            self._under_way.popleft()
            before, begin_s, of_step = self._at
            self._at = part, times[0], step
            if before:
                yield f"device_{before}", begin_s, times[0], of_step
