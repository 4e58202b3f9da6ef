"""When a rank saves a checkpoint, or starts the workers of a loader.

Neither is a part of a step, and both stop the training thread, often on one rank alone.  While a
training is recorded, these functions are timed; the outermost call of each kind counts.

    save   `torch.save`, and what writes in its place: torch's distributed checkpoints, safetensors
    start  iter(DataLoader(...)), at the beginning of an epoch
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from torch.utils.data import DataLoader

_WRITERS: Final = (
    ("torch", "save"),
    ("torch.distributed.checkpoint", "save"),
    ("safetensors.torch", "save_file"),
)


class Pauses:
    """Times the calls of one thread.

    Args:
        tell: is called with the kind, and with the times at which the call began and ended
    """

    def __init__(self, tell: Callable[[str, float, float], None]) -> None:
        self._tell = tell
        self._thread = threading.get_ident()
        self._inside: set[str] = set()
        self._originals: list[tuple[Any, str, Any]] = []

    def begin(self) -> None:
        """Begins; to be called by the training thread."""
        for module, name in _WRITERS:
            if module in sys.modules:
                self._time("save", sys.modules[module], name)
        self._time("start", DataLoader, "__iter__")

    def end(self) -> None:
        """Puts everything back."""
        while self._originals:
            setattr(*self._originals.pop())

    def _time(self, kind: str, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread or kind in self._inside:
                return original(*args, **kwargs)
            self._inside.add(kind)
            begin_s = time.monotonic()
            try:
                return original(*args, **kwargs)
            finally:
                self._inside.discard(kind)
                self._tell(kind, begin_s, time.monotonic())

        self._originals.append((owner, name, original))
        setattr(owner, name, timed)
