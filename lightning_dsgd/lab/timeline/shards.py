"""What torch's FSDP says of a model that it has sharded, in its two versions.

    SHARDED    `fully_shard`: a state for each module for which it was called
    FSDP       the first version, FullyShardedDataParallel: a module around each of these

The root is the module whose forward pass begins that of the model.  torch knows it from the first
forward pass on.  Every private name of torch's FSDP that is used stands here, but for the two by
which `why` sees the first forward pass.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_dsgd.lab.timeline.recorder import FSDP, SHARDED

ON_DEVICES: Final = "the steps of FSDP are judged on CPUs alone"
"""Why `why` records no steps on an accelerator."""


def strategy_of(model: torch.nn.Module) -> str:
    """Returns what sums a model's gradient: "ddp", SHARDED or FSDP; empty where nothing does."""
    if isinstance(model, DistributedDataParallel):
        return "ddp"
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # nobody has loaded it, so nothing is sharded
        return ""
    for each in model.modules():
        if isinstance(each, fsdp.FullyShardedDataParallel):
            return FSDP
        if isinstance(each, fsdp.FSDPModule):
            return SHARDED
    return ""


def check_shards(model: torch.nn.Module) -> None:
    """Refuses shards among some ranks only: these meet, and are not late for the others."""
    num_ranks = dist.get_world_size()
    meshes = filter(None, map(mesh_of, model.parameters()))
    sizes = [tuple(mesh.shape) for mesh in meshes]
    if strategy_of(model) == FSDP:
        groups = (getattr(each, "process_group", None) for each in model.modules())
        sizes += [(group.size(),) for group in groups if isinstance(group, dist.ProcessGroup)]
    for size in sizes:
        if size != (num_ranks,):
            raise ValueError(
                "a model whose steps are recorded must be sharded among all ranks, got shards "
                f"among {' x '.join(map(str, size))} of {num_ranks} ranks; record a run with one "
                "dimension"
            )


def mesh_of(parameter: Any) -> Any:
    """Returns the devices among which a parameter is sharded; None if it is in one piece."""
    return getattr(parameter, "device_mesh", None)


def num_weights(model: torch.nn.Module) -> int:
    """Returns how many weights are trained, those in the shards of other ranks included."""
    here = sum(each.numel() for each in model.parameters() if each.requires_grad)
    return here * dist.get_world_size() if strategy_of(model) == FSDP else here


# ---- where a forward pass begins and ends ----


def class_of_forward(strategy: str) -> Any:
    """Returns torch's class whose methods are called around a forward pass of a version."""
    if strategy == FSDP:
        return sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel
    return sys.modules["torch.distributed.fsdp._fully_shard._fsdp_state"].FSDPState


def module_of(model: Any) -> Any:
    """Returns a module as it is; of a state of `fully_shard` the first of its modules."""
    return model if isinstance(model, torch.nn.Module) else model._modules[0]  # noqa: SLF001


def may_be_root(state: Any) -> bool:
    """Returns whether a state, or a module of FSDP's, is a root, or is in no other model yet."""
    return state._is_root is not False  # noqa: SLF001
