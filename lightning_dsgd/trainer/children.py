"""The processes of this node's ranks: how they are started, and how they end.

Lightning starts ranks in three ways:

    popen         rank 0 is the script; it starts the script again for each of the others
    fork, spawn   the script starts all ranks, and is none itself
    (none)        a launcher has started them: torchrun, srun, mpirun

The training thread calls all of this, but for `end_children`, which the watch over a hanging rank
calls from its own thread, and `_await_children`, which Python calls when it ends.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_dsgd.session.ending import say
from lightning_dsgd.trainer import seams
from lightning_dsgd.transport import PeerLost

_PAUSE_HARD: Final = 2  # omp_pause_hard
_CHILDREN_END_WITHIN_S: Final = 10.0
_CHILDREN_STOP_WITHIN_S: Final = 30.0
"""How long ranks may take to end once all have stopped after the same batch, and have saved."""
_POLL_CHILDREN_S: Final = 0.05
_CAUSE_ENDS_WITHIN_S: Final = 5.0
"""How long a rank, forked or spawned, lets the rank that it has lost end before itself."""


def start_method(environment: Any, method: Any, *, is_chosen: bool) -> Any:
    """Returns how ranks are started; an interactive session has no script, and forks its ranks.

    Args:
        environment: Lightning's cluster environment
        method: the strategy's start method, or Lightning's default
        is_chosen: whether the user has chosen the method
    """
    name = type(environment).__name__
    if environment.creates_processes_externally:
        if is_chosen and method != "popen":
            raise ValueError(
                "start_method must be left out where a launcher has started the ranks, got "
                f"start_method={method!r} in the environment of {name}; leave it out, or start "
                "the script without the launcher"
            )
        if _is_interactive():
            raise ValueError(
                "an interactive session must start its ranks itself, got the environment of "
                f"{name}, whose ranks a launcher starts; use "
                "Trainer(plugins=[LightningEnvironment()]) of "
                "lightning.pytorch.plugins.environments, or run a script"
            )
    elif _is_interactive():
        if is_chosen and method != "fork":
            raise ValueError(
                "the ranks of an interactive session must be forked, got "
                f"start_method={method!r}; leave it out, or run a script"
            )
        _announce_forks()
        return "fork"
    return method


class Processes:
    """Keeps the processes that this one has started, or the process that has started this one."""

    def __init__(self) -> None:
        self._launcher: Any = None
        self._is_rank = False
        self._start_method = "popen"
        self._has_openmp = True
        self._awaits_children = False
        self._forgives = False
        self._has_failed = False
        self._all_stop = False

    def take_over(self, launcher: Any, method: str, fail: Callable[[BaseException], str]) -> None:
        """Takes over Lightning's launcher.

        Args:
            launcher: the launcher, just made
            method: how the launcher starts ranks
            fail: ends this rank's part in the training, and says what became of the rank
        """
        self._launcher, self._start_method = launcher, method
        self._fail = fail
        if method != "popen":
            # Lightning calls no hook in a rank that it has forked or spawned and that fails.
            seams.take_over_launcher(launcher, self._launch, self._run_rank)

    def become_rank(self) -> None:
        """Makes this process a rank; it outlives other ranks that are its children."""
        self._is_rank = True
        if self._children() and not self._awaits_children:
            self._awaits_children = True
            atexit.register(self._await_children, os.getpid())

    def forgive(self) -> None:
        """Has a rank that ends badly end no other rank, and not make the job fail."""
        seams.quiet_observer()
        self._forgives = True

    @property
    def is_parent_alone(self) -> bool:
        """Whether this process has forked or spawned all ranks, and is no rank."""
        return not self._is_rank and self._start_method != "popen"

    def end_forked(self) -> None:
        """Ends the ranks that this process has forked or spawned."""
        for child in self._forked():
            child.terminate()
        deadline = time.monotonic() + _CHILDREN_END_WITHIN_S
        for child in self._forked():
            child.join(max(0.0, deadline - time.monotonic()))
            if child.is_alive():
                child.kill()
                child.join()

    def end_children(self, within_s: float = _CHILDREN_END_WITHIN_S) -> None:
        """Ends the ranks that run this process's script, after some time to end by themselves.

        They are not ended where they go on without this process.
        """
        if self._forgives:
            return
        self._has_failed = True
        self._end_children_within(within_s)

    def stop(self) -> None:
        """Notes that a signal stops all ranks: each ends by itself, with an exit status of 1."""
        self._all_stop = True

    def await_stop(self) -> None:
        """Lets the ranks that run this process's script end by themselves, as all stop.

        Lightning kills them on Ctrl-C as soon as this rank has ended its part.
        """
        self._end_children_within(_CHILDREN_STOP_WITHIN_S)

    def _end_children_within(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for child in self._children():
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _children(self) -> list[subprocess.Popen[bytes]]:
        """Returns the other ranks, where they run this process's script."""
        started = seams.started_by(self._launcher)
        return [child for child in started if isinstance(child, subprocess.Popen)]

    def _forked(self) -> list[BaseProcess]:
        """Returns the ranks that this process has forked or spawned and that are alive."""
        started = seams.started_by(self._launcher)
        return [child for child in multiprocessing.active_children() if child in started]

    def _launch(self, *args: Any, **kwargs: Any) -> Any:
        """Starts ranks, which may compute on several threads whatever this process has computed."""
        if self._start_method == "fork":
            self._has_openmp = _end_openmp_threads()
        return seams.launch(self._launcher, *args, **kwargs)

    def _run_rank(self, local_rank: int, *args: Any) -> None:
        """Runs a rank that was forked or spawned, and fails as torch understands it.

        The parent raises what the first rank that ends has raised, so a rank that has lost another
        ends after that one.  It takes a rank that exits with 0 for one that has returned its
        results.
        """
        if not self._has_openmp:
            os.environ["OMP_NUM_THREADS"] = "1"  # else Lightning sets what suits the cores
            torch.set_num_threads(1)
        try:
            seams.run_rank(self._launcher, local_rank, *args)
        except BaseException as exception:
            reason = self._fail(exception)
            if isinstance(exception, PeerLost):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)  # with which the parent ends it
                time.sleep(_CAUSE_ENDS_WITHIN_S)
            is_exit = isinstance(exception, SystemExit) and not exception.code
            if isinstance(exception, KeyboardInterrupt) or is_exit:
                raise SystemExit(reason) from None
            raise

    def _await_children(self, pid: int) -> None:
        """Waits for the other ranks: a job is done when all are, and has failed when one has."""
        if os.getpid() != pid:
            return  # a fork, to which nobody is a child
        seams.quiet_observer()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # ends the waits of others for this rank
        children, has_failed = self._children(), self._has_failed
        while any(child.poll() is None for child in children):
            if any(child.returncode for child in children) and not self._forgives:
                if self._all_stop:
                    self.await_stop()
                else:
                    self.end_children()
            time.sleep(_POLL_CHILDREN_S)
        failed = [
            f"rank {rank} with {child.returncode}"
            for rank, child in enumerate(children, 1)
            if child.returncode
        ]
        if failed:
            was_killed = any(child.returncode < 0 for child in children)
            # The last words are those of this rank where it has failed, or where all have stopped.
            if was_killed or not (has_failed or self._all_stop):
                say(f"lightning_dsgd: ended badly: {', '.join(failed)}; why stands above")
            if not self._forgives:
                sys.stdout.flush()
                os._exit(1)


def _is_interactive() -> bool:
    """Returns whether this is a notebook or a prompt, as Lightning sees it."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


@functools.cache
def _announce_forks() -> None:
    rank_zero_info("An interactive session: the ranks are forked from this process.")


def _end_openmp_threads() -> bool:
    """Ends OpenMP's threads for this thread; returns whether a forked process may have its own.

    A forked process with GNU's OpenMP believes that its parent's threads are there too, and waits
    for them in its first parallel region, for ever.  Threads are started again where needed.
    Other OpenMPs (LLVM's, Intel's) see to that themselves.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():  # not Linux, where torch brings another OpenMP than GNU's
        return True
    files = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()}
    try:
        results = [
            ctypes.CDLL(file).omp_pause_resource_all(_PAUSE_HARD)
            for file in sorted(files)
            if Path(file).name.startswith("libgomp")
        ]
    except (AttributeError, OSError):  # it is older than OpenMP 5.0, or its file is gone
        return False
    return not any(results)
