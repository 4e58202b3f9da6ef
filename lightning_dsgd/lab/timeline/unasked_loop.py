"""`LoopTrace`'s record of a loop that does not call it: `lightning-dsgd why` begins one.

A loop says nothing of itself, so its parts are seen by what torch does in it:

    load        a `DataLoader` is asked for its next batch, or for its iterator
    copy        Fabric brings a batch of its loaders to the device
    forward     that of the model that is recorded, in DDP or in FSDP
    backward    from there until the sums are over
    optimizer   `step` of any of torch's optimizers
    evaluate    from `model.eval()` to `model.train()`, or to a forward pass with gradients
    a step      ends with the optimizer's, or where the next forward pass begins

**What the user could notice.**  Nothing is put on the model, so that it can be copied and saved as
before: classes and modules of torch are replaced, in this process alone.  No collective is called.
An error in here ends the record, and is told to nobody but the watcher.

**What is not seen.**  Two models in DDP or FSDP that take turns; a DDP of some ranks only; FSDP on
devices, where ranks wait in gathers that the host does not see; a forward pass that torch compiles
together with the DDP, whose time then belongs to the backward pass; a loader that is no
`DataLoader`: its time is "between".  A script's own copy to a device is not seen as such: there the
copy is what the device does between a batch in the CPU's memory and the forward pass.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lightning_dsgd.lab.timeline.clocks import boot_id
from lightning_dsgd.lab.timeline.loop_trace import LoopTrace
from lightning_dsgd.lab.timeline.recorder import FSDP, SHARDED
from lightning_dsgd.lab.timeline.shards import (
    ON_DEVICES,
    class_of_forward,
    may_be_root,
    module_of,
)
from lightning_dsgd.lab.timeline.watch import Watch, device_of, items_in

_FABRICS: Final = "lightning.fabric.wrappers"


class UnaskedLoop(LoopTrace):
    """Records a loop from the outside.

    Args:
        folder: where the ranks' files are put
        face: how the loop is written: "plain", "fabric" or "hugging_face"
        run: a name of the run, which all ranks have
        tell: is called when nothing more is recorded, with the reason
    """

    def __init__(self, folder: Path, face: str, run: str, tell: Callable[[str], None]) -> None:
        super().__init__(folder)
        self._face, self._run, self._tell = face, run, tell
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._registers: Callable[[Any, Any], None] | None = None
        self._evaluating_s: float | None = None
        self._is_loading = False
        self._sees_forward = False
        self._undo: list[Callable[[], None]] = []

    def begin(self, model: Any) -> None:
        """Begins to record a model in DDP or FSDP; all ranks come here, and none waits.

        A DDP has just been made; a model in shards comes to its first forward pass.
        """
        is_ddp = isinstance(model, DistributedDataParallel)
        if dist.get_world_size() < 2:
            self._tell("the job has one rank, which waits for nobody")
            return
        if is_ddp and model.process_group.size() != dist.get_world_size():
            self._tell("the model is in a DDP of some ranks only")
            return
        watch = Watch(device_of(model))
        if not is_ddp and not watch.is_on_host:
            self._tell(f"{ON_DEVICES}, got {device_of(model)}")
            return
        self._model, self._watch = model, watch
        watch.begin(model)
        if is_ddp:
            self._leave_nothing_on(model)
        told = {"run": self._run, "began_unix_s": time.time(), "boot": boot_id()}
        self._open(model, {**told, "face": self._face}, 0.0)
        if self._recorder is not None:
            self._stand_in_torch()
            self._between_s = time.monotonic()

    def end(self, why: str) -> None:
        """Records no more, and leaves everything as it was."""
        recorder, self._recorder = self._recorder, None
        self.forget()
        if self._watch is not None:
            self._watch.end()
        if recorder is not None:
            with contextlib.suppress(OSError):
                recorder.close(why)

    def forget(self) -> None:
        """Writes no more, and takes no more times; a forked child has its parent's file."""
        self._recorder = None
        while self._undo:
            self._undo.pop()()

    def another(self) -> None:
        """Ends, as another model is used too: what its steps take would count as this one's."""
        self.end("ended: another model in DDP or FSDP is used too")
        self._tell(
            "the job uses more than one model in DDP or FSDP; where `fully_shard` was called for "
            "layers alone, call it for the whole model too"
        )

    def _give_up(self, error: Exception) -> None:
        self.end(f"ended: {error!r}")
        self._tell(f"{error!r}")

    def _leave_nothing_on(self, ddp: Any) -> None:
        """Takes from the DDP what would be pickled with it: a hook, and how to register another."""
        self._registers = vars(ddp).pop("register_comm_hook", None)
        if self._registers is not None:
            hooks = getattr(ddp, "_comm_hooks", None)  # torch keeps it in C++ too
            if hooks:
                hooks.pop()

    # ---- what torch does ----

    def _stand_in_torch(self) -> None:
        assert self._watch is not None
        if self._watch.strategy == FSDP:
            self._replace(class_of_forward(FSDP), "forward", self._around_forward)
        elif self._watch.strategy == SHARDED:
            state = class_of_forward(SHARDED)
            self._replace(state, "_root_pre_forward", self._before_sharded_forward)
            self._replace(state, "_register_pre_backward_hook", self._after_sharded_forward)
        else:
            self._replace(DistributedDataParallel, "_pre_forward", self._before_forward)
            self._replace(DistributedDataParallel, "_post_forward", self._after_forward)
            self._replace(DistributedDataParallel, "register_comm_hook", self._before_registering)
        self._replace(_BaseDataLoaderIter, "__next__", self._before_loading)
        self._replace(DataLoader, "__iter__", self._before_loading)
        if _FABRICS in sys.modules:
            self._replace(sys.modules[_FABRICS], "move_data_to_device", self._before_copying)
        self._replace(torch.nn.Module, "train", self._before_mode)
        before = register_optimizer_step_pre_hook(self._quiet(self._begins_step))
        after = register_optimizer_step_post_hook(self._quiet(self._ends_step))
        self._undo += [before.remove, after.remove]

    def _replace(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Has a method of a class call `around` with the original and its arguments."""
        original = vars(owner)[name]

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._is_here():
                return original(*args, **kwargs)
            return around(functools.partial(original, *args, **kwargs), *args, **kwargs)

        setattr(owner, name, replaced)
        self._undo.append(lambda: setattr(owner, name, original))

    def _is_here(self) -> bool:
        """Returns whether this is the training thread of the rank, and no forked child's."""
        return (
            self._recorder is not None
            and threading.get_ident() == self._thread
            and os.getpid() == self._pid
        )

    def _quiet(self, note: Callable[..., None]) -> Callable[..., None]:
        """Returns a function that notes something, and whose errors end the record alone."""

        def quietly(*args: Any, **kwargs: Any) -> None:
            if torch.compiler.is_compiling() or not self._is_here():
                return
            try:
                note(*args, **kwargs)
            except Exception as error:  # whatever it is, it is not the user's
                self._give_up(error)

        return quietly

    def _before_forward(self, forward: Any, ddp: Any, *args: Any, **kwargs: Any) -> Any:
        if ddp is not self._model:
            self.another()
            return forward()
        self._quiet(self._comes_to_forward)(args, kwargs)
        self._quiet(self._asks_for_buffers)()
        returned = forward()
        self._quiet(self._is_in_forward)()
        return returned

    def _comes_to_forward(self, args: Any, kwargs: Any) -> None:
        assert self._watch is not None
        if torch.is_grad_enabled():
            self._end_step()
            self._ends_evaluation()
            self._forward_s, self._sees_forward = time.monotonic(), True
            self._turn_to("forward")
            if self._recorder is not None:
                self._recorder.has_batch(items_in(args) + items_in(kwargs))
                if self._between_s is not None:
                    self._recorder.fetched(self._between_s, self._forward_s)
            self._between_s = None

    def _asks_for_buffers(self) -> None:
        assert self._watch is not None
        self._watch.comes_to_forward(self._model)

    def _is_in_forward(self) -> None:
        if self._watch is not None:
            self._watch.is_in_forward()

    def _after_forward(self, forward: Any, ddp: Any, *args: Any, **kwargs: Any) -> Any:
        returned = forward()
        if ddp is self._model:
            self._quiet(self._ends_forward)()
        return returned

    def _around_forward(self, forward: Any, fsdp: Any, *args: Any, **kwargs: Any) -> Any:
        if fsdp is not self._model:
            if may_be_root(fsdp):
                self.another()
            return forward()
        self._quiet(self._comes_to_forward)(args, kwargs)
        returned = forward()
        self._quiet(self._ends_forward)()
        return returned

    def _before_sharded_forward(
        self, forward: Any, state: Any, module: Any, args: Any, kwargs: Any
    ) -> Any:
        if module is self._model:
            self._quiet(self._comes_to_forward)(args, kwargs)
        elif may_be_root(state):
            self.another()
        return forward()

    def _after_sharded_forward(self, register: Any, state: Any, *_: Any) -> Any:
        returned = register()
        if module_of(state) is self._model:
            self._quiet(self._ends_forward)()
        return returned

    def _before_registering(self, register: Any, ddp: Any, state: Any, hook: Any) -> None:
        if ddp is self._model and self._registers is not None:
            self._registers(state, hook)  # behind ours
        else:
            register()

    def _before_loading(self, load: Any, *_: Any) -> Any:
        if self._is_loading or self._evaluating_s is not None:
            return load()
        self._is_loading, began_s = True, time.monotonic()
        self._quiet(self._turn_to)("")
        try:
            batch = load()
            self._quiet(self._may_copy)(batch)
            return batch
        finally:
            self._is_loading = False
            self._quiet(self._has_loaded)(began_s)

    def _may_copy(self, batch: Any) -> None:
        if self._sees_forward:
            super()._may_copy(batch)
        else:  # as where the forward pass is compiled with the DDP
            self._turn_to("backward")

    def _before_copying(self, copy: Any, *_: Any, **__: Any) -> Any:
        if self._evaluating_s is not None:
            return copy()
        began_s = time.monotonic()
        self._quiet(self._turn_to)("copy")
        returned = copy()
        self._quiet(self._has_copied)(began_s)
        return returned

    def _has_copied(self, began_s: float) -> None:
        assert self._recorder is not None
        self._recorder.did("copy", began_s, time.monotonic())
        self._turn_to("")

    def _has_loaded(self, began_s: float) -> None:
        assert self._recorder is not None
        now = time.monotonic()
        self._recorder.did("load", began_s, now)
        if self._forward_s is None:  # as where the forward pass is compiled with the DDP
            self._backward_s = now

    def _before_mode(self, change: Any, module: Any, mode: bool = True) -> Any:
        if module is self._model or module is getattr(self._model, "module", self._model):
            self._quiet(self._ends_evaluation if mode else self._begins_evaluation)()
        return change()

    def _begins_evaluation(self) -> None:
        self._end_step()
        if self._evaluating_s is None:
            self._evaluating_s = time.monotonic()
            self._turn_to("evaluate")

    def _ends_evaluation(self) -> None:
        began_s, self._evaluating_s = self._evaluating_s, None
        if began_s is not None:
            self._has_evaluated(began_s)

    def _ends_step(self, *_: Any) -> None:
        super()._ends_step()
        self._end_step()
        self._forward_s = None
