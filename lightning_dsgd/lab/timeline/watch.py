"""What a rank of DDP or FSDP records besides a step's phases: sums, meetings, pauses.

`StepTrace` and `LoopTrace` have one each.  All times go to the recorder that is set at the moment;
while none is set, nothing is recorded.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_dsgd.devices import is_on_host, port_of
from lightning_dsgd.lab.accelerators import DeviceTimes, memory_bytes_s, times_of
from lightning_dsgd.lab.timeline import processors
from lightning_dsgd.lab.timeline.calls import Meetings, Pauses
from lightning_dsgd.lab.timeline.device_parts import DeviceParts
from lightning_dsgd.lab.timeline.recorder import ALL, Recorder
from lightning_dsgd.lab.timeline.shards import check_shards, mesh_of, strategy_of
from lightning_dsgd.lab.timeline.sums import Sums

_SHORTEST_GC_S: Final = 5e-4
"""Garbage collections that are shorter are not listed."""
_SHORTEST_PAUSE_S: Final = 5e-4
"""The same for checkpoints, and for loaders that start."""
_ASK_EVERY_S: Final = 1.0
"""How often it is asked how many threads want to run."""


class Watch:
    """Watches a rank of DDP, or of FSDP in its two versions.

    Attributes:
        recorder: what is told; None while nothing is recorded
        strategy: what the model that is watched is: "ddp", SHARDED or FSDP
    """

    def __init__(self, device: torch.device) -> None:
        self.recorder: Recorder | None = None
        self.strategy = "ddp"
        self._device = device
        times = times_of(device)
        self.is_on_host = not isinstance(times, DeviceTimes)
        self.sums = Sums(times)
        self.parts = DeviceParts(times)
        self._meetings = Meetings(self._has_met, self.comes_to_meet)
        self._pauses = Pauses(self._pauses_for)
        self._thread = threading.get_ident()
        self._collecting_s: float | None = None
        self._forward_s: float | None = None
        self._part = ""
        """At which part of the step the device was before it met the others."""
        self._handles: list[Any] = []
        self._waited: processors.Waited | None = None
        self._came: float | None = None
        """How long the thread had waited for a processor when it came to a meeting."""
        self._went: float | None = None
        """The same, when it left that meeting, if that is known by now."""
        self._before = 0.0
        """The same, when it left the meeting before."""
        self._asked_s = float("-inf")

    @property
    def is_ddp(self) -> bool:
        """Whether the model that is watched is a DDP; then the backward pass waits at its end."""
        return self.strategy == "ddp"

    def begin(self, model: Any) -> None:
        """Begins to watch a DDP that is wrapped around a model, or a model in shards.

        To be called by the training thread.
        """
        self._waited = processors.Waited()
        self._before = self._waited.seconds()
        self.sums.comes = self.comes
        self.strategy = strategy_of(model)
        if self.is_ddp:
            self.sums.watch(model)
        else:
            check_shards(model)
            self.sums.leave_registrations()
            self.sums.sees_sums = True
            self._meetings.note = self.sums.begin
        self._meetings.begin()
        self._pauses.begin()
        gc.callbacks.append(self._collects)

    def see_buffers(self, model: Any) -> None:
        """Notes the meetings in which DDP sends the buffers of rank 0, by hooks of the model."""
        has_buffers = self.is_ddp and model.broadcast_buffers and any(True for _ in model.buffers())
        if has_buffers:
            # Before a forward pass DDP waits for the buffers of rank 0.
            self._handles = [
                model.register_forward_pre_hook(self.comes_to_forward),
                model.module.register_forward_pre_hook(self.is_in_forward),
            ]

    def of_machine(self) -> dict[str, Any]:
        """Returns what the first line says of the processors, and of the device's memory."""
        rate = memory_bytes_s(self._device)
        return {
            "cores": processors.usable_cores(),
            "threads": torch.get_num_threads(),
            "processors": processors.GUESSED if self._waited is None else self._waited.how,
            **({} if rate is None else {"memory_bytes_s": round(rate)}),
        }

    def end(self) -> None:
        """Leaves everything as it was."""
        waited, self._waited = self._waited, None
        if waited is not None:
            waited.close()
        self.sums.stop()
        self.parts.end()
        self._pauses.end()
        self._meetings.end()
        if self._collects in gc.callbacks:
            gc.callbacks.remove(self._collects)
        for handle in self._handles:
            handle.remove()
        self._handles, self.recorder = [], None

    def comes(self) -> float:
        """Notes that the thread comes to a meeting, or may; returns when."""
        if self._waited is not None and self.recorder is not None:
            self._came = self._waited.seconds()
        return time.monotonic()

    def leaves(self) -> None:
        """Notes that the thread has left a meeting that is recorded later."""
        if self._waited is not None and self.recorder is not None:
            self._went = self._waited.seconds()

    def met(self, begin_s: float, end_s: float | None = None) -> None:
        """Records that this rank met all others, and waited for them."""
        if self.recorder is not None:
            end_s = time.monotonic() if end_s is None else end_s
            self.recorder.exchanged(begin_s, end_s, self._waited_before())
            self.recorder.waited(begin_s, end_s, ALL, in_lane=False)

    def _waited_before(self) -> float:
        """Returns how long the thread waited for a processor before this meeting."""
        if self._waited is None:
            return 0.0
        now_s = self._waited.seconds()
        came, went = self._came, self._went
        before, self._before = self._before, now_s if went is None else went
        self._came = self._went = None
        return max(0.0, (now_s if came is None else came) - before)

    def backward_ends(self) -> None:
        """Records how long the backward pass waited for the sums, which are over."""
        ready_s, self.sums.ready_s = self.sums.ready_s, None
        if self.is_on_host and self.is_ddp and ready_s is not None:
            self.met(ready_s)

    def end_step(self, number: int) -> None:
        """Ends a step: hands over what is known by now, and writes it."""
        if self.recorder is not None:
            for kind, begin_s, end_s, *figures in self.sums.end_step(number):
                self.recorder.did(kind, begin_s, end_s, *figures)
            for kind, begin_s, end_s, step in self.parts.end_step(number):
                self.recorder.did(kind, begin_s, end_s, step)
            now_s = time.monotonic()
            if now_s - self._asked_s >= _ASK_EVERY_S:
                self._asked_s, running = now_s, processors.num_running()
                if running is not None:
                    self.recorder.note("running", running)
            self.recorder.end_step(number)

    def comes_to_forward(self, ddp: Any, *_: Any) -> None:
        """Notes that DDP begins a forward pass, where it may have to wait for rank 0's buffers."""
        # With accumulation DDP does not send buffers again before it has summed.
        self._forward_s = self.comes_to_meet() if ddp.will_sync_module_buffers() else None

    def is_in_forward(self, *_: Any) -> None:
        """Notes that DDP has sent rank 0's buffers, or, on a device, has queued that."""
        came_s, self._forward_s = self._forward_s, None
        if came_s is None:
            return
        self.parts.turn_to(self._part)
        if self.is_on_host:
            self.met(came_s)

    def comes_to_meet(self) -> float:
        """Notes that the thread comes to where its rank meets all others; returns when."""
        if self.is_ddp:  # FSDP calls its collectives on streams of their own
            self._part = self.parts.turn_to("meet")
        return self.comes()

    def _has_met(self, came_s: float) -> None:
        """Notes that a collective of torch's is over, or, on a device, is queued."""
        if self.is_ddp:
            self.parts.turn_to(self._part)
        self.met(came_s)

    def _pauses_for(self, kind: str, begin_s: float, end_s: float) -> None:
        if self.recorder is not None and end_s - begin_s >= _SHORTEST_PAUSE_S:
            self.recorder.did(kind, begin_s, end_s)

    def _collects(self, phase: str, _: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        now = time.monotonic()
        if phase == "start":
            self._collecting_s = now
        elif self._collecting_s is not None:
            begin_s, self._collecting_s = self._collecting_s, None
            if now - begin_s >= _SHORTEST_GC_S and self.recorder is not None:
                self.recorder.did("gc", begin_s, now)


def watched_in(model: torch.nn.Module) -> torch.nn.Module | None:
    """Returns the DDP in a model, or the model if FSDP has sharded it; None otherwise."""
    inside = getattr(model, "_forward_module", None)  # of Fabric, which lists it as no module
    root = inside if isinstance(inside, torch.nn.Module) else model
    ddps = (each for each in root.modules() if isinstance(each, DistributedDataParallel))
    return next(ddps, root if strategy_of(root) else None)


def device_of(model: torch.nn.Module) -> torch.device:
    """Returns where a model computes, which is not where an offloaded shard lies."""
    parameter: Any = next(model.parameters())
    mesh = mesh_of(parameter)
    if mesh is not None and mesh.device_type != "cpu":
        return port_of(torch.device(mesh.device_type)).device
    device: torch.device = parameter.device
    return device


def items_in(batch: Any) -> int:
    """Returns how many numbers a batch has, in all its tensors."""
    return sum(x.numel() for x in _tensors_in(batch))


def may_be_copied(batch: Any) -> bool:
    """Returns whether any tensor of a batch is in the memory of the CPU."""
    return any(map(is_on_host, _tensors_in(batch)))


def _tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
        return
    parts: Iterable[Any] = ()
    if isinstance(batch, Mapping):  # Hugging Face's are no dict
        parts = batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch[:64]
    for part in parts:
        yield from _tensors_in(part)
