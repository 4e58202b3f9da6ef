"""`LoopTrace`: `StepTrace`'s record, of a loop in plain PyTorch, in Fabric or of Hugging Face's.

**Hugging Face's Trainer**, which imports nothing of this package, calls each of its callbacks by
name at these points, with the wrapped model at none of them (`_Events`):

    on_train_begin
        for each step: its batches are read; on_step_begin; forward and backward passes, in which
        the model is found; the optimizer; on_step_end
        then, where it is due: on_log; an evaluation with on_prediction_step, on_log, on_evaluate;
        on_save
    on_train_end

What lies between on_step_begin and the event before it was spent on the loader.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook

from lightning_dsgd.lab.timeline.clocks import boot_id, offset_by_meetings
from lightning_dsgd.lab.timeline.recorder import DEFAULT_MB, Recorder
from lightning_dsgd.lab.timeline.shards import num_weights
from lightning_dsgd.lab.timeline.watch import Watch, device_of, items_in, may_be_copied, watched_in

T = TypeVar("T")
_NEEDED: Final = "LoopTrace needs a model in DistributedDataParallel, or sharded by FSDP"
_TRY: Final = "wrap it first, or use StepTrace under Lightning's Trainer"


class _Events:
    """Turns the events of Hugging Face's Trainer into what `LoopTrace` notes."""

    _since_s = 0.0
    _evaluating_s: float | None = None

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Takes every other event, also those of later versions, and does nothing."""
        if not name.startswith("on_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._goes_on

    def on_train_begin(self: Any, *_: Any, optimizer: Any = None, **__: Any) -> None:
        """Waits for the model, which is wrapped by now, to run."""
        self._await_model(optimizer)
        self._goes_on()

    def on_step_begin(self: Any, *_: Any, **__: Any) -> None:
        """Notes that the batches of a step have been read."""
        self._has_batch(self._since_s)

    def on_step_end(self: Any, *_: Any, **__: Any) -> None:
        """Notes the end of the step that the trainer has made."""
        self._end_step()
        self._goes_on()

    def on_prediction_step(self: Any, *_: Any, **__: Any) -> None:
        """Notes an evaluation, which began with the event before; on the device, just now."""
        if self._evaluating_s is None:
            self._evaluating_s = self._since_s
            self._turn_to("evaluate")

    def on_evaluate(self: Any, *_: Any, **__: Any) -> None:
        """Notes the end of an evaluation."""
        began_s, self._evaluating_s = self._evaluating_s, None
        self._has_evaluated(self._since_s if began_s is None else began_s)
        self._goes_on()

    def on_predict(self: Any, *_: Any, **__: Any) -> None:
        """Notes the end of a prediction, which is no evaluation."""
        self._evaluating_s = None
        self._turn_to("")
        self._goes_on()

    def on_train_end(self: Any, *_: Any, **__: Any) -> None:
        """Ends the record, and closes its file, as the training has ended."""
        self._stop_finding()
        if self._watch is not None:
            self.__exit__(None, None, None)

    def _goes_on(self, *_: Any, **__: Any) -> None:
        self._since_s = time.monotonic()


class LoopTrace(_Events):
    """Records where each rank's time goes in a loop that trains with DDP or FSDP.

    ```python
    model = DistributedDataParallel(model)    # or fully_shard(model), or fabric.setup(...)
    with lightning_dsgd.LoopTrace("run/", model, optimizer) as trace:
        for x, y in trace.batches(loader):
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
        with trace.evaluating():
            evaluate(model)

    transformers.Trainer(..., callbacks=[lightning_dsgd.LoopTrace("run/")])
    ```

    `lightning-dsgd why run/` says why the job is slow, and `timeline` draws it.
    A step ends where the next batch is asked for, if gradients were summed.  All ranks have to make
    a `LoopTrace`, together, before the first backward pass.  A comm hook of your own is called
    behind ours if you register it after that; one that was registered before is kept too, but then
    the last gradient's time alone is seen.  Not for `model.join()`.

    With `fully_shard`, and with FSDP's first version, FullyShardedDataParallel, each sum of
    gradients and each gather of weights is seen, if the model is sharded among all ranks.  On GPUs
    `why` does not judge that, as it does not see the waits.

    Hugging Face's Trainer calls it by its events: put it last among the callbacks.

    Args:
        folder: where the ranks' files are put
        model: the DDP, what FSDP has sharded, or what Fabric has wrapped around it; None
            as a callback of Hugging Face's Trainer, where it is what is trained
        optimizer: whose steps are timed; without it they count as "between"
        max_mb: the most MB of a rank's file
    """

    def __init__(
        self,
        folder: str | Path,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        max_mb: float = DEFAULT_MB,
    ) -> None:
        if not max_mb > 0:
            raise ValueError(f"max_mb must be positive, got max_mb={max_mb}; try {DEFAULT_MB:g}")
        found = None if model is None else watched_in(model)
        if model is not None and found is None:
            raise ValueError(f"{_NEEDED}, got {type(model).__name__}; {_TRY}")
        self._model = found
        self._folder, self._max_mb = Path(folder), max_mb
        self._optimizer = getattr(optimizer, "optimizer", optimizer)  # Fabric wraps it
        self._recorder: Recorder | None = None
        self._handles: list[Any] = []
        self._finding: list[Any] = []
        self._counts_inputs = False
        self._watch: Watch | None = None
        self._num_steps = 0
        self._forward_s: float | None = None
        self._backward_s: float | None = None
        self._between_s: float | None = None
        self._optimizer_s = 0.0

    def __enter__(self) -> LoopTrace:
        if self._model is None:
            raise ValueError(f"{_NEEDED}, got none; {_TRY}")
        self._begin(self._model)
        return self

    def _await_model(self, optimizer: Any) -> None:
        """Begins with the first forward pass of a model that can be watched."""
        self._optimizer, self._counts_inputs = getattr(optimizer, "optimizer", optimizer), True

        def runs(module: torch.nn.Module, inputs: Any) -> None:
            found = watched_in(module)
            if found is not None:
                self._stop_finding()
                self._begin(found)
                self._forward_s = time.monotonic()  # its own hooks begin with the next one

        self._finding = [register_module_forward_pre_hook(runs)]

    def _stop_finding(self) -> None:
        while self._finding:
            self._finding.pop().remove()

    def _begin(self, model: torch.nn.Module) -> None:
        device = device_of(model)
        self._watch = watch = Watch(device)
        told = [{"run": secrets.token_hex(8), "began_unix_s": time.time(), "boot": boot_id()}]
        dist.broadcast_object_list(told, device=device)
        is_one_boot = told[0].pop("boot") == boot_id()
        offset_s = offset_by_meetings(is_one_boot, device)
        watch.begin(model)
        self._open(model, told[0], offset_s)
        if self._recorder is None:
            return
        self._handles = [
            model.register_forward_pre_hook(self._begins_forward, with_kwargs=True),
            model.register_forward_hook(self._ends_forward),
        ]
        if self._optimizer is not None:
            self._handles += [
                self._optimizer.register_step_pre_hook(self._begins_step),
                self._optimizer.register_step_post_hook(self._ends_step),
            ]
        watch.see_buffers(model)  # behind the hook that begins the forward pass
        self._between_s = time.monotonic()

    def _open(self, model: torch.nn.Module, told: dict[str, Any], offset_s: float) -> None:
        """Opens this rank's file."""
        watch = self._watch
        assert watch is not None
        try:
            self._recorder = watch.recorder = Recorder(
                self._folder,
                dist.get_rank(),
                dist.get_world_size(),
                time.monotonic,
                about={
                    **told,
                    "host": socket.gethostname(),
                    "device": str(device_of(model)),
                    "parameters": num_weights(model),
                    "strategy": watch.strategy,
                    "waits": "of DDP" if watch.is_on_host else "not seen",
                    "sums": "seen" if watch.sums.sees_sums else "the last",
                    "clock": "host" if watch.is_on_host else "device",
                    **watch.of_machine(),
                },
                offset_s=offset_s,
                max_mb=self._max_mb,
            )
            watch.parts.begin()
        except OSError as error:
            self._give_up(error)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if kind is None:
            self._end_step()
        self._leave()
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            try:
                recorder.close("training has ended" if kind is None else f"ended: {kind.__name__}")
            except OSError as failed:
                self._give_up(failed)

    def _leave(self) -> None:
        """Leaves everything as it was."""
        self._stop_finding()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._watch is not None:
            self._watch.end()

    def _give_up(self, error: OSError) -> None:
        """Records no more after an error, such as a full disk, which must not end a training."""
        self._recorder = None
        self._leave()
        warnings.warn(
            f"LoopTrace records no more on rank {dist.get_rank()}, and training goes on: {error}",
            stacklevel=2,
        )

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yields the batches of a loader, and times how long it takes to get them."""
        iterator = iter(loader)
        while True:
            self._end_step()
            self._turn_to("")
            began_s = time.monotonic()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._has_batch(began_s, items_in(batch))
            self._may_copy(batch)
            yield batch

    def _has_batch(self, began_s: float, num_items: int = 0) -> None:
        """Notes that the loader has been waited for since `began_s`."""
        if self._recorder is not None:
            now = time.monotonic()
            self._recorder.did("load", began_s, now)
            self._recorder.fetched(began_s if self._between_s is None else self._between_s, now)
            self._recorder.has_batch(num_items)
        self._between_s = None

    def _may_copy(self, batch: Any) -> None:
        """Notes that a batch is there, which may have to be copied before the forward pass."""
        if self._watch is not None and self._watch.parts.is_on and may_be_copied(batch):
            self._watch.parts.turn_to("copy")

    def _turn_to(self, part: str) -> None:
        """Notes that a part of the step is queued on the device from now on."""
        if self._watch is not None:
            self._watch.parts.turn_to(part)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Times a validation."""
        self._end_step()
        self._turn_to("evaluate")
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._has_evaluated(began_s)

    def _has_evaluated(self, began_s: float) -> None:
        self._turn_to("")
        if self._recorder is not None:
            self._recorder.evaluated(began_s, time.monotonic())

    def _end_step(self) -> None:
        watch, recorder = self._watch, self._recorder
        if self._finding:
            raise ValueError(
                f"{_NEEDED}, got none in the first step; start two ranks or more, with torchrun"
            )
        if watch is None:
            raise RuntimeError(
                'LoopTrace must be entered first; write "with LoopTrace(...) as trace:"'
            )
        if recorder is None:  # it has given up
            return
        summed_s, over_s = watch.sums.ready_s, watch.sums.over_s
        if summed_s is None:
            return
        if self._backward_s is not None:
            recorder.did("backward", self._backward_s, over_s or summed_s)
        if watch.is_on_host and watch.is_ddp:
            watch.met(summed_s, over_s or summed_s)
        self._turn_to("")
        watch.sums.ready_s = watch.sums.over_s = self._backward_s = None
        self._num_steps += 1
        try:
            watch.end_step(self._num_steps)
        except OSError as error:
            self._give_up(error)
        self._between_s = time.monotonic()

    def _begins_forward(self, _: Any, args: Any, kwargs: Any) -> None:
        self._forward_s = time.monotonic()
        if torch.is_grad_enabled():
            self._turn_to("forward")
        if self._counts_inputs and self._recorder is not None and torch.is_grad_enabled():
            self._recorder.has_batch(items_in(args) + items_in(kwargs))

    def _ends_forward(self, *_: Any) -> None:
        self._backward_s = time.monotonic()
        if torch.is_grad_enabled():
            self._turn_to("backward")
        if self._recorder is not None and self._forward_s is not None and torch.is_grad_enabled():
            self._recorder.did("forward", self._forward_s, self._backward_s)

    def _begins_step(self, *_: Any) -> None:
        self._optimizer_s = time.monotonic()
        self._turn_to("optimizer")
        if self._watch is not None and self._watch.is_ddp and self._watch.sums.ready_s is not None:
            self._watch.leaves()
        if self._watch is not None and not self._watch.sums.sees_sums:
            self._watch.sums.over_s = self._optimizer_s

    def _ends_step(self, *_: Any) -> None:
        self._turn_to("")
        if self._recorder is not None:
            self._recorder.did("optimizer", self._optimizer_s, time.monotonic())
