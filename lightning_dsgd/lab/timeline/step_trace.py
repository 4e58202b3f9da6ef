"""A callback that records where each rank's time goes: `StepTrace`.

**Other callbacks.**  The Trainer calls each hook of all callbacks in their order.  So that no other
callback's work counts as a part of the step, wherever `StepTrace` stands among them, two callbacks
of its own tell it of the hooks: one before all others, where a part of the step is over, and one
after them, where a part begins.  What lies between is "between".

**Ranks that join.**  With `on_loss="continue"` a rank that comes later begins to train alone: the
others are in the midst of their steps, and nobody would answer it.  What ranks agree on when
training starts, it has from the member's state that it takes over, in which callbacks have theirs.

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
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_dsgd.data.units import loaders
from lightning_dsgd.lab import trackers
from lightning_dsgd.lab.accelerators import Times, times_of
from lightning_dsgd.lab.timeline import clocks
from lightning_dsgd.lab.timeline.device_parts import DeviceParts
from lightning_dsgd.lab.timeline.recorder import DEFAULT_MB, Recorder
from lightning_dsgd.lab.timeline.watch import Watch, items_in, watched_in
from lightning_dsgd.trainer import seams

_TRANSFER: Final = "transfer_batch_to_device"
_FETCHES: Final = {"train_dataloader_next": "load", _TRANSFER: "copy"}
"""How the Trainer names, for its profiler, behind a dot, that it waits for the loader, and that it
brings a batch to the device, without the hooks around that; and what that is in the record."""
_MOST_READ_MB: Final = 64.0
"""As much is read for a verdict when training ends; it takes some seconds."""
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
      for rank 0's buffers, and in other collectives of torch's; with `fully_shard` in its
      ModelParallelStrategy the same, and for the weights;
    - with DDP on GPUs, whose waits the training thread does not see: when each sum of the gradient
      could begin, and when it was over, by events that nobody waits for;
    - on GPUs, with any strategy: how long the device was at each part of a step, in the same way;
    - with others: nothing, as the file's first line says.

    With DDP, `lightning-dsgd why run/` says why the job is slow and what would help; its first
    line is told when training ends.  A comm hook of your own goes on as before.

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
        if not isinstance(folder, str | Path):
            raise TypeError(
                f'folder must be a path, got {folder!r}; write StepTrace("run/"), and '
                'StepTrace("run/", skip_steps=10) to leave out the first steps'
            )
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
        self._phase: tuple[str, float] = "", 0.0
        self._watch: Watch | None = None
        self._parts = DeviceParts(Times())
        self._profiler: Any = None
        self._gave_up = False
        self._edges = _First(self), _Last(self)
        self._state: dict[str, Any] = {}
        """What a rank that joins is told; empty where no rank can join."""
        self._told: dict[str, Any] = {}
        """What this rank was told."""

    # ---- the beginning ----

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._stand_at_the_edges(trainer)
        strategy = trainer.strategy
        is_ours = hasattr(strategy, "session")
        is_watched = any(
            seams.is_a(name, strategy) for name in ("DDPStrategy", "ModelParallelStrategy")
        )
        if stage == "fit" and is_watched and not is_ours:
            self._watch = Watch(strategy.root_device)
            self._watch.sums.see_registrations()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        strategy = trainer.strategy
        watched = watched_in(strategy.model)
        if self._watch is not None and watched is None:
            self._watch.end()  # a strategy that stands on Lightning's DDP and sums in its own way
            self._watch = None
        session = getattr(strategy, "session", None)
        shared = self._join() if session and not session.takes_part else self._agree(strategy)
        self._state = {**shared, "boot": clocks.boot_id()} if _may_be_joined(session) else {}
        self._head = {
            **shared,
            "host": socket.gethostname(),
            "device": str(strategy.root_device),
            "parameters": sum(p.numel() for p in pl_module.parameters() if p.requires_grad),
            **_epoch(trainer),
            "accumulates": trainer.accumulate_grad_batches,
            "can_share": _can_share(trainer),
            "pins": getattr(trainer.train_dataloader, "pin_memory", False) is True,
            **self._describe(strategy, self._watch),
        }
        if self._watch is not None:
            self._watch.begin(watched)
            self._watch.see_buffers(watched)
            self._head |= {} if self._watch.is_ddp else {"strategy": self._watch.strategy}
            self._head["sums"] = "seen" if self._watch.sums.sees_sums else "the last"
            self._head["clock"] = "host" if self._watch.is_on_host else "device"
            self._head |= self._watch.of_machine()
        self._parts = (
            DeviceParts(times_of(strategy.root_device))
            if self._watch is None
            else self._watch.parts
        )
        self._time_fetches(trainer.profiler, copies=_copies(trainer, pl_module))
        self._first_step = self._last_step = trainer.global_step
        self._phase, self._gave_up = ("", 0.0), False
        if self.skip_steps == 0:
            self._begin(trainer)
        self._between_s = time.monotonic()

    def _agree(self, strategy: Any) -> dict[str, Any]:
        """Agrees with all ranks on a name of the run and on a clock; returns what they share."""
        told = strategy.broadcast({**_new_run(), **clocks.both_clocks(), "boot": clocks.boot_id()})
        is_one_kernel = told["boot"] == clocks.boot_id()
        net = _network(strategy)
        self._offset_s = 0.0
        if net is not None:
            self._offset_s = clocks.offset_to_rank_0(net)
        elif self._watch is not None:
            self._offset_s = clocks.offset_by_meetings(is_one_kernel, strategy.root_device)
        elif not is_one_kernel:
            self._offset_s = clocks.offset_by_the_hour(told)
        return {name: told[name] for name in _new_run()}

    def _join(self) -> dict[str, Any]:
        """Takes over what the others share, and asks nobody: they are in their steps."""
        told, self._told = self._told, {}
        if not told:
            return _new_run()
        self._offset_s = float(told["offset_s"])
        if told["boot"] != clocks.boot_id():
            self._offset_s += clocks.offset_by_the_hour(told)
        return {name: told[name] for name in _new_run()}

    @property
    def state_key(self) -> str:
        return f"StepTrace({str(self.folder)!r})"

    def state_dict(self) -> dict[str, Any]:
        """Returns what a rank that joins has to know; nothing where none can."""
        if not self._state:
            return {}
        return self._state | clocks.both_clocks() | {"offset_s": self._offset_s}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._told = dict(state_dict)

    @staticmethod
    def _describe(strategy: Any, watch: Watch | None) -> dict[str, Any]:
        if _network(strategy) is not None:
            algorithm = strategy.algorithm
            options = {k: str(v) for k, v in algorithm.hyperparameters().items()}
            return {"strategy": algorithm.name, "hyperparameters": options, "waits": "by rank"}
        sees_waits = watch is not None and watch.is_on_host
        name = type(strategy).__name__.removesuffix("Strategy").lower()
        return {"strategy": name, "waits": "of DDP" if sees_waits else "not seen"}

    def _begin(self, trainer: Any) -> None:
        try:
            self._recorder = Recorder(
                self.folder,
                _rank(trainer),
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
        if self._watch is not None:
            self._watch.recorder = self._recorder
            self._watch.sums.forget()
        self._parts.begin()

    def _time_fetches(self, profiler: Any, copies: bool) -> None:
        """Notes how long the Trainer's profiler, whichever it is, would say a batch takes to get.

        Those of a validation do not count: they are a part of its time.

        Args:
            profiler: the Trainer's
            copies: whether batches are copied to a device
        """
        start, stop, began_s = profiler.start, profiler.stop, dict[str, float]()
        fetches = {name: kind for name, kind in _FETCHES.items() if copies or kind != "copy"}

        def kind_of(action_name: str) -> str | None:
            return fetches.get(action_name.rpartition(".")[2])

        def starts(action_name: str) -> None:
            start(action_name)
            if kind := kind_of(action_name):
                began_s[kind] = time.monotonic()
            if kind == "copy" and self._between_s is not None:
                self._parts.turn_to("copy")

        def stops(action_name: str) -> None:
            kind = kind_of(action_name)
            if kind is not None and kind in began_s:
                begin_s, recorder = began_s.pop(kind), self._recorder
                if recorder is not None and self._between_s is not None:
                    recorder.did(kind, begin_s, time.monotonic())
                    self._parts.turn_to("")
            stop(action_name)

        profiler.start, profiler.stop, self._profiler = starts, stops, profiler

    # ---- a step, as `_First` and `_Last` tell of it ----

    def begin_batch(self, batch: Any) -> None:
        """Notes that the callbacks are done with the start of a batch."""
        if self._recorder is not None:
            if self._between_s is not None:
                self._recorder.fetched(self._between_s, time.monotonic())
            self._recorder.has_batch(items_in(batch))
        self._between_s = None
        self.turn_to("forward")

    def end_backward(self, trainer: Any) -> None:
        """Notes that a backward pass is over."""
        watch = self._watch
        if watch is not None and (watch.sums.sees_sums or not seams.is_accumulating(trainer)):
            watch.backward_ends()
        self.turn_to("")

    def turn_to(self, phase: str) -> None:
        """Ends a phase of the step, and begins another."""
        before, begin_s = self._phase
        self._phase = phase, time.monotonic()
        self._parts.turn_to(phase)
        if before and self._recorder is not None:
            self._recorder.did(before, begin_s, self._phase[1])

    def end_batch(self, trainer: Any) -> None:
        """Notes that a batch is over, and with it, maybe, a step."""
        self.turn_to("")
        step = trainer.global_step
        if step != self._last_step:
            self._last_step = step
            if self._recorder is not None:
                try:
                    self._end_step(step)
                except OSError as error:
                    self._give_up(trainer, error)
            elif step - self._first_step >= self.skip_steps and not self._gave_up:
                self._begin(trainer)
        self._between_s = time.monotonic()

    def _end_step(self, step: int) -> None:
        assert self._recorder is not None
        if self._watch is not None:
            self._watch.end_step(step)
            return
        for kind, begin_s, end_s, of_step in self._parts.end_step(step):
            self._recorder.did(kind, begin_s, end_s, of_step)
        self._recorder.end_step(step)

    def begin_validation(self) -> None:
        """Notes that the ranks validate."""
        self._validation_s = time.monotonic()
        self._parts.turn_to("evaluate")
        if self._recorder is not None and self._between_s is not None:
            self._recorder.fetched(self._between_s, self._validation_s)
        self._between_s = None

    def end_validation(self) -> None:
        """Notes that they have validated."""
        if self._recorder is not None and self._validation_s is not None:
            self._recorder.evaluated(self._validation_s, time.monotonic())
        self._parts.turn_to("")
        self._between_s = time.monotonic()

    def _stand_at_the_edges(self, trainer: Any) -> None:
        """Has the Trainer call the first callback before all others, and the last after them.

        The Trainer gets another list: it goes through this one at the moment.
        """
        first, last = self._edges
        self._leave_the_edges(trainer)
        trainer.callbacks = [first, *trainer.callbacks, last]

    def _leave_the_edges(self, trainer: Any) -> None:
        trainer.callbacks = [each for each in trainer.callbacks if each not in self._edges]

    # ---- the end ----

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        is_ddp = self._watch is not None and trainer.world_size > 1
        self._end(trainer, "training has ended")
        loggers = list(filter(trackers.takes_pages, trainer.loggers))
        if loggers or is_ddp:
            trainer.strategy.barrier()  # every rank's file is whole
        if trainer.is_global_zero and is_ddp:
            rank_zero_info(self._verdict())
        if trainer.is_global_zero and loggers:
            from lightning_dsgd.lab.drawing import browser, picture  # no other rank needs them

            try:
                run = picture.load(self.folder, most_spans=_MOST_SPANS)
                for logger in loggers:
                    trackers.give_page(logger, "timeline", browser.html([run]))
            except (ValueError, OSError) as error:
                warnings.warn(f"the run gets no timeline: {error}", stacklevel=2)

    def _verdict(self) -> str:
        """Returns the first line of `lightning-dsgd why`."""
        from lightning_dsgd.lab.diagnose import times, verdict, words  # no other rank needs them

        more = f"`lightning-dsgd why {self.folder}` says why"
        try:
            mb = sum(path.stat().st_size for path in self.folder.glob("step_trace_*")) / 1e6
            if mb > _MOST_READ_MB:
                return f"{more} this job is as fast as it is"
            seen = times.read(self.folder)
            return f"{words.verdict(verdict.judge(seen), seen.strategy)}; {more}"
        except (ValueError, OSError) as error:
            return f"StepTrace has no verdict: {error}"

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._watch is not None:  # training has not begun
            self._watch.end()
            self._watch = None
        self._leave_the_edges(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end(trainer, f"training has ended: {type(exception).__name__}")
        self._leave_the_edges(trainer)

    def _end(self, trainer: Any, why: str) -> None:
        self._parts.end()
        if self._watch is not None:
            self._watch.end()
        if self._profiler is not None:
            for name in ("start", "stop"):
                vars(self._profiler).pop(name, None)
        self._watch = self._profiler = None
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
        self._recorder, self._gave_up = None, True
        self._parts.end()
        net = _network(trainer.strategy)
        if net is not None:
            net.counters.watch = None
        if self._watch is not None:
            self._watch.end()
        warnings.warn(
            f"StepTrace records no more on rank {_rank(trainer)}, and training goes on: {error}",
            stacklevel=2,
        )


class _First(pl.Callback):
    """Tells a `StepTrace` where parts of a step end, before any other callback hears of it."""

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace

    def on_before_zero_grad(self, *args: Any) -> None:
        self._trace.turn_to("")

    def on_before_backward(self, *args: Any) -> None:
        self._trace.turn_to("")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._trace.end_backward(trainer)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self._trace.end_batch(trainer)

    def on_validation_start(self, *args: Any) -> None:
        self._trace.begin_validation()

    def on_validation_end(self, *args: Any) -> None:
        self._trace.end_validation()


class _Last(pl.Callback):
    """Tells a `StepTrace` where parts of a step begin, once all other callbacks have done."""

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *args: Any) -> None:
        self._trace.begin_batch(batch)

    def on_before_backward(self, *args: Any) -> None:
        self._trace.turn_to("backward")

    def on_before_optimizer_step(self, *args: Any) -> None:
        self._trace.turn_to("optimizer")


def _rank(trainer: Any) -> int:
    """Returns this rank's number, by which others wait for it: one that joins has its own."""
    session = getattr(trainer.strategy, "session", None)
    return int(trainer.global_rank if session is None else session.rank)


def _may_be_joined(session: Any) -> bool:
    return session is not None and bool(session.ranks.can_be_joined)


def _new_run() -> dict[str, Any]:
    """Returns what all files of a run have in common."""
    return {"run": secrets.token_hex(8), "began_unix_s": time.time()}


def _epoch(trainer: Any) -> dict[str, int]:
    """Returns how many steps of each rank an epoch has; empty for streams, which do not say."""
    batches = trainer.num_training_batches
    if math.isinf(batches):
        return {}
    return {"epoch_steps": math.ceil(batches / trainer.accumulate_grad_batches)}


def _can_share(trainer: Any) -> bool:
    """Returns whether `balanced` could have ranks share the micro-batches of a step."""
    loader = trainer.train_dataloader
    try:
        loaders.check(loader)
    except ValueError:
        return False
    is_one_unit = trainer.accumulate_grad_batches == 1 and loader.batch_size == 1
    return trainer.lightning_module.automatic_optimization and not is_one_unit


def _copies(trainer: Any, pl_module: Any) -> bool:
    """Returns whether batches are copied: to a device, or by a hook of the user's own."""
    users = filter(None, (pl_module, trainer.datamodule))
    is_own = any(is_overridden(_TRANSFER, each) for each in users)
    return is_own or trainer.strategy.root_device.type != "cpu"


def _network(strategy: Any) -> Any:
    """Returns the network of a strategy of this package, if open; None of other strategies."""
    session = getattr(strategy, "session", None)
    return session.net if session is not None and session.is_open else None
