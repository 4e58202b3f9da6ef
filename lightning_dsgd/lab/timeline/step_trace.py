"""A callback that records where each rank's time goes: `StepTrace`.

**Threads.**  The training thread calls its hooks; the lanes of an algorithm tell the recorder, by
themselves, when they wait: see `timeline.recorder`.
"""

from __future__ import annotations

import math
import secrets
import socket
import time
import warnings
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import torch

from lightning_dsgd.lab import trackers
from lightning_dsgd.lab.timeline.clocks import boot_id, offset_to_rank_0
from lightning_dsgd.lab.timeline.recorder import ALL, DEFAULT_MB, Recorder
from lightning_dsgd.trainer import seams

_MOST_SPANS: Final = 200_000
"""The most spans in the page that a run of W&B or MLflow gets."""


class StepTrace(pl.Callback):
    """Records when each rank computed, waited and was served, into one small file a rank.

    ```python
    L.Trainer(strategy="wagma", callbacks=[lightning_dsgd.StepTrace("run/")])
    ```

    `lightning-dsgd timeline run/` draws it.  What a file says of waiting:

    - with a strategy of this package: how long, and for which rank;
    - with Lightning's DDP on CPUs: how long for the all-reduce, after the last gradient was ready,
      and for rank 0's buffers;
    - with others, and with DDP on GPUs, whose waits the training thread does not see: nothing, as
      the file's first line says.

    When training ends, a W&B run gets the timeline as a panel, and an MLflow run as an artifact.  A
    later fit with the same folder writes over the files.  When a file is full, or cannot be
    written, training goes on without.

    Args:
        folder: where the ranks' files are put; on several nodes, a folder that all of them see, or
            one on each, whose files you collect
        max_mb: the most MB of a rank's file; about 5,000 steps take one
        skip_steps: so many steps at the beginning, which warm up, are not recorded
    """

    def __init__(self, folder: str | Path, max_mb: float = DEFAULT_MB, skip_steps: int = 0) -> None:
        if not max_mb > 0:
            raise ValueError(f"max_mb must be positive, got max_mb={max_mb}; try {DEFAULT_MB:g}")
        if skip_steps < 0:
            raise ValueError(f"skip_steps must not be negative, got {skip_steps}; try 10")
        self.folder = Path(folder)
        self.max_mb = max_mb
        self.skip_steps = skip_steps
        self._recorder: Recorder | None = None
        self._head: dict[str, Any] = {}
        self._offset_s = 0.0
        self._last_step = self._first_step = 0
        self._between_s: float | None = None
        self._validation_s: float | None = None
        self._gradient_s = 0.0
        self._forward_s: float | None = None
        self._handles: list[Any] = []

    # ---- the beginning ----

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        strategy = trainer.strategy
        shared = {"run": secrets.token_hex(8), "began_unix_s": time.time(), "boot": boot_id()}
        shared = strategy.broadcast(shared)
        boot = shared.pop("boot")
        self._head = {
            **shared,
            "host": socket.gethostname(),
            "device": str(strategy.root_device),
            "parameters": sum(p.numel() for p in pl_module.parameters() if p.requires_grad),
            **_epoch(trainer),
            **self._describe(strategy),
        }
        net = _network(strategy)
        if net is not None:
            self._offset_s = offset_to_rank_0(net)
        elif boot != boot_id():
            self._offset_s = time.time() - time.monotonic()
        if self._head["waits"] == "of DDP":
            self._watch_ddp(strategy.model, pl_module)
        self._first_step = self._last_step = trainer.global_step
        if self.skip_steps == 0:
            self._begin(trainer)
        self._between_s = time.monotonic()

    @staticmethod
    def _describe(strategy: Any) -> dict[str, Any]:
        if _network(strategy) is not None:
            algorithm = strategy.algorithm
            options = {k: str(v) for k, v in algorithm.hyperparameters().items()}
            return {"strategy": algorithm.name, "hyperparameters": options, "waits": "by rank"}
        sees_ddp = seams.is_a("DDPStrategy", strategy) and strategy.root_device.type == "cpu"
        name = type(strategy).__name__.removesuffix("Strategy").lower()
        return {"strategy": name, "waits": "of DDP" if sees_ddp else "not seen"}

    def _begin(self, trainer: Any) -> None:
        try:
            self._recorder = Recorder(
                self.folder,
                trainer.global_rank,
                trainer.world_size,
                time.monotonic,
                about=self._head,
                offset_s=self._offset_s,
                max_mb=self.max_mb,
            )
        except OSError as error:
            self._give_up(trainer, error)
            return
        net = _network(trainer.strategy)
        if net is not None:
            net.counters.watch = self._recorder

    def _watch_ddp(self, wrapper: Any, pl_module: Any) -> None:
        """Notes when DDP begins to wait for others.

        After the last gradient it waits for its all-reduce; before a forward pass, for rank 0's
        buffers, if the model has some.
        """

        def ready(_: torch.Tensor) -> None:
            self._gradient_s = time.monotonic()

        def begin(*args: Any) -> None:
            self._forward_s = time.monotonic()

        def begin_inside(*args: Any) -> None:
            begin_s, self._forward_s = self._forward_s, None
            if begin_s is not None:
                self._waited_for_all(begin_s)

        self._handles = [
            wrapper.register_forward_pre_hook(begin),
            pl_module.register_forward_pre_hook(begin_inside),
        ]
        for parameter in pl_module.parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(ready))

    def _waited_for_all(self, begin_s: float) -> None:
        if self._recorder is not None:
            end_s = time.monotonic()
            self._recorder.exchanged(begin_s, end_s)
            self._recorder.waited(begin_s, end_s, ALL, in_lane=False)

    # ---- a step ----

    def on_train_batch_start(self, *args: Any) -> None:
        if self._recorder is not None and self._between_s is not None:
            self._recorder.fetched(self._between_s, time.monotonic())
        self._between_s = None

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self._handles and not seams.is_accumulating(trainer):
            self._waited_for_all(self._gradient_s)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        step = trainer.global_step
        if step != self._last_step:
            self._last_step = step
            if self._recorder is not None:
                try:
                    self._recorder.end_step(step)
                except OSError as error:
                    self._give_up(trainer, error)
            elif step - self._first_step == self.skip_steps:
                self._begin(trainer)
        self._between_s = time.monotonic()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._validation_s = time.monotonic()
        if self._recorder is not None and self._between_s is not None:
            self._recorder.fetched(self._between_s, self._validation_s)
        self._between_s = None

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._recorder is not None and self._validation_s is not None:
            self._recorder.evaluated(self._validation_s, time.monotonic())
        self._between_s = time.monotonic()

    # ---- the end ----

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end(trainer, "training has ended")
        loggers = list(filter(trackers.takes_pages, trainer.loggers))
        if loggers:
            trainer.strategy.barrier()  # every rank's file is whole
        if loggers and trainer.is_global_zero:
            from lightning_dsgd.lab.drawing import page, picture  # no other rank needs them

            try:
                run = picture.load(self.folder, most_spans=_MOST_SPANS)
                for logger in loggers:
                    trackers.give_page(logger, "timeline", page.html([run]))
            except (ValueError, OSError) as error:
                warnings.warn(f"the run gets no timeline: {error}", stacklevel=2)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end(trainer, f"training has ended: {type(exception).__name__}")

    def _end(self, trainer: Any, why: str) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        recorder, self._recorder = self._recorder, None
        net = _network(trainer.strategy)
        if net is not None:
            net.counters.watch = None
        if recorder is not None:
            try:
                recorder.close(why)
            except OSError as error:
                self._give_up(trainer, error)

    def _give_up(self, trainer: Any, error: OSError) -> None:
        """Records no more after an error, such as a full disk, which must not end a training."""
        self._recorder = None
        net = _network(trainer.strategy)
        if net is not None:
            net.counters.watch = None
        warnings.warn(
            f"StepTrace records no more on rank {trainer.global_rank}, and training goes on: "
            f"{error}",
            stacklevel=2,
        )


def _epoch(trainer: Any) -> dict[str, int]:
    """Returns how many steps of each rank an epoch has; empty for streams, which do not say."""
    batches = trainer.num_training_batches
    if math.isinf(batches):
        return {}
    return {"epoch_steps": math.ceil(batches / trainer.accumulate_grad_batches)}


def _network(strategy: Any) -> Any:
    """Returns the network of a strategy of this package, if open; None of other strategies."""
    session = getattr(strategy, "session", None)
    return session.net if session is not None and session.is_open else None
