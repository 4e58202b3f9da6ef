"""Which process is a rank, and from when on.

A process is a rank

- from its start, if its launcher has put the rank's number into its environment, as torchrun,
  srun, mpiexec and Lightning do.  A child of a rank, such as a worker of its loader, inherits that
  number: so the rank marks its environment, and a process that finds its own number in the mark is
  no rank;
- else from its call of `init_process_group`, as with `torch.multiprocessing.spawn`, and in the
  process from which Lightning has started the others.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import MethodType, ModuleType
from typing import Any

from lightning_dsgd_rank import loops
from lightning_dsgd_rank.recorder import FOLDER, Recorder

MARK = "LIGHTNING_DSGD_TRACE_RANK"
"""Holds the number of the rank from which a process has its environment."""
_TORCH = "torch.distributed.distributed_c10d"
_NO_RANKS = (
    *("torchrun", "accelerate", "deepspeed", "torch.distributed.run", "torch.distributed.launch"),
    *("torch._inductor.compile_worker", "lightning-dsgd", "lightning_dsgd"),
)
"""Programs, and modules behind `-m`, that start ranks or work for one."""

_the_recorder: Recorder | None = None


def enter() -> None:
    """Begins to record if this process is a rank, or once it becomes one."""
    if not os.environ.get(FOLDER):
        return
    rank, world_size = numbers_of(os.environ)
    is_inherited = os.environ.get(MARK) == str(rank)
    if rank is not None and not is_inherited and not is_helper(sys.orig_argv):
        _begin(rank, world_size)
    _when_loaded(_TORCH, _hook)
    if loops.are_wanted():
        for name, hook in loops.hooks(tell_of_steps).items():
            _when_loaded(name, hook)
    os.register_at_fork(after_in_child=_forget)


def numbers_of(environment: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Returns a process's rank and the number of ranks, as far as its environment says them."""
    for rank, size in (
        ("RANK", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
        *([("SLURM_PROCID", "SLURM_NTASKS")] if environment.get("SLURM_STEP_ID") else []),
    ):
        if environment.get(rank, "").isdigit():
            world_size = environment.get(size, "")
            return int(environment[rank]), int(world_size) if world_size.isdigit() else None
    # Lightning's own launcher, which numbers the ranks of a node.
    local, node = environment.get("LOCAL_RANK", ""), environment.get("NODE_RANK", "0")
    return (int(local) if local.isdigit() and node == "0" else None), None


def is_helper(command: Sequence[str]) -> bool:
    """Returns whether a command line is of a program that starts ranks, or works for one."""
    named = [os.path.basename(word) for word in command[1:4]]
    return any(name in _NO_RANKS for name in named) or any(
        "multiprocessing" in word for word in command[1:3]
    )


def _begin(rank: int, world_size: int | None) -> Recorder:
    global _the_recorder
    if _the_recorder is None:
        os.environ[MARK] = str(rank)
        _the_recorder = Recorder(os.environ[FOLDER], rank, world_size)
        _the_recorder.begin()
    return _the_recorder


def _forget() -> None:
    """A forked child is no rank, unless it joins a process group itself."""
    global _the_recorder
    if _the_recorder is not None:
        _the_recorder.leave()
    _the_recorder = None
    loops.forget()


def _when_loaded(name: str, hook: Callable[[Any], None]) -> None:
    """Calls a function with one of torch's modules, now or once it is loaded."""
    if name in sys.modules:
        hook(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Awaits(name, hook))


class _Awaits(MetaPathFinder):
    """A finder that waits until a module is looked for, then leaves."""

    def __init__(self, name: str, hook: Callable[[Any], None]) -> None:
        self._name, self._hook = name, hook

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute, hook = loader.exec_module, self._hook

            def execute_and_hook(_: Any, module: ModuleType) -> None:
                execute(module)
                with contextlib.suppress(Exception):
                    hook(module)

            loader.exec_module = MethodType(execute_and_hook, loader)
        return spec


def tell_of_steps(text: str) -> None:
    """Records why the steps of this rank are not recorded, or not any more."""
    if _the_recorder is not None:
        _the_recorder.has_steps(text)


def _hook(torchs: Any) -> None:
    """Lets `init_process_group` tell the recorder when it begins and when it has returned."""
    original = torchs.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        # What the recorder cannot do is no reason to stop the user.
        with contextlib.suppress(Exception):
            _joins(kwargs)
        returned = original(*args, **kwargs)
        with contextlib.suppress(Exception):
            rank, world_size = torchs.get_rank(), torchs.get_world_size()
            _begin(rank, world_size).has_joined(rank, world_size)
        return returned

    torchs.init_process_group = init_process_group


def _joins(kwargs: Mapping[str, Any]) -> None:
    rank, world_size = numbers_of(os.environ)
    given = kwargs.get("rank", -1)
    if isinstance(given, int) and given >= 0:
        rank, world_size = given, kwargs.get("world_size")
    if _the_recorder is not None or rank is not None:
        assert rank is not None
        _begin(rank, world_size).joins(world_size)
