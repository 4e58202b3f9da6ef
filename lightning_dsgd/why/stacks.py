"""Stacks as `faulthandler` writes them: which lines are the user's, what a collective is for.

A rank that waits in a collective has functions on its stack that say what it waits for.
"""

from __future__ import annotations

import linecache
import re
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_THREAD: Final = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+)(?:, column \d+)? in (.*)$')
_STDLIB: Final = tuple(
    {str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib")}
)
_OURS: Final = str(Path(__file__).resolve().parents[1])


_PURPOSES: Final = (
    ("_broadcast_sigterm_tensor", "", "Lightning asks whether a rank got SIGTERM"),
    ("reduce_boolean_decision", "", "Lightning: EarlyStopping or a checkpoint decides"),
    ("_sync_ddp", "", "a metric with sync_dist=True"),
    ("_sync_ddp_if_available", "", "a metric with sync_dist=True"),
    ("gather_all_tensors", "torchmetrics", "a metric of torchmetrics"),
    ("_sync_buffers", "nn/parallel", "DDP, buffers"),
    ("_sync_module_states", "", "DDP, weights of rank 0"),
    ("_verify_param_shape_across_processes", "", "DDP, its start"),
    ("_verify_params_across_processes", "", "DDP, its start"),
    ("foreach_reduce", "fsdp", "FSDP, gradients"),
    ("_reduce_grad", "fsdp", "FSDP, gradients"),
    ("_unshard", "fsdp", "FSDP, weights"),
    ("unshard", "fsdp", "FSDP, weights"),
    ("save_checkpoint", "", "saving a checkpoint"),
    ("_save_checkpoint", "", "saving a checkpoint"),
    ("backward", "torch/", "DDP, gradients"),
    ("destroy_process_group", "torch/", "the process group's end"),
    ("barrier", "lightning", "Lightning's barrier"),
    ("broadcast", "lightning", "Lightning sends an object of rank 0"),
)
"""Function, a part of its file's path, and what the collective is for; the first one counts."""
_WAITING: Final = (
    *("recv", "send", "recv_object_list", "wait", "barrier", "monitored_barrier", "all_reduce"),
    *("broadcast", "all_gather", "all_gather_object", "reduce_scatter", "gather", "scatter"),
    *("init_process_group", "_store_based_barrier", "new_group", "backward"),
)


@dataclass(frozen=True)
class Frame:
    """Holds one call of a stack: its file, line and function."""

    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        """The line's text without its comment; empty where the file cannot be read here."""
        return linecache.getline(self.file, self.line).partition("  # ")[0].strip()

    @property
    def is_users(self) -> bool:
        """Whether the file is neither of an installed library, nor Python's, nor ours."""
        if (
            self.file.startswith("<")
            or "site-packages" in self.file
            or "dist-packages" in self.file
        ):
            return False
        resolved = str(Path(self.file).resolve())
        return not resolved.startswith((*_STDLIB, _OURS)) and "/lib/python3" not in self.file


def main_stack(text: str, main: str) -> list[Frame]:
    """Returns the stack of the main thread in the last dump of a text, the innermost call first.

    Args:
        text: what `faulthandler` has written
        main: the main thread's number, in hexadecimal
    """
    found: list[Frame] = []
    thread = None
    for line in text.splitlines():
        begins = _THREAD.match(line)
        if begins:
            thread = int(begins[1], 16)
            if thread == int(main, 16):
                found = []
        elif thread == int(main, 16) and (frame := _FRAME.match(line)):
            found.append(Frame(frame[1], int(frame[2]), frame[3]))
    return found


def users_frame(frames: Sequence[Frame]) -> Frame | None:
    """Returns the innermost call in the user's own code; where there is none, the outermost one."""
    mine = users_frames(frames)
    return mine[0] if mine else frames[-1] if frames else None


def users_frames(frames: Iterable[Frame]) -> list[Frame]:
    """Returns the calls in the user's own code, the innermost first."""
    return [frame for frame in frames if frame.is_users]


def has(frames: Iterable[Frame], function: str, file: str = "") -> bool:
    """Returns whether a stack is in a function, of a file whose path holds this text."""
    return any(frame.function == function and file in frame.file for frame in frames)


def purpose_of(frames: Sequence[Frame]) -> str:
    """Returns what a rank with this stack waits for; empty if the stack does not say."""
    for function, file, purpose in _PURPOSES:
        if has(frames, function, file):
            return purpose
    return ""


def waits_outside(frames: Sequence[Frame]) -> bool:
    """Returns whether a rank waits for others in something that torch does not record."""
    return any(
        (frame.function in _WAITING and "torch/" in frame.file)
        or "lightning_dsgd/transport" in frame.file
        for frame in frames
    )
