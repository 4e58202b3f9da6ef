"""A rank that raises, dies or is told to stop: the others end soon, know why, and leave nothing."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_dsgd.lab.jobs.job import is_of_mpich
from lightning_dsgd.session import ending
from lightning_dsgd.session.ending import all_fail
from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.trainer.children import Processes
from lightning_dsgd.trainer.named import strategy_of
from tests.support import doomed
from tests.support.doomed import Doomed, Plan, num_batches
from tests.support.models import Regression, loader, trainer
from tests.support.mpi import environment, every_mpi, mpiexec
from tests.support.thorough import cases
from tests.support.worlds import FitWorld, Outcome

ROOT = Path(__file__).parents[2]
LATER = pytest.mark.exhaustive
SOON_S = 100.0  # on a busy machine too, and before the 150 s for which doomed ranks would wait


# All ranks stop at the same batch
def fit_until_requeued(
    folder: str, plans: tuple[Plan, ...], max_steps: int, name: str
) -> tuple[int, str]:
    own = os.environ["RANK"]
    os.environ.pop("TORCHELASTIC_RUN_ID")
    job = {"JOB_ID": "77", "JOB_NAME": "train", "NTASKS": "2", "NTASKS_PER_NODE": "2"}
    job |= {"NODELIST": "localhost", "NODEID": "0", "PROCID": own, "LOCALID": own}
    os.environ.update({f"SLURM_{name}": value for name, value in job.items()})
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    fitter = trainer(
        strategy_of("wagma", timeout_s=20),
        2,
        max_steps=max_steps,
        max_epochs=-1,
        default_root_dir=folder,
        plugins=[SLURMEnvironment(requeue_signal=signal.Signals[name])],
    )
    try:
        fitter.fit(Doomed(folder, plans), loader(256))
    except SIGTERMException as error:
        return fitter.global_step, str(error)
    return fitter.global_step, "trained"


@pytest.mark.parametrize("name", ["SIGUSR1", pytest.param("SIGTERM", marks=LATER)])
def test_slurms_signal_saves_between_batches_and_requeues(name: str, tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/asked"\n')
    scontrol.chmod(0o755)
    plans = (Plan(1, name, at=21),)  # in a step, where ranks wait for each other
    first, second = FitWorld().run(2, fit_until_requeued, str(tmp_path), plans, 10_000, name)
    assert first[0] == second[0] > 20
    for rank, (_, text) in enumerate((first, second)):
        stopped = f"all ranks stopped, rank {rank} after {first[0]} batches"
        assert text == f"rank 1 received {name}; {stopped}"
    assert (tmp_path / "asked").read_text() == "requeue 77\n"
    assert len(list((tmp_path / "hpc_ckpt_1.ckpt.replicas").iterdir())) == 2
    more = first[0] + 5
    ended = FitWorld().run(2, fit_until_requeued, str(tmp_path), (), more, name)
    assert ended == [(more, "trained")] * 2


# A rank that fails ends all
def fit(name: str, folder: str, plans: tuple[Plan, ...], kwargs: dict[str, Any]) -> None:
    ending.NOTICE_WITHIN_S = kwargs.pop("notice_within_s", 15.0)
    try:
        doomed.fit(name, folder, plans, **kwargs)
    finally:
        for file in Path(folder).glob("stopped_*"):  # nobody else ends what does not run
            with contextlib.suppress(ProcessLookupError):  # another rank has
                os.kill(int(file.read_text()), signal.SIGKILL)


def outcomes(name: str, folder: Path, *plans: Plan, **kwargs: Any) -> list[Outcome]:
    found = FitWorld().outcomes(3, fit, name, str(folder), plans, kwargs)
    for rank, outcome in enumerate(found):
        print(rank, outcome)
    return found


def check_named(found: list[Outcome], rank: int, reason: str) -> None:
    """Every other rank has ended soon, not well, and says which rank it was and why."""
    for other, outcome in enumerate(found):
        assert outcome.seconds < SOON_S
        assert outcome.exitcode != 0
        if other != rank:
            assert re.match(f"PeerLost: rank {rank} {reason}", outcome.error), outcome.error


def check_stopped(found: list[Outcome], folder: Path, asker: int, batches: list[int]) -> None:
    for rank, (outcome, number) in enumerate(zip(found, batches, strict=True)):
        assert outcome.error == (
            f"SIGTERMException: rank {asker} received SIGTERM; all ranks stopped, "
            f"rank {rank} after {number} batches"
        )
        assert outcome.seconds < SOON_S
        assert outcome.exitcode != 0
    assert num_batches(folder) == batches


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("local_sgd", Plan(0, "SIGKILL", late_s=1.0)),
        ("no_sync", Plan(2, "raise")),
        ("local_sgd", Plan(0, "raise", "setup", 1)),
        pytest.param("local_sgd", Plan(2, "raise", "validation_step", 1), marks=LATER),
        ("local_sgd", Plan(0, "raise", "on_train_end", 1)),
    ],
    ids=lambda it: it if isinstance(it, str) else f"{it.rank}-{it.how}-{it.where}",
)
def test_a_rank_that_fails_ends_all(name: str, plan: Plan, tmp_path: Path) -> None:
    """Also those that wait for it, and those that need no other rank for their steps."""
    found = outcomes(name, tmp_path, plan, epochs=2 if plan.at < 20 else 1000)
    error = f"ValueError: no such luck in {plan.where}" if plan.how == "raise" else "died"
    check_named(found, plan.rank, f"failed: {error}" if plan.how == "raise" else error)
    assert found[plan.rank].error == error
    for other in {0, 1, 2} - {plan.rank}:
        assert ("noticed in: all_reduce" in found[other].error) or not plan.late_s
        assert "[replica/part-1]" in found[other].error or not plan.late_s


@LATER
def test_a_rank_that_hangs_ends_all(tmp_path: Path) -> None:
    plan, options = Plan(1, "SIGSTOP"), {"heartbeat_timeout_s": 8.0}
    found = outcomes("local_sgd", tmp_path, plan, options=options)
    check_named(found, 1, "has not answered for")
    assert found[1].exitcode == -signal.SIGKILL


@LATER
def test_a_rank_that_cannot_notice_is_ended(tmp_path: Path) -> None:
    plans = Plan(2, "SIGKILL", second=True), Plan(1, "sleep")
    found = outcomes("no_sync", tmp_path, *plans, notice_within_s=5.0)
    assert found[0].error.startswith("PeerLost: rank 2 died")
    assert (found[1].error, found[1].exitcode) == ("died", 1)
    assert found[1].seconds < SOON_S


def test_what_all_raise_before_training_each_raises_itself(tmp_path: Path) -> None:
    for outcome in outcomes("local_sgd", tmp_path, Plan(-1, "raise", "setup", 1)):
        assert outcome.error == "ValueError: no such luck in setup"
        assert outcome.seconds < SOON_S


def fail_one_after_another(net: Any) -> bool:
    net.compute(0.3 * net.rank)
    return all_fail(net)


def test_ranks_that_all_fail_wait_for_each_other_to_see_it() -> None:
    assert SimulatedWorld(3).run(fail_one_after_another) == [True] * 3


def test_a_signal_while_validating_ends_all(tmp_path: Path) -> None:
    found = outcomes("local_sgd", tmp_path, Plan(1, "SIGTERM", "validation_step", 2))
    check_named(found, 1, "received SIGTERM")


class Broadcasting(Doomed):
    """Rank 2 dies while the others are in a broadcast of torch's own."""

    def on_train_start(self) -> None:
        for i in range(100):
            if i == 50 and self.global_rank == 2:
                self.trainer.strategy.session.meet()
                os.kill(os.getpid(), signal.SIGKILL)
            self.trainer.strategy.broadcast(i)


def fit_broadcasting(folder: str) -> None:
    trainer("no_sync", 3).fit(Broadcasting(folder, ()), loader())


def test_a_rank_that_dies_in_a_collective_of_torch_is_named_too(tmp_path: Path) -> None:
    found = FitWorld().outcomes(3, fit_broadcasting, str(tmp_path))
    check_named(found, 2, "died .*; noticed in: a broadcast")


def test_after_training_each_rank_ends_by_itself(tmp_path: Path) -> None:
    """Then no rank needs another, and who looks after the processes sees the exit code."""
    found = outcomes("local_sgd", tmp_path, Plan(1, "raise", "on_fit_end", 1), epochs=1)
    assert found[1].error == "ValueError: no such luck in on_fit_end"
    assert [outcome.exitcode for outcome in found] == [0, 1, 0]


# What is left behind
def own_handler(signum: int, frame: Any) -> None:
    """A handler of the script's own."""


def fit_and_forget(options: dict[str, Any]) -> tuple[bool, list[bool]]:
    """Whether Ctrl-C is the script's own after a fit, and what the process still holds of it."""
    signal.signal(signal.SIGINT, own_handler)
    train = trainer(strategy_of("popsgd", timeout_s=60.0, **options), 2, max_epochs=1)
    model = Regression()
    train.fit(model, loader(64), loader(16))
    is_own = signal.getsignal(signal.SIGINT) is own_handler
    held = [weakref.ref(each) for each in (model, train.optimizers[0], train.strategy)]
    del model, train
    gc.collect()
    return is_own, [ref() is not None for ref in held]


@cases(
    "options",
    now=[{"on_loss": "continue"}],
    later=[{}, {"on_loss": "continue", "data": "claimed"}],
)
def test_nothing_holds_a_training_that_is_over(options: dict[str, Any]) -> None:
    """And Ctrl-C is what it was before: Lightning puts back all handlers that it has found."""
    found = FitWorld().run(2, fit_and_forget, options)
    assert found == [(True, [False] * 3)] * 2


# A rank that is told to stop stops all
def test_sigterm_to_all_ranks_stops_them_once(tmp_path: Path) -> None:
    """What is saved then is the consensus."""
    plans = Plan(-1, "SIGTERM"), Plan(-1, "SIGTERM", at=21)
    found = outcomes("local_sgd", tmp_path, *plans, saves=True)
    last = num_batches(tmp_path)[0]
    asker = int(found[0].error.split()[2])
    check_stopped(found, tmp_path, asker, [last] * 3)
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    files = Path(tmp_path, "saved.ckpt.replicas").iterdir()
    replicas = [torch.load(file, weights_only=True) for file in files]
    assert saved["global_step"] in (last - 1, last)
    assert len(replicas) == 3
    for key in ("net.0.weight", "net.3.bias"):
        mean = torch.stack([replica["state_dict"][key] for replica in replicas]).mean(0)
        assert torch.allclose(saved["state_dict"][key], mean, atol=1e-6)
    Regression.load_from_checkpoint(tmp_path / "saved.ckpt")


def test_a_first_interrupt_stops_all_after_the_same_batch(tmp_path: Path) -> None:
    found = outcomes("local_sgd", tmp_path, Plan(1, "SIGINT"))
    for outcome in found:
        assert outcome.error == "SystemExit: 1"  # as Lightning ends after a KeyboardInterrupt
        assert outcome.seconds < SOON_S
    assert len(set(num_batches(tmp_path))) == 1


def test_ranks_that_are_out_of_data_stop_with_the_others(tmp_path: Path) -> None:
    """Rank 0 waits at the end of its epoch for the others, and would begin no further batch."""
    samples = (8 * 10, 8 * 1000, 8 * 1000)
    plan = Plan(1, "SIGTERM", at=50)
    found = outcomes("no_sync", tmp_path, plan, num_samples=samples, epochs=1)
    batches = num_batches(tmp_path)
    assert batches[0] == 10
    assert batches[1] == batches[2] > 50
    check_stopped(found, tmp_path, 1, batches)


@cases("rank", now=[0], later=[2])
def test_a_failed_training_is_saved_by_rank_0_if_that_is_alive(rank: int, tmp_path: Path) -> None:
    found = outcomes("local_sgd", tmp_path, Plan(rank, "raise"), saves=True)
    check_named(found, rank, "failed: ValueError: no such luck in training_step")
    Regression.load_from_checkpoint(tmp_path / "saved.ckpt")


@LATER
def test_sigterm_in_the_last_batch_is_not_forgotten(tmp_path: Path) -> None:
    """Rank 2 waits, in its last batch, until rank 1 has asked."""
    plans = Plan(1, "SIGTERM", at=16), Plan(-1, "wait", at=16, late_s=3.0)
    found = outcomes("local_sgd", tmp_path, *plans, epochs=1)
    check_stopped(found, tmp_path, 1, [16] * 3)


@LATER
def test_a_rank_that_fails_while_all_stop_ends_all(tmp_path: Path) -> None:
    plans = Plan(1, "SIGTERM"), Plan(2, "raise", "on_save_checkpoint", 1)
    found = outcomes("local_sgd", tmp_path, *plans, saves=True)
    assert found[2].error == "ValueError: no such luck in on_save_checkpoint"
    check_named(found, 2, "")


@cases("how", now=["SIGKILL"], later=["raise"])
def test_a_rank_that_fails_between_order_and_stop_ends_all(how: str, tmp_path: Path) -> None:
    """Rank 0 holds at its next batch, so that all others still make one more."""
    plans = Plan(0, "SIGTERM", at=20), Plan(2, how, at=21, late_s=0.5)
    found = outcomes("local_sgd", tmp_path, *plans, options={"sync_period": 100})
    check_named(found, 2, "failed: ValueError" if how == "raise" else "died")


# Jobs that start their own processes: each is an interpreter that imports torch and Lightning for
# every rank, so that `make test` has one of them


@dataclass
class Job:
    exitcode: int
    stderr: str
    stdout: str
    seconds: float


def processes(marker: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # gone in the meantime
                if f"JOB={marker}".encode() in Path(folder, "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def run_job(
    folder: Path,
    *plans: Plan,
    launcher: tuple[str, ...] = (),
    starter: tuple[str, ...] = (sys.executable,),
    interrupt_at: int | None = None,
    **arguments: Any,
) -> Job:
    """Starts a job, waits until no process of it is left, and kills what is left too long."""
    asked = {"folder": str(folder), "plans": [asdict(plan) for plan in plans], **arguments}
    for plan in asked["plans"]:
        del plan["num_calls"]
    marker, begin = uuid.uuid4().hex, time.monotonic()
    command = [*starter, *launcher, str(ROOT / "tests/support/scripts/job.py"), json.dumps(asked)]
    with Path(folder, "out").open("w") as out, Path(folder, "err").open("w") as err:
        job = subprocess.Popen(
            command, env=environment(JOB=marker), stdout=out, stderr=err, start_new_session=True
        )
        try:
            if interrupt_at is not None:
                while len(done := num_batches(folder)) < 2 or min(done) < interrupt_at:
                    assert job.poll() is None
                    time.sleep(0.02)
                Path(folder, "event").write_text(str(time.monotonic()))
                os.killpg(job.pid, signal.SIGINT)
            while job.poll() is None or processes(marker):
                assert time.monotonic() < begin + 250.0, f"{processes(marker)} are still there"
                time.sleep(0.02)
            end = time.monotonic()
        finally:
            for pid in processes(marker):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            job.wait()
    event = float(Path(folder, "event").read_text())
    texts = [Path(folder, name).read_text() for name in ("err", "out")]
    print(*texts, sep="\n")
    return Job(job.returncode, *texts, end - event)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


JOBS: dict[str, tuple[Plan, tuple[str, ...], dict[str, Any], int, list[str]]] = {
    "another rank is killed": (
        *(Plan(2, "SIGKILL"), (), {"name": "no_sync", "devices": 3}, 1),
        [
            *("[rank 0] training ends: rank 2 died", "[rank 1] training ends: rank 2 died"),
            "rank 2 with -9; why stands above",
        ],
    ),
    "a rank of torchrun raises": (
        *(Plan(1, "raise"), TORCHRUN, {"saves": True}, 1),
        ["[rank 0] training ends: rank 1 failed: ValueError: no such luck in training_step"],
    ),
    "a rank fails after training": (
        *(Plan(1, "raise", "after_fit", 1, late_s=1.0), (), {"epochs": 1}, 1),
        ["ended badly: rank 1 with 1"],  # rank 0 has finished long before
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", JOBS)
def test_a_job_ends_with_its_rank(case: str, tmp_path: Path) -> None:
    plan, launcher, options, exitcode, parts = JOBS[case]
    arguments = {"name": "local_sgd", "devices": 2, **options}
    job = run_job(tmp_path, plan, launcher=launcher, **arguments)
    assert job.exitcode == exitcode
    assert job.seconds < SOON_S
    for part in parts:
        assert part in job.stderr
    assert job.stdout.count("the script has come to its end") == (plan.where == "after_fit")
    if "saves" in options:
        Regression.load_from_checkpoint(tmp_path / "saved.ckpt")


@pytest.mark.exhaustive
def test_a_job_that_is_interrupted_stops_after_the_same_batch(tmp_path: Path) -> None:
    """As by Ctrl-C: the signal goes to all processes of the group, workers of loaders included."""
    saving = {"saves": True, "num_workers": 1}
    job = run_job(tmp_path, name="allreduce", devices=2, interrupt_at=20, **saving)
    assert job.exitcode == 1
    assert job.seconds < SOON_S
    assert len(set(num_batches(tmp_path))) == 1
    assert f"saved checkpoint to {tmp_path / 'saved.ckpt'}" in job.stderr
    assert "ended badly" not in job.stderr


@pytest.mark.parametrize(
    ("stops", "child", "said"),
    [
        (False, "exit 1", "ended badly: rank 1 with 1"),
        (True, "exit 1", ""),
        (True, "kill -9 $$", "ended badly: rank 1 with -9"),
    ],
)
def test_a_rank_that_ends_as_all_stop_has_not_ended_badly(
    stops: bool, child: str, said: str, monkeypatch: Any, capsys: Any
) -> None:
    started = subprocess.Popen(["/bin/sh", "-c", child])
    ranks, statuses = Processes(), []
    ranks.take_over(SimpleNamespace(procs=[started]), "popen", str)
    if stops:
        ranks.stop()
        ranks.await_stop()
        assert started.returncode is not None
    monkeypatch.setattr(os, "_exit", statuses.append)
    ranks._await_children(os.getpid())
    assert statuses == [1]
    shown = capsys.readouterr().err
    assert said in shown
    assert bool(said) == bool(shown)


MPI_JOBS: dict[str, tuple[Plan, str, list[str]]] = {
    "is killed": (
        *(Plan(2, "SIGKILL"), "local_sgd"),
        ["] rank 2 died (its connection ended without a farewell)"],
    ),
    "raises": (
        *(Plan(2, "raise"), "allreduce"),
        [f"[rank {r}] training ends: rank 2 failed: ValueError: no such" for r in (0, 1)],
    ),
    "stops": (  # it never comes to MPI_Finalize, for which the others would wait
        *(Plan(2, "SIGSTOP"), "dpsgd"),
        [
            *(f"[rank {rank}] rank 2 has not answered for" for rank in (0, 1)),
            "not every rank has ended within 10 s: aborting the MPI job",
        ],
    ),
}


@pytest.mark.exhaustive
@every_mpi
@pytest.mark.parametrize("case", MPI_JOBS)
def test_a_job_of_mpiexec_ends_with_its_rank(case: str, python: str, tmp_path: Path) -> None:
    plan, name, parts = MPI_JOBS[case]
    leaves_the_end_to_us: list[str] = []
    if case == "is killed" and is_of_mpich(mpiexec(python)):
        # Its launcher would end the others at once, perhaps before they can say what they know.
        leaves_the_end_to_us = ["-disable-auto-cleanup"]
    starter = str(mpiexec(python)), *leaves_the_end_to_us, "-n", "3", python
    options = {"heartbeat_timeout_s": 8.0 if case == "stops" else 20.0}
    job = run_job(tmp_path, plan, starter=starter, name=name, options=options)
    assert job.exitcode != 0
    assert job.seconds < 8.0 + SOON_S
    for part in parts:
        assert part in job.stderr
