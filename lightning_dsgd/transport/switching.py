"""How soon another thread of this process gets the interpreter, while a network is open."""

from __future__ import annotations

import sys
from typing import Final

_INTERVAL_S: Final = 0.0005
"""How soon another thread gets the interpreter from one that runs Python; by default it is 5 ms.

A lane answers five times as soon so beside plain Python: `benchmarks/lane_latency.py`.
"""


class QuickSwitches:
    """Has threads hand over the interpreter sooner, from `begin` to `end`."""

    def __init__(self) -> None:
        self._before_s = sys.getswitchinterval()

    def begin(self) -> None:
        """Shortens the interval, unless it is shorter already."""
        sys.setswitchinterval(min(self._before_s, _INTERVAL_S))

    def end(self) -> None:
        """Gives back the interval of before."""
        sys.setswitchinterval(self._before_s)
