"""What a collective is for, by the functions on the stack of a rank that waits in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lightning_dsgd.why.stacks import Frame, has

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
