"""A rank that does not start, or dies while all connect: the others end in time, and name it."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_dsgd.trainer.named import strategy_of
from lightning_dsgd.transport import TransportError, processes
from lightning_dsgd.transport.rendezvous import Rendezvous
from tests.support.models import Regression, loader, trainer
from tests.support.mpi import ROOT, ended
from tests.support.ports import free_port
from tests.support.thorough import cases
from tests.support.worlds import Outcome, StartWorld


def fail_at(where: str) -> None:
    if where.startswith("stops"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if where.startswith("raises"):
        raise TransportError("no such luck")
    os.kill(os.getpid(), signal.SIGKILL)


def fit(who: int, where: str, startup_timeout_s: float) -> tuple[float, str]:
    rank = int(os.environ["RANK"])
    if rank == who and where == "never comes":
        os._exit(0)
    if rank == who and where.endswith("the process group"):
        dist.init_process_group = lambda *args, **kwargs: fail_at(where)  # type: ignore[assignment]
    if rank == who and where.endswith("the first exchange"):
        processes._gather_json = lambda *args: fail_at(where)  # type: ignore[assignment]
    strategy = strategy_of("dpsgd", timeout_s=20.0, startup_timeout_s=startup_timeout_s)
    begin = time.monotonic()
    try:
        trainer(strategy, int(os.environ["WORLD_SIZE"]), max_steps=2).fit(Regression(), loader())
    except TransportError as error:
        return time.monotonic() - begin, f"{type(error).__name__}: {error}"
    return time.monotonic() - begin, "trained"


def outcomes(who: int, where: str, startup_timeout_s: float = 60.0) -> list[Outcome]:
    return StartWorld(port=free_port()).outcomes(3, fit, who, where, startup_timeout_s)


def survivors(found: list[Outcome], who: int) -> list[Any]:
    results = [outcome.result for rank, outcome in enumerate(found) if rank != who]
    assert None not in results
    return results


def test_who_does_not_start_is_named() -> None:
    for seconds, end in survivors(outcomes(2, "never comes", 7.0), 2):
        assert end.startswith(
            "Timeout: all 3 ranks must start within startup_timeout_s=7, but rank 2 did not come"
        )
        assert seconds < 7.0 + 25.0


def test_where_rank_0_does_not_start_its_address_is_named() -> None:
    for seconds, end in survivors(outcomes(0, "never comes", 2.0), 0):
        assert "must reach rank 0 at 127.0.0.1:" in end
        assert end.startswith("Timeout: rank ")
        assert seconds < 2.0 + 25.0


@cases(
    "who, where, text",
    now=[(2, "dies in the first exchange", "rank 2 died, or is stopped; noticed in: ")],
    later=[
        (0, "dies in the process group", "rank 0 ended at 127.0.0.1:"),
        (2, "raises in the process group", "rank 2 failed: TransportError: no such luck;"),
    ],
)
def test_who_ends_while_all_connect_is_named(who: int, where: str, text: str) -> None:
    limit = 12.0 if who == 0 else 60.0  # torch notices that rank 0 has died by itself
    for seconds, end in survivors(outcomes(who, where, limit), who):
        assert end.startswith(f"PeerLost: {text}")
        assert seconds < 50.0


def fit_beside_one_that_stops(who: int, folder: str) -> tuple[float, str]:
    pid = Path(folder, "pid")
    if int(os.environ["RANK"]) == who:
        pid.write_text(str(os.getpid()))
    ended = fit(who, "stops in the first exchange", 6.0)
    with contextlib.suppress(ProcessLookupError):  # nobody else ends what does not run
        os.kill(int(pid.read_text()), signal.SIGKILL)
    return ended


@pytest.mark.exhaustive
def test_who_is_stopped_while_all_connect_is_named(tmp_path: Path) -> None:
    """It is rank 0, of which torch's store would wait for ever for an answer."""
    world = StartWorld(port=free_port())
    found = world.outcomes(3, fit_beside_one_that_stops, 0, str(tmp_path))
    for seconds, end in survivors(found, 0):
        assert end.startswith("PeerLost: rank 0 "), end
        assert seconds < 6.0 + 40.0


@pytest.mark.exhaustive
def test_ranks_that_torchrun_starts_again_do_not_meet_those_of_before() -> None:
    """Whose addresses are still in the store, which is torchrun's."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--nproc-per-node", "2", "--max-restarts", "1"]
    script = str(ROOT / "tests/support/scripts/restarted.py")
    job = ended([*torchrun, *options, script])
    assert job.returncode == 0, job.stderr
    for rank in range(2):
        assert f"trained as rank {rank}" in job.stdout


def test_a_forked_process_does_not_join_the_thread_of_a_store_in_its_garbage() -> None:
    """As a second Trainer's forked ranks, and loader workers, have that of an earlier training."""
    [outcome] = StartWorld(port=free_port()).outcomes(1, fork_beside_a_dead_store)
    assert outcome.result == 0, outcome


def collect_beside_threads() -> None:
    """These take the places of those threads that the parent has, and this process has not."""
    for _ in range(8):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    gc.collect()


def fork_beside_a_dead_store() -> int | None:
    met = Rendezvous(0, 1, "127.0.0.1", int(os.environ["MASTER_PORT"]), 20.0, "the environment")
    met.join()
    gc.disable()
    dead: list[Any] = [dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)]  # type: ignore[attr-defined]
    dead.append(dead)  # a circle, as a Trainer is in
    del dead
    child = multiprocessing.get_context("fork").Process(target=collect_beside_threads)
    child.start()
    child.join(20.0)
    if child.is_alive():
        child.kill()
    child.join()
    return child.exitcode
