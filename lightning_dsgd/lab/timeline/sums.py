"""When this rank was ready for each of the sums of a gradient that DDP or FSDP makes.

DDP sums the gradient in a few pieces while the backward pass goes on, and calls a comm hook when a
piece is there.  `Sums` stands in front of that hook, the user's own or the one that averages, and
notes two times for each piece:

    ready  this rank's piece was there, and its sum could begin
    over   the sum was there, on this rank

On a CPU these are times of the host.  On a device they are events in its streams: nobody waits for
one, and a sum is listed once its events have passed, some steps later.

A hook can be registered once for a DDP.  A user who registers one after recording has begun has it
called behind ours.  Where one was registered before and unseen, and where gradients are sparse,
the last gradient's time stands for the last piece's, as `ready`, and no sum is listed.

FSDP in its two versions, `fully_shard` and FullyShardedDataParallel, has no such hook for all that
it does.  It sums each piece by a function of `torch.distributed`, which `Meetings` notes, and so it
gathers weights.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_dsgd.lab.accelerators import Times

_MOST_UNDER_WAY: Final = 4096
"""The most sums whose events are kept; a device is never so far behind."""


@dataclass
class _Sum:
    ready: Any
    num_bytes: int
    over: Any = None
    step: int = 0
    kind: str = "sum"


class Sums:
    """Watches the sums of one model.

    Args:
        times: the clock of the device that computes

    Attributes:
        ready_s: when the host came to the last piece, or to the last gradient; None before
        over_s: when the host was told that a sum was there, for the last time
        sees_sums: whether each sum is seen; else the last gradient alone
        comes: is called by the training thread where a piece is ready
    """

    def __init__(self, times: Times) -> None:
        self.comes: Callable[[], object] = lambda: None
        self.ready_s: float | None = None
        self.over_s: float | None = None
        self.sees_sums = False
        self._times = times
        self._of_step: list[_Sum] = []
        self._under_way: deque[_Sum] = deque(maxlen=_MOST_UNDER_WAY)
        self._is_on = False
        self._hooked: set[int] = set()
        self._handles: list[Any] = []
        self._undo: list[Callable[[], None]] = []

    # ---- the beginning and the end ----

    def see_registrations(self) -> None:
        """Stands in front of the hooks that are registered from now on, until `watch`."""
        original = DistributedDataParallel.register_comm_hook

        def register_comm_hook(ddp: Any, state: Any, hook: Any) -> None:
            original(ddp, state, self._in_front_of(hook))
            self._hooked.add(id(ddp))

        setattr(DistributedDataParallel, "register_comm_hook", register_comm_hook)  # noqa: B010
        self._undo.append(lambda: setattr(DistributedDataParallel, "register_comm_hook", original))

    def watch(self, ddp: Any) -> None:
        """Begins; registers a hook that averages if there is none."""
        self.leave_registrations()
        self._is_on = True
        is_sparse = any(getattr(module, "sparse", False) for module in ddp.modules())
        self.sees_sums = id(ddp) in self._hooked or (not is_sparse and self._register(ddp))
        if not self.sees_sums:
            for parameter in ddp.parameters():
                if parameter.requires_grad:
                    handle = parameter.register_post_accumulate_grad_hook(self._gradient_made)
                    self._handles.append(handle)

    def begin(self, kind: str, num_bytes: int) -> Callable[[], None]:
        """Notes that FSDP sums or gathers; what is returned is called when that is over.

        Args:
            kind: "sum" or "gather"
            num_bytes: the bytes of the whole piece
        """
        begun = _Sum(self._times.mark(), num_bytes, kind=kind)
        if kind == "sum":
            self.ready_s = self._times.host_s()
        self._of_step.append(begun)

        def end() -> None:
            begun.over = self._times.mark()
            if kind == "sum":
                self.over_s = self._times.host_s()

        return end

    def leave_registrations(self) -> None:
        """Lets hooks be registered as before."""
        while self._undo:
            self._undo.pop()()

    def stop(self) -> None:
        """Ends; DDP keeps the hook, which notes nothing any more."""
        self._is_on = False
        self.leave_registrations()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # ---- what was seen ----

    def end_step(self, number: int) -> Iterator[tuple[str, float, float, int, int]]:
        """Ends the step of this number.

        Yields:
            each sum that is over by now, once: its kind, when ready, when over, its bytes, and its
            step
        """
        for each in self._of_step:
            each.step = number
        self._under_way.extend(self._of_step)
        self._of_step = []
        while self._under_way:
            first = self._under_way[0]
            times = None if first.over is None else self._times.seconds([first.ready, first.over])
            if times is None:
                return
            self._under_way.popleft()
            yield first.kind, times[0], times[1], first.num_bytes, first.step

    def forget(self) -> None:
        """Forgets the sums that were begun so far."""
        self._of_step = []
        self._under_way.clear()

    # ---- hooks ----

    def _register(self, ddp: Any) -> bool:
        inner = [(None, functools.partial(_mean, ddp.process_group))]

        def averaging(state: Any, bucket: Any) -> Any:
            return inner[-1][1](inner[-1][0], bucket)

        def register_comm_hook(state: Any, hook: Any) -> None:
            if len(inner) > 1:
                raise RuntimeError(
                    "register_comm_hook must be called once for a DDP, got a second hook; "
                    "register one that calls both"
                )
            inner.append((state, hook))

        averaging.__annotations__ = {}
        try:
            ddp.register_comm_hook(None, self._in_front_of(averaging))
        except RuntimeError:  # there is one that was registered before
            return False
        ddp.register_comm_hook = register_comm_hook
        return True

    def _in_front_of(self, hook: Any) -> Any:
        """Returns a hook that notes the times around another."""

        @functools.wraps(hook)
        def noted(state: Any, bucket: Any) -> Any:
            if not self._is_on:
                return hook(state, bucket)
            buffer = bucket.buffer()
            self.ready_s = self._times.host_s()
            self.comes()
            begun = _Sum(self._times.mark(), buffer.numel() * buffer.element_size())
            self._of_step.append(begun)

            def end(future: Any) -> Any:
                begun.over, self.over_s = self._times.mark(), self._times.host_s()
                return _tensor_of(future)

            return hook(state, bucket).then(end)

        return noted

    def _gradient_made(self, _: torch.Tensor) -> None:
        self.ready_s = self._times.host_s()


def _mean(group: Any, _: None, bucket: Any) -> Any:
    """Averages as DDP does where it has no hook, to the bit."""
    piece = bucket.buffer()
    piece.mul_(1.0 / group.size())
    work: Any = dist.all_reduce(piece, group=group, async_op=True)
    return work.get_future().then(_tensor_of)  # torch takes no future of C++ alone


def _tensor_of(future: Any) -> torch.Tensor:
    value = future.value()
    found: torch.Tensor = value if isinstance(value, torch.Tensor) else value[0]
    return found
