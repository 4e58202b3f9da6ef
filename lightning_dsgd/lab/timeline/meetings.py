"""When the training thread waits in a collective of torch's, such as Lightning's own.

Lightning broadcasts before every batch whether a rank has got SIGTERM, and sums what is logged with
`sync_dist=True`; users call `torch.distributed.all_reduce`.  A rank that is late makes the others
wait there, and that wait must not be taken for their work.  While a training is recorded, these
functions of `torch.distributed` are timed.  Those that are called with `async_op=True` are not, nor
those that another thread calls.  With NCCL the host does not wait in them: they take no time.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d

_NAMES: Final = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather"),
    *("gather_object", "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("scatter", "scatter_object_list"),
)


class Meetings:
    """Times the collectives that the training thread calls.

    Args:
        tell: is called with the time at which each began, when it is over
        now: the clock
    """

    def __init__(self, tell: Callable[[float], None], now: Callable[[], float]) -> None:
        self._tell = tell
        self._now = now
        self._thread = threading.get_ident()
        self._is_inside = False
        self._originals: list[tuple[Any, str, Any]] = []

    def begin(self) -> None:
        """Begins; to be called by the training thread."""
        for module in (dist, distributed_c10d):
            for name in _NAMES:
                original = getattr(module, name)
                self._originals.append((module, name, original))
                setattr(module, name, self._timed(original))

    def end(self) -> None:
        """Puts everything back."""
        while self._originals:
            setattr(*self._originals.pop())

    def _timed(self, original: Any) -> Any:
        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            is_ours = threading.get_ident() == self._thread and not self._is_inside
            if not is_ours or kwargs.get("async_op"):
                return original(*args, **kwargs)
            self._is_inside, begin_s = True, self._now()
            try:
                return original(*args, **kwargs)
            finally:
                self._is_inside = False
                self._tell(begin_s)

        return timed
