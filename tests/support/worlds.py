"""Runs a function on every rank of a world, and gives what each rank made of it.

`ProcessWorld`: `fn(net, *args)` in real processes, joined by gloo, each with a transport.
`FitWorld`: `fn(*args)` in the same processes, set up as torchrun sets them up, for `Trainer.fit`.
`FakeWorld`, `FakeFitWorld`: the same, with an accelerator that is none.
`StartWorld`, `FakeStartWorld`: the same, where the strategy makes the process group.
`ParentWorld`: `fn(*args)` in one process, whose children the ranks are, if there are any.

The processes are forked from a server that has torch and Lightning loaded.  `fn` must be a function
of a module, and its results picklable, as they come home through a pipe of `multiprocessing` (the
tests' own, not the package's).

In a file of tests, functions that run on every rank come before the tests that run them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dsgd.devices import COLLECTIVES, port_of
from lightning_dsgd.transport.process_group import ProcessGroupTransport
from tests.support import fake_device

preloaded = multiprocessing.get_context(os.environ.get("TESTS_START_METHOD", "forkserver"))
"""Starts processes that have torch and Lightning loaded; `tests.faults` forks them at once."""
# Under CUDA's sanitizer the import of torch uses CUDA, which a fork of that process then could not.
is_sanitized = bool(os.environ.get("TORCH_CUDA_SANITIZER"))
preloaded.set_forkserver_preload([] if is_sanitized else ["tests.support.preload"])


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

    timeout_s: float = 60.0  # as a machine that is busy with other things may need
    heartbeat_timeout_s: float = 20.0
    native_devices: tuple[str, ...] = tuple(COLLECTIVES)
    """On which torch's own collectives sum."""
    _device = torch.device("cpu")  # that each rank computes on
    _backend = "gloo"  # of the process group

    def _join(self, rank: int, world_size: int, store: str) -> None:
        timeout, met = timedelta(seconds=self.timeout_s), dist.FileStore(store, world_size)
        dist.init_process_group(
            self._backend, store=met, rank=rank, world_size=world_size, timeout=timeout
        )
        # A rank that is connected and ends at once would break the others' connecting.
        met.set(f"joined-{rank}", "")
        met.wait([f"joined-{other}" for other in range(world_size)], timeout)

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
            timeout_s=self.timeout_s,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            native_devices=self.native_devices,
            device=self._device,
        )

    def outcomes(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        limit_s: float = 250.0,
        stopped: Collection[int] = (),
    ) -> list[Outcome]:
        """Every rank's outcome.

        Ranks that are still alive after `limit_s` are killed; the `stopped` ones, once all others
        have ended.
        """
        with tempfile.TemporaryDirectory() as folder:
            ranks = []
            for rank in range(world_size):
                ours, theirs = preloaded.Pipe(duplex=False)
                given = theirs, self, rank, world_size, str(Path(folder, "store")), fn, args
                process = preloaded.Process(target=_run_rank, args=given)
                process.start()
                theirs.close()
                ranks.append((process, ours))
            begin = time.monotonic()
            try:
                outcomes = collect([ours for _, ours in ranks], limit_s, stopped)
            except BaseException:  # such as the limit of a test: nobody would end the ranks
                for process, _ in ranks:
                    process.kill()
                    process.join()
                raise
            for rank, ((process, _), outcome) in enumerate(zip(ranks, outcomes, strict=True)):
                left_s = 0.0 if rank in stopped else begin + limit_s - time.monotonic()
                process.join(max(0.1, left_s))
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


class OnFakeDevice:
    """Skips a test that this torch cannot run."""

    def outcomes(self, *args: Any, **kwargs: Any) -> list[Outcome]:
        if fake_device.WHY_NOT:
            pytest.skip(fake_device.WHY_NOT)
        found: list[Outcome] = super().outcomes(*args, **kwargs)  # type: ignore[misc]
        return found


@dataclass
class FakeWorld(OnFakeDevice, ProcessWorld):
    """P processes, each with an accelerator that is none and has its rank's index.

    `fn(net, fake, *args)` runs in each.

    Fails if anything was read or written on it that no wait has ordered.
    """

    seed: int = 0
    finds_races: bool = True
    num_queues: int | None = None
    """How many hardware queues all streams of a rank share; None: each has its own."""

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        rank = dist.get_rank()
        fake = fake_device.install(self.seed + rank, index=rank, num_queues=self.num_queues)
        fake.enter()
        self._device = fake.device

        def run(net: ProcessGroupTransport) -> Any:
            result = fn(net, fake, *args)
            fake.check(finds_races=self.finds_races)
            return result

        return super()._call(run, ())


class Asked:
    """Works of gloo's for sends and receives, whose end can be asked for, as that of its sums."""

    def __init__(self, works: list[Any]) -> None:
        self._works, self._failure = works, None
        self._thread = threading.Thread(target=self._await_each, daemon=True)
        self._thread.start()

    def _await_each(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as failure:
            self._failure = failure

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
        if self._failure is not None:
            raise self._failure


def ask_gloo() -> None:
    """Has the ends of gloo's sends and receives be asked for in this process."""
    by_gloo = dist.batch_isend_irecv
    dist.batch_isend_irecv = lambda calls: [Asked(by_gloo(calls))]


@dataclass
class NativeWorld(ProcessWorld):
    """P processes whose sums and pairs gloo serves, in the order and the way of NCCL's."""

    native_devices: tuple[str, ...] = ("cpu",)

    def _open(self) -> ProcessGroupTransport:
        ask_gloo()
        return super()._open()


@dataclass
class AcceleratorWorld(ProcessWorld):
    """P processes that share this machine's accelerator: `fn(net, device, *args)`."""

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        found = torch.accelerator.current_accelerator()
        assert found is not None
        port_of(found).enter()
        self._device = port_of(found).device

        def run(net: ProcessGroupTransport) -> Any:
            return fn(net, self._device, *args)

        return super()._call(run, ())


def share_a_gpu(rank: int) -> None:
    """Has NCCL take this rank for one on a node of its own: of a node's it takes one for a GPU."""
    os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo"}
    os.environ |= {"NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}


@dataclass
class NCCLWorld(AcceleratorWorld):
    """The same, with NCCL; a GPU serves several ranks, as if each were a node of its own."""

    backend: str | None = "nccl"

    def _join(self, rank: int, world_size: int, store: str) -> None:
        num_gpus = torch.cuda.device_count()
        if num_gpus < world_size:
            share_a_gpu(rank)
        device = torch.device("cuda", rank % num_gpus)
        torch.cuda.set_device(device)
        met = dist.FileStore(store, world_size)  # type: ignore[attr-defined]
        dist.init_process_group(
            self.backend, store=met, rank=rank, world_size=world_size, device_id=device
        )

    def _open(self) -> ProcessGroupTransport:
        net = super()._open()
        assert net._native is not None, net.engines()
        return net


ON_ACCELERATORS = [AcceleratorWorld(), pytest.param(NCCLWorld(), marks=pytest.mark.gpu("cuda"))]


@dataclass
class FitWorld(ProcessWorld):
    """P processes that a Trainer takes for those of torchrun: `Trainer(devices=P, ...)`."""

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        _set_up_as_torchrun_does(dist.get_rank(), dist.get_world_size(), port=1)
        return fn(*args)


@dataclass
class OneFakeDevice(OnFakeDevice):
    """Gives each rank an accelerator that is none, with the same index: `fn(fake, *args)`."""

    seed: int = 0

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        def run() -> Any:
            fake = fake_device.install(self.seed + int(os.environ["RANK"]))
            with fake_device.parameters_allowed():
                result = fn(fake, *args)
            fake.check()
            return result

        return super()._call(run, ())  # type: ignore[misc]


@dataclass
class FakeFitWorld(OneFakeDevice, FitWorld):
    """A FitWorld on a device that is none."""


@dataclass
class StartWorld(ProcessWorld):
    """P processes of torchrun that have not been joined: the strategy is to do that."""

    port: int = 0
    """At which the ranks meet."""

    def _join(self, rank: int, world_size: int, store: str) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        _set_up_as_torchrun_does(rank, world_size, self.port)
        return fn(*args)


@dataclass
class FakeStartWorld(OneFakeDevice, StartWorld):
    """A StartWorld on a device that is none."""


@dataclass
class ParentWorld(ProcessWorld):
    """One process, of which the ranks are children."""

    def _join(self, rank: int, world_size: int, store: str) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        result = fn(*args)
        assert not multiprocessing.active_children()
        return result


def _set_up_as_torchrun_does(rank: int, world_size: int, port: int) -> None:
    given = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world_size}
    given |= {"LOCAL_WORLD_SIZE": world_size, "TORCHELASTIC_RUN_ID": "tests"}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    given["OMP_NUM_THREADS"] = 1  # else Lightning sets what suits one job on this machine
    os.environ.update({name: str(value) for name, value in given.items()})


def collect(
    pipes: list[Connection], limit_s: float, stopped: Collection[int] = ()
) -> list[Outcome]:
    """What comes through each rank's pipe in time; nobody waits for the stopped ones."""
    begin = time.monotonic()
    outcomes = [Outcome(error="nothing came back") for _ in pipes]
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while not set(stopped) >= set(open_pipes.values()) and time.monotonic() < begin + limit_s:
        for pipe in wait(list(open_pipes), timeout=1.0):
            assert isinstance(pipe, Connection)
            outcome = outcomes[open_pipes.pop(pipe)]
            outcome.seconds = time.monotonic() - begin
            try:
                outcome.result, outcome.error = pickle.loads(pipe.recv_bytes())
            except EOFError:
                outcome.error = "died"
    return outcomes


def _run_rank(pipe: Connection, *given: Any) -> None:
    if preloaded.get_start_method() == "fork":
        warnings.resetwarnings()  # to a rank of the server pytest's "error" does not come either
    torch.set_num_threads(1)
    error = run_joined(pipe, *given)
    pipe.close()
    sys.exit(1 if error else 0)


def run_joined(
    pipe: Connection,
    world: ProcessWorld,
    rank: int,
    world_size: int,
    store: str,
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
