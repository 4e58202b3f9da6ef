"""What cannot work under an MPI launcher, and what the MPI library is asked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.environments import MPIEnvironment

from lightning_dsgd.transport import TransportError, mpi, mpi_job
from tests.support.models import trainer
from tests.support.mpi import SIZE, MPIFitWorld, MPIJob, environment, every_mpi, mpiexec

Jobs = Callable[[str], MPIJob]


def refused(**options: Any) -> str:
    with pytest.raises(ValueError, match=r"each MPI rank|mpiexec must") as info:
        trainer("local_sgd", **options)
    return str(info.value)


def refuse_what_does_not_fit() -> list[str]:
    texts = [refused(devices=1), refused(devices=8), refused(devices=1, num_nodes=4)]
    slurm = {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "4", "SLURM_JOB_NAME": "train"}
    slurm |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    os.environ.update(slurm)
    try:
        texts.append(refused(devices=SIZE))
        plugged = trainer("local_sgd", SIZE, plugins=[MPIEnvironment()])  # the way out
        assert plugged.world_size == SIZE
    finally:
        for name in slurm:
            del os.environ[name]
    return texts


@every_mpi
def test_devices_that_are_not_the_ranks_are_refused(python: str, mpi_jobs: Jobs) -> None:
    for texts in MPIFitWorld(job=mpi_jobs(python)).run(SIZE, refuse_what_does_not_fit):
        few, many, spread, slurm = texts
        rule = "each MPI rank needs a device of its own, got 4 ranks, up to 4 on a node, for"
        assert few.startswith(f"{rule} devices=1 and num_nodes=1; start 1 ranks, 1 on each node")
        assert many.startswith(f"{rule} devices=8 and num_nodes=1; start 8 ranks")
        assert spread.startswith(f"{rule} devices=1 and num_nodes=4")
        for text in (few, many, spread):
            assert text.endswith("or set devices=4 and num_nodes=1")
        assert slurm.startswith("mpiexec must number its ranks itself, got 4 processes of mpiexec")
        assert "plugins=[MPIEnvironment()]" in slurm


OPEN_ALONE = """
import lightning as L, lightning_dsgd
from lightning_dsgd.transport.mpi import MPITransport
for attempt in (lambda: L.Trainer(strategy="wagma", accelerator="cpu", devices=4), MPITransport):
    try:
        attempt()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def run_alone(python: str, *launcher: str, **variables: str) -> list[str]:
    done = subprocess.run(
        [*launcher, python, "-c", OPEN_ALONE],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return [line for line in done.stdout.splitlines() if "Error: " in line]


@pytest.mark.exhaustive
@every_mpi
def test_two_mpis_and_too_few_threads_are_refused(python: str) -> None:
    """A process that another MPI's mpiexec has started has an MPI world of its own."""
    variables = {"OMPI_COMM_WORLD_SIZE": "4", "PMI_SIZE": "4"}
    trap, level = run_alone(python, MPI4PY_RC_THREAD_LEVEL="serialized", **variables)
    assert "ValueError: an MPI launcher has started 4 processes, but mpi4py's MPI library" in trap
    assert "has a world of 1: they belong to two MPIs" in trap
    assert str(mpiexec(python)) in trap
    assert 'TransportError: transport="mpi" needs MPI_THREAD_MULTIPLE, got MPI_THREAD_SERI' in level
    assert "unset MPI4PY_RC_THREAD_LEVEL" in level


def test_auto_leaves_mpi_alone_where_no_launcher_of_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(mpi_job, "load_mpi", lambda: pytest.fail("initializes MPI"))
    assert not mpi_job.is_usable(4)
    monkeypatch.setenv("SLURM_NTASKS", "4")  # of srun without an MPI
    assert not mpi_job.is_usable(4)
    monkeypatch.setenv("PMI_SIZE", "3")
    assert not mpi_job.is_usable(4)
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # of torchrun under mpiexec
    assert not mpi_job.is_usable(4)


def test_without_mpi4py_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setenv("PMI_SIZE", "4")
    assert not mpi_job.is_usable(4)
    with pytest.raises(TransportError, match=r"needs mpi4py and an .* pip install mpi4py mpich"):
        mpi.MPITransport()
    with pytest.raises(ValueError, match="started 4 processes, but mpi4py cannot be imported"):
        trainer("wagma", 4)


def test_a_library_that_cannot_be_asked_is_not_cuda_aware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_job, "load_mpi", lambda: torch._C)  # a library without the question
    assert not mpi_job.is_cuda_aware()
