"""What is MPI's own: training under mpiexec, ranks that differ, messages of any size, and CUDA.

The promises of every transport are tested in contract/, launchers, and how jobs of mpiexec end, in
trainer/test_launchers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_dsgd import STRATEGIES
from lightning_dsgd.transport import Transport, TransportError, mpi, mpi_job
from lightning_dsgd.transport.process_group import ProcessGroupTransport
from tests.support.models import Regression, loader, trainer, weights
from tests.support.mpi import SIZE, MPIFitWorld, MPIJob, MPIWorld, every_mpi
from tests.support.thorough import some
from tests.support.worlds import FitWorld
from tests.transport.helpers import send_and_check

EMPTY = torch.empty(0)
NAMES = tuple(some(STRATEGIES, ("allreduce", "local_sgd", "oktopk", "wagma", "hpsgd")))
DETERMINISTIC = tuple(
    name for name in NAMES if name not in ("hpsgd", "adpsgd", "popsgd", "eager_sgd", "wagma")
)
Jobs = Callable[[str], MPIJob]


class NoteTransport(L.Callback):
    name = ""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.name = type(trainer.strategy.session.net).__name__


def fit_each(names: tuple[str, ...], transport: str) -> dict[str, tuple[str, str, Tensor]]:
    ended = {}
    for name in names:
        L.seed_everything(0, verbose=False)
        model, note = Regression(), NoteTransport()
        chosen = STRATEGIES[name](transport=transport, timeout_s=20.0)
        run = trainer(chosen, SIZE, max_epochs=2, callbacks=[note])
        # A worker of a loader is forked, after MPI was initialized.
        run.fit(model, loader(96), loader(32, num_workers=int(name == "wagma")))
        assert (run.world_size, run.global_step) == (SIZE, 6)
        ended[name] = type(chosen.cluster_environment).__name__, note.name, weights(model)
    return ended


@pytest.mark.exhaustive
@every_mpi
def test_strategies_train_under_mpiexec_to_the_bit_as_over_tcp(python: str, mpi_jobs: Jobs) -> None:
    """With one of each kind; with all of them where TIMES is above 1."""
    ranks = MPIFitWorld(job=mpi_jobs(python)).run(SIZE, fit_each, NAMES, "auto")
    for name in NAMES:
        for kind, transport, x in (rank[name] for rank in ranks):
            assert (kind, transport) == ("MPIEnvironment", "MPITransport")
            assert torch.equal(x, ranks[0][name][2]), name
            assert x.isfinite().all()
    over_tcp = FitWorld().run(SIZE, fit_each, DETERMINISTIC, "auto")[0]
    for name in DETERMINISTIC:
        assert over_tcp[name][:2] == ("TorchElasticEnvironment", "ProcessGroupTransport")
        assert torch.equal(ranks[0][name][2], over_tcp[name][2]), name


def fit_over_the_process_group() -> str:
    return fit_each(("allreduce",), "process_group")["allreduce"][1]


@pytest.mark.exhaustive
@every_mpi
def test_the_process_group_may_be_chosen_under_mpiexec(python: str, mpi_jobs: Jobs) -> None:
    kinds = MPIFitWorld(job=mpi_jobs(python)).run(SIZE, fit_over_the_process_group)
    assert kinds == ["ProcessGroupTransport"] * SIZE


def open_differently(net: Transport) -> tuple[str, str]:
    """As when some ranks were started in another environment, and by another launcher."""
    from mpi4py import MPI

    with pytest.raises(TransportError) as transports:
        (mpi.MPITransport if net.rank else ProcessGroupTransport)(timeout_s=5.0)
    net.barrier().wait()
    turned = MPI.COMM_WORLD.Split(0, key=-net.rank)
    with pytest.raises(TransportError) as ranks:
        mpi.MPITransport(timeout_s=5.0, communicator=turned)
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
    mpi._CHUNK_BYTES = 1000
    net.barrier().wait()
    try:
        sizes = [0, 1, 4000, 5, 10_000, 100, 20_001]
        send_and_check(net, sizes)
        x = torch.arange(30_000.0)
        net.all_reduce(x).wait()
        assert torch.equal(x, torch.arange(30_000.0) * net.world_size)
        net.barrier().wait()
    finally:
        mpi._CHUNK_BYTES = 1 << 30


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
    for _ in range(5):
        MPIWorld(job=mpi_jobs(python)).run(2, two_messages_before_the_first_receive)


def fail_while_messages_travel(net: Transport) -> None:
    works = [net.all_reduce(torch.ones(3_000_000)) for _ in range(3)]
    for dst in range(net.world_size):
        net.send(torch.ones(3_000_000), dst)
    if net.rank == 1:
        raise ValueError("no such luck")
    for work in works:
        work.wait()
    net.recv(EMPTY, 1, tag=1).wait()


@every_mpi
def test_a_job_survives_a_world_that_fails_amid_messages(python: str, mpi_jobs: Jobs) -> None:
    world = MPIWorld(job=mpi_jobs(python))
    for outcome in world.outcomes(SIZE, fail_while_messages_travel):
        assert "ValueError: no such luck" in outcome.error
    assert world.run(SIZE, ask_whether_cuda_aware) == [False] * SIZE


def ask_whether_cuda_aware(net: Transport) -> bool:
    return mpi_job.is_cuda_aware()
