"""Runs a function on every rank of a world, and gives what each rank made of it.

`ProcessWorld`: `fn(net, *args)` in real processes, joined by gloo, each with a transport.
`FitWorld`: `fn(*args)` in the same processes, set up as torchrun sets them up, for `Trainer.fit`.

The processes are forked from a server that has torch and Lightning loaded.  `fn` must be a function
of a module, and its results picklable, as they come home through a pipe of `multiprocessing` (the
tests' own, not the package's).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dsgd.bench import network
from lightning_dsgd.transport.process_group import ProcessGroupTransport

shaped = pytest.mark.skipif(bool(network.why_not()), reason=network.why_not() or "possible here")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preload"])


@dataclass
class Outcome:
    """What became of one rank."""

    result: Any = None
    error: str = ""
    """The exception as "Name: text", empty if there was none."""
    exitcode: int | None = None
    seconds: float = 0.0
    """From the start of the world to this rank's result."""


@dataclass
class ProcessWorld:
    """P processes, each with a `ProcessGroupTransport`."""

    timeout_s: float = 20.0
    heartbeat_timeout_s: float = 20.0

    def _join(self, rank: int, world_size: int, store: str) -> None:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=self.timeout_s),
        )

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        net = self._open()
        try:
            result = fn(net, *args)
            net.close()
        except BaseException as exception:
            net.fail(f"failed: {type(exception).__name__}: {exception}")
            raise
        return result

    def _open(self) -> ProcessGroupTransport:
        return ProcessGroupTransport(
            timeout_s=self.timeout_s, heartbeat_timeout_s=self.heartbeat_timeout_s
        )

    def outcomes(
        self, world_size: int, fn: Callable[..., Any], *args: Any, limit_s: float = 60.0
    ) -> list[Outcome]:
        """Every rank's outcome; ranks that are still alive after `limit_s` are killed."""
        with tempfile.TemporaryDirectory() as folder:
            ranks = []
            for rank in range(world_size):
                ours, theirs = _context.Pipe(duplex=False)
                process = _context.Process(
                    target=_run_rank,
                    args=(self, rank, world_size, str(Path(folder, "store")), theirs, fn, args),
                )
                process.start()
                theirs.close()
                ranks.append((process, ours))
            begin = time.monotonic()
            outcomes = collect([ours for _, ours in ranks], limit_s)
            for (process, _), outcome in zip(ranks, outcomes, strict=True):
                process.join(max(0.1, begin + limit_s - time.monotonic()))
                if process.is_alive():
                    outcome.error = f"still alive after {limit_s} s: {outcome.error}"
                    process.kill()
                    process.join()
                outcome.exitcode = process.exitcode
            return outcomes

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Every rank's result; raises if any rank failed."""
        outcomes = self.outcomes(world_size, fn, *args)
        errors = [f"rank {r}: {o.error}" for r, o in enumerate(outcomes) if o.error]
        assert not errors, "\n".join(errors)
        return [outcome.result for outcome in outcomes]


@dataclass
class FitWorld(ProcessWorld):
    """P processes that a Trainer takes for those of torchrun: `Trainer(devices=P, ...)`."""

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            GROUP_RANK="0",
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            TORCHELASTIC_RUN_ID="tests",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="1",
            OMP_NUM_THREADS="1",  # else Lightning sets what suits one job on this machine
        )
        return fn(*args)


def collect(pipes: list[Connection], limit_s: float) -> list[Outcome]:
    """What comes through each rank's pipe in time."""
    begin = time.monotonic()
    outcomes = [Outcome(error="nothing came back") for _ in pipes]
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes and time.monotonic() < begin + limit_s:
        for pipe in wait(list(open_pipes), timeout=1.0):
            assert isinstance(pipe, Connection)
            outcome = outcomes[open_pipes.pop(pipe)]
            outcome.seconds = time.monotonic() - begin
            try:
                outcome.result, outcome.error = pickle.loads(pipe.recv_bytes())
            except EOFError:
                outcome.error = "died"
    return outcomes


def _run_rank(
    world: ProcessWorld,
    rank: int,
    world_size: int,
    store: str,
    pipe: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    error = run_joined(world, rank, world_size, store, pipe, fn, args)
    pipe.close()
    sys.exit(1 if error else 0)


def run_joined(
    world: ProcessWorld,
    rank: int,
    world_size: int,
    store: str,
    pipe: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> str:
    """Runs `fn` in the process group of these ranks, and sends what it made of it."""
    try:
        world._join(rank, world_size, store)
        result, error = world._call(fn, args), ""
    except BaseException as exception:
        traceback.print_exc()
        result, error = None, f"{type(exception).__name__}: {exception}"
    # Not `send`, which leaves a tensor's memory with this process, which ends.
    pipe.send_bytes(pickle.dumps((result, error)))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    return error
