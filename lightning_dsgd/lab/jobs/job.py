"""Cells of a measurement, one after the other, on ranks that are started once.

    job = Job(f"{__file__}:measure", settings={...}, ranks=8, link=Link(1e9))
    results = job.run([{"strategy": "wagma", "round": 0}, ...], Path("FILE.json"))

Every rank calls `measure(cell, settings)` for one cell after another; what it returns, a dict that
JSON can hold, goes into a file, and the process that started the ranks collects them: result i is
`{**cell, "ranks": [of rank 0, of rank 1, ...]}`.  Cells that are done are kept (`cells.py`): a
run that was interrupted goes on where it was.

Launchers: `subprocess` starts each rank itself, with the variables that torchrun sets; `torchrun`
and `mpiexec` are those programs.  With a link, each rank runs on a node of its own (`network.py`).
Ranks end with the process that started them, whatever ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightning_dsgd.lab.jobs.cells import Cell, measured, name
from lightning_dsgd.lab.jobs.network import INTERFACE, Network, describe
from lightning_dsgd.lab.link import Link
from lightning_dsgd.lab.results import provenance

LAUNCHERS: Final = ("subprocess", "torchrun", "mpiexec")
_QUIET: Final = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # c10d looks for names that nodes do not have
_POLL_S: Final = 0.1
_END_WITHIN_S: Final = 10.0
_PR_SET_PDEATHSIG: Final = 1


@dataclass
class Job:
    """Runs ranks that measure.

    Args:
        function: "module:name" or "file.py:name" of the function that each rank calls for each cell
        settings: what all cells have in common; JSON
        ranks: the number of ranks
        link: the link of each rank to the others; None for loopback
        launcher: one of LAUNCHERS
        cell_timeout_s: how long a cell may take before the job is given up
    """

    function: str
    settings: dict[str, Any]
    ranks: int
    link: Link | None = None
    launcher: str = LAUNCHERS[0]
    cell_timeout_s: float = 1800.0

    def run(self, cells: Sequence[Cell], output: Path) -> list[Cell]:
        """Measures all cells, but for those that an interrupted run into `output` has done."""
        return measured(cells, output, self._identity(), self.measure)

    def provenance(self, command: str | None = None) -> dict[str, Any]:
        """Returns what a result file says of how it was made."""
        return {
            **provenance(command),
            "launcher": self.launcher,
            "settings": {**self.settings, "ranks": self.ranks, "network": describe(self.link)},
        }

    def _identity(self) -> str:
        what = [self.function, self.settings, self.ranks, describe(self.link), self.launcher]
        return json.dumps(what, sort_keys=True)

    def measure(self, cells: Sequence[Cell]) -> Iterator[Cell]:
        """Starts the ranks, and yields the result of one cell after another."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_sigterm_as_exit())
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dsgd-bench-")))
            network = None
            if self.link is not None:
                network = stack.enter_context(Network(self.ranks, self.link))
            plan = {"function": self.function, "settings": self.settings, "cells": list(cells)}
            (folder / "plan.json").write_text(json.dumps(plan))
            processes = [_start(*one) for one in self._commands(folder, network)]
            stack.callback(_end, processes)
            for index, cell in enumerate(cells):
                parts = [folder / f"{index}.{rank}.json" for rank in range(self.ranks)]
                self._await(parts, processes, cell)
                yield {**cell, "ranks": [json.loads(part.read_text()) for part in parts]}
            _await_end(processes)

    def _await(
        self, parts: list[Path], processes: list[subprocess.Popen[bytes]], cell: Cell
    ) -> None:
        deadline = time.monotonic() + self.cell_timeout_s
        give_up_at = deadline
        while missing := [rank for rank, part in enumerate(parts) if not part.exists()]:
            failed = [p.returncode for p in processes if p.poll()]
            if failed and give_up_at == deadline:
                give_up_at = time.monotonic() + _END_WITHIN_S  # others may be a cell behind
            if failed and (
                time.monotonic() > give_up_at or all(p.poll() is not None for p in processes)
            ):
                raise SystemExit(
                    f"the ranks ended with status {failed[0]} while measuring {name(cell)}; what "
                    "they said is above, and the cells before this one are kept"
                )
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"ranks {missing} have not measured {name(cell)} within "
                    f"{self.cell_timeout_s:g} s"
                )
            time.sleep(_POLL_S)

    def _commands(
        self, folder: Path, network: Network | None
    ) -> Iterator[tuple[list[str], dict[str, str]]]:
        """Returns the command and the environment of each process that is to be started."""
        rank = [str(Path(__file__).with_name("run_cells.py")), str(folder)]
        environment = {**os.environ, **_QUIET, "OMP_NUM_THREADS": "1"}
        if network is not None:
            environment["GLOO_SOCKET_IFNAME"] = INTERFACE
        host, port = (network.address(0), 29500) if network else ("127.0.0.1", _free_port())
        if self.launcher == "mpiexec":
            yield _mpiexec(self.ranks, rank, network, folder, environment)
        elif self.launcher == "torchrun":
            torchrun = [sys.executable, "-m", "torch.distributed.run"]
            if network is None:
                yield (
                    [*torchrun, "--standalone", f"--nproc-per-node={self.ranks}", *rank],
                    environment,
                )
                return
            torchrun += [f"--nnodes={self.ranks}", "--nproc-per-node=1"]
            torchrun += [f"--master-addr={host}", f"--master-port={port}"]
            for node in range(self.ranks):
                command = [*network.inside(node), *torchrun, f"--node-rank={node}", *rank]
                yield command, environment
        elif self.launcher == "subprocess":
            for index in range(self.ranks):
                command = [sys.executable, *rank]
                yield (
                    command if network is None else [*network.inside(index), *command],
                    environment | _as_torchrun(index, self.ranks, host, port),
                )
        else:
            raise ValueError(
                f"launcher must be one of {', '.join(LAUNCHERS)}, got {self.launcher!r}"
            )


# ---- starting and ending ranks ----


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env=environment, start_new_session=True, preexec_fn=_die_with_parent
    )


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _await_end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Says which ranks did not end well, after all was measured."""
    deadline = time.monotonic() + _END_WITHIN_S * 6
    for process in processes:
        try:
            status = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = None
        if status != 0:
            how = "is still running and is killed" if status is None else f"ended with {status}"
            print(f"all was measured, but process {process.pid} {how}", file=sys.stderr)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ends the processes that still run, with all that they have started."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signum)
        deadline = time.monotonic() + _END_WITHIN_S
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            time.sleep(_POLL_S)


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Turns SIGTERM into SystemExit, so that temporary files and networks are removed."""

    def leave(signum: int, frame: Any) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _as_torchrun(rank: int, world_size: int, host: str, port: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "TORCHELASTIC_RUN_ID": "lightning-dsgd-bench",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _mpiexec(
    ranks: int,
    rank: list[str],
    network: Network | None,
    folder: Path,
    environment: dict[str, str],
) -> tuple[list[str], dict[str, str]]:
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if mpiexec is None:
        raise SystemExit("mpiexec is not here; try: pip install mpi4py mpich")
    command = [mpiexec, "-n", str(ranks)]
    if network is not None:
        if not is_of_mpich(mpiexec):
            raise SystemExit("--network with mpiexec needs MPICH; try --launcher torchrun")
        shell = network.shell(folder)
        hosts = ",".join(network.address(node) for node in range(ranks))
        command = [*network.inside(0), mpiexec, "-launcher", "ssh", "-launcher-exec", str(shell)]
        command += ["-hosts", hosts, "-iface", INTERFACE, "-n", str(ranks), "-ppn", "1"]
        environment = {**environment, "FI_TCP_IFACE": INTERFACE, "FI_PROVIDER": "tcp"}
    return [*command, sys.executable, *rank], environment


def is_of_mpich(mpiexec: str | Path) -> bool:
    """Returns whether the launcher is MPICH's or its kin's; else it is Open MPI's."""
    asked = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=60)
    return "HYDRA" in asked.stdout
