"""Accelerators: the one module of the core that knows of them.

A `Port` is what threads and messages need of one device:

    enter                  this thread works on the device; without it, a call of the thread goes
                           to the device of index 0, and makes a context there
    current, new, using    streams: what this thread queues goes onto its current one
    mark                   a point in the current stream, which passes once all before it is done
    pinned, copy           host memory that copies run to and from beside everything else

**Who waits for what.**  The host asks a mark whether it `has_passed`, again and again (`until`), so
a time-out, a stop or a lost rank ends each such wait.  A stream waits for another one by `hold`,
and then for computation only.  No stream ever waits for the network: what comes from there is on
the device, as the host has seen, before anything that reads it is queued.

Threads with streams of their own hand tensors over by a message to their own rank, which carries a
mark, or under a lock that keeps one (`primitives/own_device.py`).  A lane's stream must not wait
for a slow kernel of the training, for other ranks wait for the lane: it is told of what the device
has made (`Lane.tell`), and takes what has been made (`primitives/published.py`).

**Graphs.**  Marks are asked, and memory is pinned, while another thread may capture a CUDA graph.
CUDA ends a capture in the mode "global" then.  A thread could be exempted by
`cudaThreadExchangeStreamCaptureMode`, which `torch.cuda.cudart()` does not have.  So who captures
must choose the mode "thread_local".

The base class `Port` is the CPU's: nothing, or an ordinary copy.  `Accelerator` is written against
`torch.accelerator`, so that it knows no vendor.  `add_port` brings in a port for another type of
device.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from lightning_dsgd.buffers import buffer

SHORTEST_PAUSE_S: Final = 20e-6
LONGEST_PAUSE_S: Final = 1e-3
"""Whoever must look again and again pauses between two looks, each time longer."""

COLLECTIVES: Final = {"cuda": "nccl", "xpu": "xccl"}
"""The library that sums tensors of all ranks, for each type of device that has one."""

CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
"""The variable that says how many hardware queues CUDA makes for a process; unset: 8."""
_MOST_CONNECTIONS: Final = 32

T = TypeVar("T")


class Mark:
    """A point in a stream of work on a device; on the CPU it has passed."""

    def has_passed(self) -> bool:
        """Returns whether all that was queued before the mark is done; never blocks."""
        return True

    def hold(self) -> None:
        """Has all that this thread queues from now on run after the mark; never blocks."""


PASSED: Final = Mark()


class Port:
    """One device, as threads and messages need it; any thread may use it.

    This one is the CPU's: whatever is queued is done at once.
    """

    device = torch.device("cpu")

    def enter(self) -> None:
        """Has this thread work on the device from now on."""

    def current(self) -> Any:
        """Returns the stream that this thread queues onto."""

    def new(self) -> Any:
        """Returns a new stream."""

    def side(self) -> Any:
        """Returns this thread's stream for copies beside what the thread computes."""

    def using(self, stream: Any) -> AbstractContextManager[None]:
        """Has this thread queue onto that stream within the block."""
        return contextlib.nullcontext()

    def mark(self) -> Mark:
        """Returns a mark at the present end of the current stream."""
        return PASSED

    def keep(self, x: Tensor) -> None:
        """Keeps the memory of `x`, made on another stream, until what is queued here is done."""

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a tensor in pinned memory of the host, of any contents."""
        return buffer(numel, dtype)

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Queues a copy from or to pinned memory; neither tensor may change until it is done."""
        into.copy_(source)

    def finish(self) -> None:
        """Waits, without a limit, until all queued work is done: for whoever measures time."""


HOST: Final = Port()


class _Event(Mark):
    """A mark that is an event in the current stream of a port."""

    def __init__(self, port: Accelerator) -> None:
        self._port = port
        self._event = torch.Event(port.device)
        self._event.record(port.current())
        self._has_passed = False

    def has_passed(self) -> bool:
        if not self._has_passed and self._event.query():
            self._event.synchronize()  # returns at once; tells CUDA's sanitizer what query has seen
            self._has_passed = True
        return self._has_passed

    def hold(self) -> None:
        if not self._has_passed:
            self._port.current().wait_event(self._event)


class Accelerator(Port):
    """A device of the accelerator that this torch is built for.

    Args:
        device: with its index, or without, for the one of this thread
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._first: torch.Stream | None = None

    def enter(self) -> None:
        torch.accelerator.set_device_index(self.device.index)
        # With the first stream torch makes all that a device has, and tells CUDA's sanitizer of
        # each, in Python: a thread that makes it waits for the GIL, and another may hold that and
        # wait for the first.  So one thread makes it, and the others wait here.
        if self._first is None:
            with self._lock:
                self._first = self._first or self.new()

    def current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def new(self) -> torch.Stream:
        return torch.Stream(self.device)

    def side(self) -> torch.Stream:
        if not hasattr(self._of_thread, "side"):
            self._of_thread.side = self.new()
        side: torch.Stream = self._of_thread.side
        return side

    @contextlib.contextmanager
    def using(self, stream: torch.Stream) -> Iterator[None]:
        before = self.current()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def mark(self) -> Mark:
        return _Event(self)

    def keep(self, x: Tensor) -> None:
        x.record_stream(self.current())

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def copy(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source, non_blocking=True)

    def finish(self) -> None:
        torch.accelerator.synchronize(self.device)


# ---- which device ----

_factories: Final[dict[str, Callable[[torch.device], Port]]] = {"cpu": lambda _: HOST}
_ports: Final[dict[torch.device, Port]] = {}


def add_port(device_type: str, factory: Callable[[torch.device], Port]) -> None:
    """Has `port_of` call `factory` to make the port of a device of this type."""
    _factories[device_type] = factory


def port_of(device: torch.device) -> Port:
    """Returns the port of a device; the whole process has one for each device."""
    if device not in _ports:
        port = _factories.get(device.type, Accelerator)(device)
        _ports[device] = _ports.setdefault(port.device, port)
    return _ports[device]


def is_on_host(x: Tensor) -> bool:
    """Returns whether the memory of `x` is the CPU's."""
    return x.device.type == "cpu"


def runs_triton(x: Tensor) -> bool:
    """Returns whether Triton is installed and has kernels for the device of `x`."""
    return x.device.type in COLLECTIVES and importlib.util.find_spec("triton") is not None


def has_doubles(device: torch.device) -> bool:
    """Returns whether the device surely computes with 64 bits: not all of Intel's do."""
    return device.type not in ("mps", "xpu")


@contextlib.contextmanager
def selected(device: torch.device) -> Iterator[None]:
    """Has this thread work on the device within the block."""
    with torch.accelerator.device_index(device.index):
        yield


def integers(values: Sequence[int], device: torch.device) -> Tensor:
    """Returns a few integers of 64 bits; unlike `torch.tensor`, waits for no device."""
    x, port = torch.tensor(values, dtype=torch.int64), port_of(device)
    if device.type == "cpu":
        return x
    pinned = port.pinned(len(x), x.dtype).copy_(x)  # torch's pool keeps it until it is copied
    into = torch.empty_like(x, device=device)
    port.copy(into, pinned)
    return into


# ---- hardware queues ----


def take_queues(device: torch.device) -> None:
    """Has CUDA make all hardware queues that it can, where the variable is unset.

    Streams share queues where there are more streams, and what is queued on one then waits for a
    slow kernel on another.  A rank has nine streams and more.

    CUDA reads the variable once, when a process first uses it; after that nothing is set.  Torch
    knows only of what torch has done: where other code has used CUDA before, the variable is set
    here, and has no effect.
    """
    is_in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if device.type == "cuda" and not is_in_use:
        os.environ.setdefault(CONNECTIONS, str(_MOST_CONNECTIONS))


def shared_queue(device: torch.device) -> str:
    """Returns a warning where all streams of a rank share one hardware queue; else nothing."""
    if device.type != "cuda" or os.environ.get(CONNECTIONS) != "1":
        return ""
    return (
        f"{CONNECTIONS} must be above 1 for a strategy's background threads to work beside the "
        "training, got 1: what they queue waits for the training's kernels, and other ranks for "
        f"them; leave {CONNECTIONS} out, or set it to {_MOST_CONNECTIONS}, before the ranks start"
    )


def few_queues(device: torch.device) -> str:
    """Returns a line where CUDA was in use before `take_queues` could set the variable."""
    if device.type != "cuda" or CONNECTIONS in os.environ:
        return ""
    return (
        f"CUDA was in use before the strategy could set {CONNECTIONS}, so it has 8 hardware "
        f"queues, which some streams share; set {CONNECTIONS}={_MOST_CONNECTIONS} where the ranks "
        "are started."
    )


# ---- waiting ----


def until(
    condition: Callable[[], bool], limit_s: float, check: Callable[[], None], longest_s: float = 0
) -> bool:
    """Waits until `condition` holds, for `limit_s` at most; returns whether it holds.

    Args:
        condition: is asked again and again, more seldom the longer it takes
        limit_s: may be infinite
        check: raises what else ends the wait
        longest_s: how long to pause at most between questions, if above 1 ms; yet above that for 2%
            of the wait so far at most, so that its end is not seen much later
    """
    begin, pause = time.monotonic(), SHORTEST_PAUSE_S
    while not condition():
        check()
        waited_s = time.monotonic() - begin
        if waited_s > limit_s:
            return False
        time.sleep(pause)
        pause = min(2 * pause, max(LONGEST_PAUSE_S, min(longest_s, 0.02 * waited_s)))
    return True


# ---- what else is asked about accelerators ----


def backend_for(device: torch.device) -> str:
    """Returns the name of the library that sums tensors of all ranks on that device."""
    return COLLECTIVES.get(device.type, "gloo")


def library_for(device: torch.device) -> str:
    """Returns the same as users know it: NCCL, gloo."""
    name = backend_for(device)
    return name if name == "gloo" else name.upper()


def identity_of(device: torch.device) -> str:
    """Returns a text that tells this device from all others of the job; empty if none is sure.

    Launchers of XPUs may give each rank a view of its own, in which every device has one index.
    """
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    if device.type == "xpu":
        return ""
    return f"{socket.gethostname()} {port_of(device).device}"


def present(device: torch.device) -> torch.device:
    """Returns a device that is there, where its index counts on through the devices again."""
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    return torch.device(device.type, (device.index or 0) % count) if count else device


def random_states() -> dict[str, list[Tensor]]:
    """Returns the states of the devices' random generators."""
    return {"cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Sets the random generators to what `random_states` has returned."""
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
