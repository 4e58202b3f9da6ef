"""Who has started this process, and as which rank: torchrun, mpiexec, srun, or nobody."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch.distributed as dist

from lightning_dsgd.transport.host_names import first_node
from lightning_dsgd.transport.mpi_job import (
    check_joined,
    is_of_mpiexec,
    launched_size,
    num_ranks_on_node,
    world_of_threads,
)

_FIRST_PORT: Final = 15000
"""The first of the ports that are chosen by the number of a SLURM job."""
_ADDRESS_BYTES: Final = 256


@dataclass(frozen=True)
class Launch:
    """Describes this process as one of the ranks.

    Args:
        rank: the rank's number
        world_size: how many there are
        ranks_on_node: how many ranks there are on its node, if that is known
        address: where the ranks meet; None if there is a process group already
    """

    rank: int
    world_size: int
    ranks_on_node: int | None
    address: tuple[str, int] | None


def find_launch() -> Launch:
    """Returns what the process group says if there is one, else what the launcher says."""
    variables = os.environ
    if dist.is_initialized():
        return Launch(dist.get_rank(), dist.get_world_size(), _local_size(variables), None)
    if "RANK" in variables and "WORLD_SIZE" in variables:
        return _of_torchrun(variables)
    launched = launched_size()
    if launched is not None and launched > 1 and is_of_mpiexec():
        return _of_mpi(launched)
    if int(variables.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _of_slurm(variables)
    if launched is not None and launched > 1:
        return _of_mpi(launched)
    return Launch(0, 1, 1, ("127.0.0.1", _free_port()))


def _of_torchrun(variables: Mapping[str, str]) -> Launch:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in variables]
    if missing:
        raise ValueError(
            "a launcher that sets RANK and WORLD_SIZE must also say where the ranks meet, got no "
            f"{' and no '.join(missing)}; start the script with torchrun, or set them"
        )
    address = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    rank, world_size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    return Launch(rank, world_size, _local_size(variables), address)


def _of_mpi(launched: int) -> Launch:
    check_joined(launched, "start the script without a launcher, to train alone")
    world = world_of_threads()
    card = bytearray(_ADDRESS_BYTES)
    if world.Get_rank() == 0:
        host = os.environ.get("MASTER_ADDR", socket.gethostname())
        port = os.environ.get("MASTER_PORT", str(_free_port()))
        text = f"{host} {port}".encode()
        card[: len(text)] = text
    world.Bcast(card, root=0)
    host, port = card.rstrip(b"\0").decode().split()
    return Launch(world.Get_rank(), world.Get_size(), num_ranks_on_node(), (host, int(port)))


def _of_slurm(variables: Mapping[str, str]) -> Launch:
    """Returns the launch of a step of srun, whose number tells steps apart that run together."""
    job, step = int(variables["SLURM_JOB_ID"]), int(variables.get("SLURM_STEP_ID", "0"))
    host = variables.get("MASTER_ADDR", _first_host(variables["SLURM_STEP_NODELIST"]))
    port = int(variables.get("MASTER_PORT", _FIRST_PORT + (job * 10 + step) % 10000))
    tasks = variables.get("SLURM_STEP_TASKS_PER_NODE", "")
    per_node = re.fullmatch(r"(\d+)(\(x\d+\))?", tasks)  # else nodes have different numbers
    return Launch(
        int(variables["SLURM_PROCID"]),
        int(variables["SLURM_STEP_NUM_TASKS"]),
        int(per_node[1]) if per_node else None,
        (host, port),
    )


def _first_host(nodes: str) -> str:
    """Returns the first host of SLURM's list of nodes."""
    found = first_node(nodes)
    if not found:
        raise ValueError(
            f"SLURM_STEP_NODELIST must be a list of nodes, got {nodes!r}; set MASTER_ADDR to the "
            "node of rank 0"
        )
    return found


def _local_size(variables: Mapping[str, str]) -> int | None:
    size = variables.get("LOCAL_WORLD_SIZE")
    return None if size is None else int(size)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
