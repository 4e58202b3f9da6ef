"""Records the steps of a loop that trains in DDP or FSDP: in plain PyTorch, Fabric, Hugging Face.

The first `DistributedDataParallel` that a rank makes, or the first model in shards that it trains,
is recorded by `UnaskedLoop` of the package, if the job's environment has it.  Lightning's Trainer
is left to `callbacks`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_dsgd_rank.recorder import FOLDER

STEPS = "LIGHTNING_DSGD_TRACE_STEPS"
"""Is set where steps are to be recorded too; all ranks have it, or none."""
_FACES = (
    *(("lightning.pytorch", "trainer"), ("pytorch_lightning", "trainer")),
    *(("lightning.fabric", "fabric"), ("lightning_fabric", "fabric")),
    ("transformers", "hugging_face"),
)
"""Whose code makes a DDP or trains, by the module's name, and the face that this is; the first one
counts."""

_the_loop: Any = None


def are_wanted() -> bool:
    """Returns whether steps are to be recorded."""
    return bool(os.environ.get(FOLDER) and os.environ.get(STEPS))


def hooks(tell: Callable[[str], None]) -> dict[str, Callable[[Any], None]]:
    """Returns what is to be called with modules of torch's once they are loaded, by their names.

    Args:
        tell: is called with the reason where nothing is recorded, or nothing more
    """
    fsdp = "torch.distributed.fsdp"
    return {
        "torch.nn.parallel.distributed": lambda torchs: _hook_ddp(torchs, tell),
        f"{fsdp}.fully_sharded_data_parallel": lambda torchs: _hook_first_forward(
            torchs.FullyShardedDataParallel, "forward", tell
        ),
        f"{fsdp}._fully_shard._fsdp_state": lambda torchs: _hook_first_forward(
            torchs.FSDPState, "_root_pre_forward", tell
        ),
    }


def _hook_ddp(torchs: Any, tell: Callable[[str], None]) -> None:
    """Lets each model that is put into DDP be looked at, and the first one be recorded."""
    original = torchs.DistributedDataParallel.__init__

    @functools.wraps(original)
    def made(ddp: Any, *args: Any, **kwargs: Any) -> None:
        original(ddp, *args, **kwargs)
        with contextlib.suppress(Exception):
            _record(ddp, tell)

    torchs.DistributedDataParallel.__init__ = made


def _hook_first_forward(owner: Any, name: str, tell: Callable[[str], None]) -> None:
    """Lets the first model in shards whose forward pass is to have gradients be recorded.

    Args:
        owner: torch's class, of such models or of their states
        name: its method that begins a forward pass
        tell: as that of `hooks`
    """
    original, torch = vars(owner)[name], sys.modules["torch"]

    @functools.wraps(original)
    def first(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        setattr(owner, name, original)
        with contextlib.suppress(Exception):
            _record(args[0], tell)
        return getattr(owner, name)(*args, **kwargs)

    setattr(owner, name, first)


def forget() -> None:
    """Records nothing in a forked child."""
    global _the_loop
    if _the_loop is not None:
        _the_loop.forget()
    _the_loop = None


def _record(model: Any, tell: Callable[[str], None]) -> None:
    """Begins to record a model, or that of which this is the state, as `fully_shard` has one."""
    global _the_loop
    face = _face()
    if _the_loop is not None or face == "trainer":
        return
    try:
        from lightning_dsgd.lab.timeline.shards import module_of
        from lightning_dsgd.lab.timeline.unasked_loop import UnaskedLoop
    except ImportError as error:
        tell(f"lightning_dsgd cannot be imported in the job: {error}")
        return
    folder = Path(os.environ[FOLDER])
    _the_loop = loop = UnaskedLoop(folder / "steps", face, folder.name, tell)
    try:
        loop.begin(module_of(model))
    except Exception as error:
        loop.end(f"ended: {error!r}")
        tell(str(error) if isinstance(error, ValueError) else repr(error))
    atexit.register(loop.end, "training has ended")


def _face() -> str:
    """Returns how the loop is written, by the modules on the stack of who makes a DDP or trains."""
    frame: Any = sys._getframe(1)  # noqa: SLF001
    names = []
    while frame is not None:
        names.append(str(frame.f_globals.get("__name__", "")))
        frame = frame.f_back
    for module, face in _FACES:
        if any(name == module or name.startswith(f"{module}.") for name in names):
            return face
    return "plain"
