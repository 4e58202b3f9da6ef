"""The calls in which the training thread stands still, timed while a training is recorded.

    Meetings   it waits in a collective of torch's for the other ranks
    Pauses     it saves a checkpoint, or starts the workers of a loader

Meanwhile functions of torch's are replaced by functions that call them and take the time.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader

_NAMES: Final = (
    *("all_gather", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object"),
    *("monitored_barrier", "reduce", "reduce_scatter", "scatter", "scatter_object_list"),
)
OF_FSDP: Final = {
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_single"), "sum"),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_single"), "gather"),
}
"""What `fully_shard` and FullyShardedDataParallel call, by older and newer names, and for what."""
_OF_FIRST_FSDP: Final = {"all_gather": "gather", "all_reduce": "sum"}
"""What else FullyShardedDataParallel calls, on CPUs and where nothing is sharded.  Others call it
too: FSDP's own calls are those of its modules."""
_FIRST_FSDP: Final = ("torch.distributed.fsdp._runtime_utils", "torch.distributed.fsdp._flat_param")
_WRITERS: Final = (
    ("torch", "save"),
    ("torch.distributed.checkpoint", "save"),
    ("safetensors.torch", "save_file"),
)
"""What writes checkpoints, with the module that has it."""


class _TimedCalls:
    """Replaces functions of torch's for a while, to time the calls of the thread that makes it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._originals: list[tuple[Any, str, Any]] = []

    def _replace(self, owner: Any, name: str, by: Callable[..., Any]) -> None:
        self._originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, by)

    def end(self) -> None:
        """Puts torch's own functions back, the last replaced first."""
        while self._originals:
            setattr(*self._originals.pop())


class Meetings(_TimedCalls):
    """Times the collectives that the training thread calls, such as Lightning's own.

    Lightning broadcasts before every batch whether a rank has got SIGTERM, and sums what is logged
    with `sync_dist=True`; users call `torch.distributed.all_reduce`.  A rank that is late makes the
    others wait there, and that wait must not be taken for their work.  Collectives that are called
    with `async_op=True` are not timed, nor those that another thread calls.  With NCCL the host
    does not wait in them: they take no time.

    Those of `fully_shard` and FullyShardedDataParallel are noted too, for `Sums`, whichever thread
    calls them: torch has no comm hook for all of them, and `set_custom_reduce_scatter` would take
    the place of the user's own.

    Args:
        tell: is called with the time at which each began, when it is over
        now: the clock

    Attributes:
        note: is called where a model in shards may sum or gather, with which of these and the
            bytes; what it returns is called when that is over.  None: nothing is noted
    """

    def __init__(self, tell: Callable[[float], None], now: Callable[[], float]) -> None:
        super().__init__()
        self.note: Callable[[str, int], Callable[[], None]] | None = None
        self._tell = tell
        self._now = now
        self._inside: set[int] = set()

    def begin(self) -> None:
        """Begins; to be called by the training thread."""
        for module in (dist, distributed_c10d):
            for name in (*_NAMES, *OF_FSDP):
                original = getattr(module, name, None)
                if original is not None:
                    self._replace(module, name, self._timed(original, name))

    def _timed(self, original: Any, name: str) -> Any:
        always, of_first = OF_FSDP.get(name), _OF_FIRST_FSDP.get(name)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            thread = threading.get_ident()
            is_ours = thread == self._thread
            kind = always or (of_first if self.note and _is_called_by_fsdp() else None)
            note = self.note if kind is not None else None
            if thread in self._inside or kwargs.get("async_op") or not (is_ours or note):
                return original(*args, **kwargs)
            self._inside.add(thread)
            over = note(str(kind), _largest([*args, *kwargs.values()])) if note else None
            begin_s = self._now()
            try:
                return original(*args, **kwargs)
            finally:
                self._inside.discard(thread)
                if over is not None:
                    over()
                if is_ours:
                    self._tell(begin_s)

        return timed


def _is_called_by_fsdp() -> bool:
    """Returns whether FullyShardedDataParallel has called the function that calls this one."""
    return sys._getframe(2).f_globals.get("__name__") in _FIRST_FSDP  # noqa: SLF001


def _largest(given: list[Any]) -> int:
    """Returns the bytes of the largest tensor, or list of tensors, of these."""
    lists = [each if isinstance(each, list) else [each] for each in given]
    sizes = (sum(x.nbytes for x in each if isinstance(x, torch.Tensor)) for each in lists)
    return max(sizes, default=0)


class Pauses(_TimedCalls):
    """Times the checkpoints that the training thread saves, and the loaders that it starts.

    Neither is a part of a step, and both stop the training thread, often on one rank alone.  The
    outermost call of each kind counts.

        save   `torch.save`, and what writes in its place: torch's distributed checkpoints,
               safetensors
        start  iter(DataLoader(...)), at the beginning of an epoch

    Args:
        tell: is called with the kind, and with the times at which the call began and ended
    """

    def __init__(self, tell: Callable[[str, float, float], None]) -> None:
        super().__init__()
        self._tell = tell
        self._inside: set[str] = set()

    def begin(self) -> None:
        """Begins; to be called by the training thread."""
        for module, name in _WRITERS:
            if module in sys.modules:
                self._time("save", sys.modules[module], name)
        self._time("start", DataLoader, "__iter__")

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

        self._replace(owner, name, timed)
