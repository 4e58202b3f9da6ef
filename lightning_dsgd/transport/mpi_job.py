"""The MPI job that this process is in: who started it, and which library has joined it."""

from __future__ import annotations

import os
import sys
from array import array
from typing import Any, Final

from lightning_dsgd.transport.contract import TransportError

_MPIEXEC: Final = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")
"""Variables that mpiexec sets, and srun does not: Open MPI's, and that of MPICH and its kin."""


def launched_size() -> int | None:
    """Returns how many processes an MPI launcher says it has started; None without one."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return None  # torchrun started this process, whoever started torchrun
    variables = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]  # Open MPI's mpiexec; MPICH's, and srun
    if "PMIX_RANK" in os.environ:  # srun --mpi=pmix
        variables.append("SLURM_NTASKS")
    return next((int(os.environ[name]) for name in variables if name in os.environ), None)


def is_usable(world_size: int) -> bool:
    """Returns whether an MPI launcher started so many processes, and mpi4py has joined them all.

    Does not touch MPI, whose initialization has side effects, where no MPI launcher was at work.
    """
    return launched_size() == world_size and _joined_size() == world_size


def check_launch(environment: Any, num_nodes: int, num_devices: int) -> None:
    """Raises, on every rank, unless the Trainer means the processes that an MPI launcher started.

    Args:
        environment: Lightning's ClusterEnvironment; an MPIEnvironment asks MPI
        num_nodes: how many nodes the Trainer has
        num_devices: how many devices of each node the Trainer has
    """
    name, launched = type(environment).__name__, launched_size()
    if name == "SLURMEnvironment" and is_of_mpiexec():
        raise ValueError(
            f"mpiexec must number its ranks itself, got {launched} processes of mpiexec that take "
            "their ranks from SLURM_PROCID, which is that of the batch script; start them with "
            "srun instead of mpiexec, or use Trainer(plugins=[MPIEnvironment()]) of "
            "lightning.pytorch.plugins.environments"
        )
    is_of_mpi = name == "MPIEnvironment"
    starts_ranks = name == "LightningEnvironment" and not environment.creates_processes_externally
    if launched is not None and launched > 1 and (is_of_mpi or starts_ranks):
        check_joined(
            launched, "start the script without a launcher: Lightning starts its devices itself"
        )
    if is_of_mpi:
        _check_devices(environment.local_rank(), num_nodes, num_devices)


def check_joined(launched: int, otherwise: str) -> None:
    """Raises, on every rank, unless mpi4py has joined all processes that a launcher has started.

    Args:
        launched: how many processes the launcher has started
        otherwise: what to do without MPI
    """
    joined = _joined_size()
    if joined is None:
        raise ValueError(
            f"an MPI launcher has started {launched} processes, but mpi4py cannot be imported "
            "here, so that each would train alone; pip install mpi4py, built for the launcher's"
            f" MPI, or {otherwise}"
        )
    if joined != launched:
        raise ValueError(
            f"an MPI launcher has started {launched} processes, but mpi4py's MPI library has a "
            f"world of {joined}: they belong to two MPIs; {library()} needs the mpiexec that "
            f"came with it (is it {os.path.join(sys.prefix, 'bin', 'mpiexec')}?); keep one MPI "
            "in an environment"
        )


def is_of_mpiexec() -> bool:
    """Returns whether mpiexec has started this process, perhaps in a job of SLURM."""
    return any(variable in os.environ for variable in _MPIEXEC)


def num_ranks_on_node() -> int:
    """Returns how many processes of MPI_COMM_WORLD share this node; all must call it."""
    mpi = load_mpi()
    node = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
    size = int(node.Get_size())
    node.Free()
    return size


def _check_devices(local_rank: int, num_nodes: int, num_devices: int) -> None:
    """Raises, on every rank, unless each rank has a device."""
    mpi = load_mpi()
    world_size, most = mpi.COMM_WORLD.Get_size(), array("i", [0])
    mpi.COMM_WORLD.Allreduce(array("i", [local_rank + 1]), most, mpi.MAX)
    if world_size != num_nodes * num_devices or most[0] > num_devices:
        raise ValueError(
            f"each MPI rank needs a device of its own, got {world_size} ranks, up to {most[0]} on "
            f"a node, for devices={num_devices} and num_nodes={num_nodes}; start "
            f"{num_nodes * num_devices} ranks, {num_devices} on each node, or set "
            f"devices={most[0]} and num_nodes={-(-world_size // most[0])}"
        )


def _joined_size() -> int | None:
    """Returns the size of MPI_COMM_WORLD; None without mpi4py, or without an MPI library."""
    try:
        return int(load_mpi().COMM_WORLD.Get_size())
    except (ImportError, RuntimeError):
        return None


def library() -> str:
    """Returns the name and version of the MPI library that mpi4py has loaded."""
    return str(load_mpi().Get_library_version().splitlines()[0].strip())


def world_of_threads() -> Any:
    """Returns MPI_COMM_WORLD, if its library lets all threads of a process call it."""
    try:
        mpi = load_mpi()
    except (ImportError, RuntimeError) as err:
        raise TransportError(
            'transport="mpi" needs mpi4py and an MPI library, got '
            f"{type(err).__name__}: {err}; pip install mpi4py mpich, or use "
            'transport="process_group"'
        ) from err
    level = mpi.Query_thread()
    if level < mpi.THREAD_MULTIPLE:
        names = {
            mpi.THREAD_SINGLE: "MPI_THREAD_SINGLE",
            mpi.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
            mpi.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
        }
        raise TransportError(
            f'transport="mpi" needs MPI_THREAD_MULTIPLE, got {names[level]} from {library()}; '
            "unset MPI4PY_RC_THREAD_LEVEL and leave mpi4py.rc.thread_level alone, take an MPI "
            'library built with threads, or use transport="process_group"'
        )
    return mpi.COMM_WORLD


def load_mpi() -> Any:
    """Imports and returns mpi4py's module; the import initializes MPI."""
    from mpi4py import MPI

    return MPI
