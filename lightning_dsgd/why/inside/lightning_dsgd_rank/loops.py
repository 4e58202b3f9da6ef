"""Records the steps of a loop that trains a model in DDP: in plain PyTorch, Fabric, Hugging Face.

The first `DistributedDataParallel` that a rank makes is recorded by `UnaskedLoop` of the package,
if the job's environment has it.  Lightning's Trainer is left to `callbacks`.
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

FOLDER = "LIGHTNING_DSGD_TRACE"
STEPS = "LIGHTNING_DSGD_TRACE_STEPS"
"""Is set where steps are to be recorded too; all ranks have it, or none."""
TORCHS_DDP = "torch.nn.parallel.distributed"
_FACES = (
    *(("lightning.pytorch", "trainer"), ("pytorch_lightning", "trainer")),
    *(("lightning.fabric", "fabric"), ("lightning_fabric", "fabric")),
    ("transformers", "hugging_face"),
)
"""Whose code makes a DDP, by the module's name, and the face that this is; the first one counts."""

_the_loop: Any = None


def are_wanted() -> bool:
    """Returns whether steps are to be recorded."""
    return bool(os.environ.get(FOLDER) and os.environ.get(STEPS))


def hook(torchs: Any, tell: Callable[[str], None]) -> None:
    """Lets each model that is put into DDP be looked at, and the first one be recorded.

    Args:
        torchs: torch's module of DDP
        tell: is called with the reason where nothing is recorded, or nothing more
    """
    original = torchs.DistributedDataParallel.__init__

    @functools.wraps(original)
    def made(ddp: Any, *args: Any, **kwargs: Any) -> None:
        original(ddp, *args, **kwargs)
        with contextlib.suppress(Exception):
            _record(ddp, tell)

    torchs.DistributedDataParallel.__init__ = made


def forget() -> None:
    """Records nothing in a forked child."""
    global _the_loop
    if _the_loop is not None:
        _the_loop.forget()
    _the_loop = None


def _record(ddp: Any, tell: Callable[[str], None]) -> None:
    global _the_loop
    face = _face()
    if _the_loop is not None or face == "trainer":
        return
    try:
        from lightning_dsgd.lab.timeline.unasked_loop import UnaskedLoop
    except ImportError as error:
        tell(f"lightning_dsgd cannot be imported in the job: {error}")
        return
    folder = Path(os.environ[FOLDER])
    _the_loop = loop = UnaskedLoop(folder / "steps", face, folder.name, tell)
    try:
        loop.begin(ddp)
    except Exception as error:
        loop.end(f"ended: {error!r}")
        tell(repr(error))
    atexit.register(loop.end, "training has ended")


def _face() -> str:
    """Returns how the loop is written, by the modules on the stack of who makes the DDP."""
    frame: Any = sys._getframe(1)  # noqa: SLF001
    names = []
    while frame is not None:
        names.append(str(frame.f_globals.get("__name__", "")))
        frame = frame.f_back
    for module, face in _FACES:
        if any(name == module or name.startswith(f"{module}.") for name in names):
            return face
    return "plain"
