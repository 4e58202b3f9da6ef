"""What is MPI's own: training under mpiexec, what cannot work there, and messages of any size.

The promises of every transport are tested in test_transport_contract.py, launchers, and how jobs of
mpiexec end, in test_launchers.py.  Functions that run on every rank come before the tests that run
them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.environments import MPIEnvironment
from torch import Tensor

import lightning_dsgd.transport.mpi as mpi
from lightning_dsgd import STRATEGIES
from lightning_dsgd.transport import Transport, TransportError
from lightning_dsgd.transport.process_group import ProcessGroupTransport
from tests.models import Regression, loader, trainer, weights
from tests.mpi import SIZE, MPIFitWorld, MPIJob, MPIWorld, environment, every_mpi, mpiexec
from tests.worlds import FitWorld

EMPTY = torch.empty(0)
NAMES = tuple(STRATEGIES)
DETERMINISTIC = tuple(
    name for name in NAMES if name not in ("hpsgd", "adpsgd", "eager_sgd", "wagma")
)
Jobs = Callable[[str], MPIJob]


# Training


class NoteTransport(L.Callback):
    """Which transport the strategy trains over."""

    name = ""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.name = type(trainer.strategy._net).__name__


def fit_each(names: tuple[str, ...], transport: str) -> dict[str, tuple[str, str, Tensor]]:
    """The environment and the transport of each strategy, and the weights that it ended with."""
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


@every_mpi
def test_every_strategy_trains_under_mpiexec(python: str, mpi_jobs: Jobs) -> None:
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


@every_mpi
def test_the_process_group_may_be_chosen_under_mpiexec(python: str, mpi_jobs: Jobs) -> None:
    kinds = MPIFitWorld(job=mpi_jobs(python)).run(SIZE, fit_over_the_process_group)
    assert kinds == ["ProcessGroupTransport"] * SIZE


# What cannot work


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


def open_where_others_open_another(net: Transport) -> str:
    """As when some ranks were started in another environment than others."""
    transport = mpi.MPITransport if net.rank else ProcessGroupTransport
    with pytest.raises(TransportError) as info:
        transport(timeout_s=5.0)
    return str(info.value)


@every_mpi
def test_ranks_that_differ_in_their_transport_are_all_told(python: str, mpi_jobs: Jobs) -> None:
    for text in MPIWorld(job=mpi_jobs(python)).run(SIZE, open_where_others_open_another):
        assert text.startswith(
            "the transport must be the same on all ranks, got process_group on rank 0, mpi on "
            "rank 1, mpi on rank 2"
        )


def open_with_other_ranks(net: Transport) -> str:
    """As when a launcher other than mpiexec numbers the processes."""
    from mpi4py import MPI

    turned = MPI.COMM_WORLD.Split(0, key=-net.rank)
    with pytest.raises(TransportError) as info:
        mpi.MPITransport(timeout_s=5.0, communicator=turned)
    return str(info.value)


@every_mpi
def test_ranks_of_another_launcher_are_refused(python: str, mpi_jobs: Jobs) -> None:
    for text in MPIWorld(job=mpi_jobs(python)).run(SIZE, open_with_other_ranks):
        assert 'transport="mpi" needs the ranks of MPI_COMM_WORLD, got mpi as rank 3 of 4' in text


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
    monkeypatch.setattr(mpi, "_mpi", lambda: pytest.fail("initializes MPI"))
    assert not mpi.is_usable(4)
    monkeypatch.setenv("SLURM_NTASKS", "4")  # of srun without an MPI
    assert not mpi.is_usable(4)
    monkeypatch.setenv("PMI_SIZE", "3")
    assert not mpi.is_usable(4)
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # of torchrun under mpiexec
    assert not mpi.is_usable(4)


def test_without_mpi4py_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setenv("PMI_SIZE", "4")
    assert not mpi.is_usable(4)
    with pytest.raises(TransportError, match=r"needs mpi4py and an .* pip install mpi4py mpich"):
        mpi.MPITransport()
    with pytest.raises(ValueError, match="started 4 processes, but mpi4py cannot be imported"):
        trainer("wagma", 4)


# Messages


def messages_in_parts(net: Transport) -> None:
    """Overtaken by smaller ones, in mailboxes that wait for them and in others."""
    mpi._PART_BYTES = 1000
    net.barrier().wait()
    try:
        sizes = [0, 1, 4000, 5, 10_000, 100, 20_001]
        for tag in (0, 1):
            for n in sizes:
                for dst in range(net.world_size):
                    net.send(torch.full((n,), float(n + tag)), dst, tag)
        for src in range(net.world_size):
            for tag in (1, 0):
                for n in sizes:
                    x = net.recv(EMPTY, src, tag).wait()
                    assert torch.equal(x, torch.full((n,), float(n + tag)))
        x = torch.arange(30_000.0)
        net.all_reduce(x).wait()
        assert torch.equal(x, torch.arange(30_000.0) * net.world_size)
        net.barrier().wait()
    finally:
        mpi._PART_BYTES = 1 << 30


@every_mpi
def test_messages_that_mpi_takes_in_parts_arrive_whole(python: str, mpi_jobs: Jobs) -> None:
    MPIWorld(job=mpi_jobs(python)).run(SIZE, messages_in_parts)


def message_above_2_gib(net: Transport) -> None:
    n = 2**31 + 5
    if net.rank == 0:
        x = torch.zeros(n, dtype=torch.uint8)
        x[0], x[2**30], x[-1] = 1, 2, 3
        net.send(x, 1)
        net.barrier().wait(120.0)
        return
    x = net.recv(EMPTY.byte(), 0).wait(120.0)
    assert (len(x), int(x[0]), int(x[2**30]), int(x[-1])) == (n, 1, 2, 3)
    assert int(x.count_nonzero()) == 3
    net.barrier().wait()


@pytest.mark.skipif(
    not os.environ.get("TEST_LARGE_MESSAGES"),
    reason="needs 10 GB of memory: set TEST_LARGE_MESSAGES to run it",
)
@every_mpi
def test_a_message_above_2_gib_arrives(python: str, mpi_jobs: Jobs) -> None:
    world = MPIWorld(job=mpi_jobs(python))
    outcomes = world.outcomes(2, message_above_2_gib, limit_s=110.0)
    assert [outcome.error for outcome in outcomes] == ["", ""]


def two_messages_before_the_first_receive(net: Transport) -> None:
    """The second must not be read into the tensor that the first belongs to."""
    n = 3_000_000
    if net.rank == 0:
        for value in (1.0, 2.0):
            net.send(torch.full((n,), value), 1)
        net.barrier().wait()
        return
    net.sub("elsewhere").send(EMPTY, net.rank)
    receipts = [net._collect(EMPTY, 0, net._messages, 0, 0, torch.empty(n)) for _ in range(2)]
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
def test_a_job_survives_a_world_that_fails_in_the_midst_of_messages(
    python: str, mpi_jobs: Jobs
) -> None:
    world = MPIWorld(job=mpi_jobs(python))
    for outcome in world.outcomes(SIZE, fail_while_messages_travel):
        assert "ValueError: no such luck" in outcome.error
    assert world.run(SIZE, ask_whether_cuda_aware) == [False] * SIZE


# CUDA


class OnCuda:
    """What `Memory` asks of a CUDA tensor, where there is no CUDA."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.device = calls, torch.device("cuda", 0)

    def clone(self) -> OnCuda:
        self.calls.append("clone")
        return self


def test_cuda_memory_goes_to_mpi_only_if_it_is_cuda_aware(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    empty = torch.empty

    def note_empty(*args: Any, device: Any = "cpu", pin_memory: bool = False, **kwargs: Any) -> Any:
        calls.append(f"{'pinned ' * pin_memory}{torch.device(device).type}")
        return empty(4)

    class Stream:
        def synchronize(self) -> None:
            calls.append("synchronize")

    monkeypatch.setattr(torch, "empty", note_empty)
    monkeypatch.setattr(torch, "empty_like", note_empty)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(Tensor, "copy_", lambda x, other: calls.append("copy") or x)
    x: Any = OnCuda(calls)
    for is_aware, expected in (
        (True, ["clone", "synchronize", "synchronize", "cuda", "synchronize", "cpu"]),
        (False, ["pinned cpu", "copy", "pinned cpu", "copy", "pinned cpu", "cpu"]),
    ):
        calls.clear()
        memory = mpi.Memory(is_aware, torch.device("cuda"))
        for copy in (True, False):
            sent, is_to_copy = memory.to_send(x, copy=copy)
            assert (sent is x) == is_aware
            assert not is_to_copy
        memory.to_receive(4, torch.float32, is_from_cuda=True)
        memory.to_receive(4, torch.float32, is_from_cuda=False)
        assert calls == expected


def ask_whether_cuda_aware(net: Transport) -> bool:
    return mpi.is_cuda_aware()


@every_mpi
def test_the_library_is_asked_whether_it_is_cuda_aware(python: str, mpi_jobs: Jobs) -> None:
    """Those from PyPI are not, and say so."""
    assert MPIWorld(job=mpi_jobs(python)).run(2, ask_whether_cuda_aware) == [False, False]


def test_a_library_that_cannot_be_asked_is_not_cuda_aware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "_mpi", lambda: torch._C)  # a library without the question
    assert not mpi.is_cuda_aware()
