"""What is MPI's own: training under mpiexec, ranks that differ, messages of any size, and CUDA.

The promises of every transport are tested in contract/, launchers, and how jobs of mpiexec end, in
trainer/test_launchers.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.environments import MPIEnvironment
from torch import Tensor

from lightning_dsgd.mpi import job, wire
from lightning_dsgd.mpi.wire import MPITransport
from lightning_dsgd.trainer.named import strategy_of
from lightning_dsgd.transport import Transport, TransportError, mpi_job
from lightning_dsgd.transport.process_group import ProcessGroupTransport
from tests.support.models import Regression, loader, trainer, weights
from tests.support.mpi import SIZE, MPIFitWorld, MPIJob, MPIWorld, ended, every_mpi, mpiexec
from tests.transport.helpers import send_and_check

EMPTY = torch.empty(0)
Jobs = Callable[[str], MPIJob]


class NoteTransport(L.Callback):
    name = ""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.name = type(trainer.strategy.session.net).__name__


def fit_over_both() -> list[tuple[str, str, Tensor]]:
    """What launched and carried each fit, and what it made of the weights."""
    ended = []
    for transport in ("auto", "process_group"):
        for name in ("allreduce", "local_sgd", "oktopk"):
            L.seed_everything(0, verbose=False)
            model, note = Regression(), NoteTransport()
            chosen = strategy_of(name, transport=transport, timeout_s=20.0)
            run = trainer(chosen, SIZE, max_epochs=2, callbacks=[note])
            # A worker of a loader is forked, after MPI was initialized.
            run.fit(model, loader(96), loader(32, num_workers=int(name == "local_sgd")))
            assert (run.world_size, run.global_step) == (SIZE, 6)
            ended.append((type(chosen.cluster_environment).__name__, note.name, weights(model)))
    return ended


@pytest.mark.exhaustive
@every_mpi
def test_strategies_train_under_mpiexec_to_the_bit_as_over_tcp(python: str, mpi_jobs: Jobs) -> None:
    for found in MPIFitWorld(job=mpi_jobs(python)).run(SIZE, fit_over_both):
        for by_mpi, by_tcp in zip(found[:3], found[3:], strict=True):
            assert by_mpi[:2] == ("MPIEnvironment", "MPITransport")
            assert by_tcp[:2] == ("MPIEnvironment", "ProcessGroupTransport")
            assert torch.equal(by_mpi[2], by_tcp[2])


def open_differently(net: Transport) -> tuple[str, str]:
    """As when some ranks were started in another environment, and by another launcher."""
    from mpi4py import MPI

    with pytest.raises(TransportError) as transports:
        (MPITransport if net.rank else ProcessGroupTransport)(timeout_s=5.0)
    net.barrier().wait()
    turned = MPI.COMM_WORLD.Split(0, key=-net.rank)
    with pytest.raises(TransportError) as ranks:
        MPITransport(timeout_s=5.0, communicator=turned)
    return str(transports.value), str(ranks.value)


@pytest.mark.exhaustive
@every_mpi
def test_ranks_that_differ_are_refused_on_all(python: str, mpi_jobs: Jobs) -> None:
    for transports, ranks in MPIWorld(job=mpi_jobs(python)).run(SIZE, open_differently):
        assert transports.startswith(
            "the transport must be the same on all ranks, got process_group on rank 0, mpi on "
            "rank 1, mpi on rank 2"
        )
        assert 'transport="mpi" needs the ranks of MPI_COMM_WORLD, got mpi as rank 3 of 4' in ranks


def messages_in_chunks(net: Transport) -> None:
    """Overtaken by smaller ones, in mailboxes that wait for them and in others."""
    wire._CHUNK_BYTES = 1000
    net.barrier().wait()
    try:
        sizes = [0, 1, 4000, 5, 10_000, 100, 20_001]
        send_and_check(net, sizes)
        x = torch.arange(30_000.0)
        net.all_reduce(x).wait()
        assert torch.equal(x, torch.arange(30_000.0) * net.world_size)
        net.barrier().wait()
    finally:
        wire._CHUNK_BYTES = 1 << 30


@pytest.mark.exhaustive
@every_mpi
def test_messages_that_mpi_takes_in_parts_arrive_whole(python: str, mpi_jobs: Jobs) -> None:
    MPIWorld(job=mpi_jobs(python)).run(SIZE, messages_in_chunks)


def two_messages_before_the_first_receive(net: Transport) -> None:
    """The second must not be read into the tensor that the first belongs to."""
    n = 3_000_000
    if net.rank == 0:
        for value in (1.0, 2.0):
            net.send(torch.full((n,), value), 1)
        net.barrier().wait()
        return
    net.sub("elsewhere").send(EMPTY, net.rank)
    receipts = [net.collect(EMPTY, 0, net._messages, 0, 0, torch.empty(n)) for _ in range(2)]
    for receipt, value in zip(receipts, (1.0, 2.0), strict=True):
        assert torch.equal(receipt.wait(), torch.full((n,), value))
    net.barrier().wait()


@every_mpi
def test_a_receive_gets_the_first_message_of_its_mailbox(python: str, mpi_jobs: Jobs) -> None:
    for _ in range(2):
        MPIWorld(job=mpi_jobs(python)).run(2, two_messages_before_the_first_receive)


# ---- what cannot work under an MPI launcher, and what the MPI library is asked ----
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
from lightning_dsgd.mpi.wire import MPITransport
for attempt in (lambda: L.Trainer(strategy="wagma", accelerator="cpu", devices=4), MPITransport):
    try:
        attempt()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.exhaustive
@every_mpi
def test_two_mpis_and_too_few_threads_are_refused(python: str) -> None:
    """A process that another MPI's mpiexec has started has an MPI world of its own."""
    variables = {"OMPI_COMM_WORLD_SIZE": "4", "PMI_SIZE": "4"}
    variables |= {"MPI4PY_RC_THREAD_LEVEL": "serialized"}
    done = ended([python, "-c", OPEN_ALONE], **variables)
    assert done.returncode == 0, done.stderr
    trap, level = (line for line in done.stdout.splitlines() if "Error: " in line)
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
        MPITransport()
    with pytest.raises(ValueError, match="started 4 processes, but mpi4py cannot be imported"):
        trainer("wagma", 4)


def test_a_library_that_cannot_be_asked_is_not_cuda_aware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "load_mpi", lambda: torch._C)  # a library without the question
    assert not job.is_cuda_aware()
