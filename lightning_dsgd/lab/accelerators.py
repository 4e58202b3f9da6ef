"""What measurements ask of accelerators, besides what training does (`devices`)."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from lightning_dsgd.devices import port_of, until

_TIMED_CYCLES: Final = 100_000_000
"""The kernel that spins takes about 50 ms for so many."""
_COPIED_BYTES: Final = 64 << 20
"""What is copied to measure a memory.  Where a cache holds twice that, the speed is the cache's."""
_NUM_COPIES: Final = 4
_COPIES_LIMIT_S: Final = 10.0
_MOST_FREE: Final = 256
"""The most events that are kept to be used again."""


def name_of(device: torch.device) -> str:
    """Returns the product's name, where torch tells it; the type of device elsewhere."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def why_no_devices(device_type: str, count: int) -> str:
    """Returns why so many ranks cannot have a device each; an empty text if they can."""
    found = torch.cuda.device_count() if device_type == "cuda" else count
    if found >= count:
        return ""
    if found:
        return (
            f"each rank needs a GPU of its own, got {count} ranks and {found}; try {found} ranks, "
            "or let them share one"
        )
    return f"{device_type} needs a GPU, got none that torch {torch.__version__} sees; try cpu"


def own_device(number: int, num_ranks: int) -> torch.device:
    """Returns the device of a rank of this node: a GPU of its own where NCCL sums, else the CPU.

    Args:
        number: which rank of the node it is
        num_ranks: how many ranks the node has
    """
    has_one = torch.cuda.device_count() >= num_ranks and dist.is_nccl_available()
    return torch.device("cuda", number) if has_one else torch.device("cpu")


def seen() -> dict[str, Any]:
    """Returns the devices that this torch finds, and what it was built for."""
    count = torch.cuda.device_count()
    return {
        "built_for": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(index) for index in range(count)],
    }


def nccl_version() -> str:
    """Returns the version of NCCL that this torch is built with."""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def spin(device: torch.device, seconds: float) -> None:
    """Queues a kernel that runs for so long and computes nothing: torch's, which counts cycles.

    The first call waits for the device, to find out how fast it is.

    Raises:
        ValueError: if the device has no such kernel
    """
    own = getattr(port_of(device), "spin", None)
    if own is not None:
        own(seconds)
    elif device.type == "cuda":
        _spin_cycles(int(seconds * _cycles_per_s(device)))
    else:
        raise ValueError(
            f"a kernel that spins needs a CUDA device, got {device.type}; delay the host instead "
            '(on="host", --delay-on host)'
        )


@functools.cache
def _cycles_per_s(device: torch.device) -> float:
    port = port_of(device)
    _spin_cycles(1)  # loads the kernel
    port.finish()
    begin = time.perf_counter()
    _spin_cycles(_TIMED_CYCLES)
    port.finish()
    return _TIMED_CYCLES / (time.perf_counter() - begin)


def _spin_cycles(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # noqa: SLF001


class Times:
    """Tells when a device has come to a mark, on the host's clock; on a CPU, when the host has."""

    def __init__(self, host_s: Callable[[], float] = time.monotonic) -> None:
        self.host_s = host_s

    def mark(self) -> Any:
        """Returns a mark of what was queued so far on the current stream."""
        return self.host_s()

    def seconds(self, marks: Sequence[Any]) -> list[float] | None:
        """Returns when each mark was passed; None while one is not.  Nobody waits."""
        return list(marks)


class DeviceTimes(Times):
    """Reads a device's clock by events, which are used again; making one waits for the device.

    Each time is counted from the mark before it, as an event's distance has seven digits only.

    Args:
        event: makes an event that has a time
        stream: returns the stream into which a mark is put
        host_s: the host's clock
    """

    def __init__(
        self,
        event: Callable[[], Any],
        stream: Callable[[], Any],
        host_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(host_s)
        self._event, self._stream = event, stream
        self._free: deque[Any] = deque(maxlen=_MOST_FREE)
        self._last = self.mark()
        self._last.synchronize()
        self._last_s = host_s()

    def mark(self) -> Any:
        """Queues an event; any thread may call it."""
        try:
            event = self._free.popleft()
        except IndexError:
            event = self._event()
        event.record(self._stream())
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float] | None:
        """Reads the events once, if all have passed; after that they are others' marks."""
        if not all(mark.query() for mark in marks):
            return None
        found = []
        for mark in marks:
            self._last_s += 1e-3 * self._last.elapsed_time(mark)
            self._free.append(self._last)
            self._last = mark
            found.append(self._last_s)
        return found


def times_of(device: torch.device) -> Times:
    """Returns the clock of a device's work; the host's for a device that has no such events."""
    if device.type == "cuda":
        # A thread may work on another device than its model, and threads use each other's events.
        stream = functools.partial(torch.cuda.current_stream, device)
        return DeviceTimes(functools.partial(torch.cuda.Event, enable_timing=True), stream)
    port: Any = port_of(device)
    event = getattr(port, "timed_event", None)
    return Times() if event is None else DeviceTimes(event, port.current)


def memory_bytes_s(device: torch.device) -> float | None:
    """Measures how many bytes a second a copy within a device's memory reads and writes.

    It waits for what the device has to do, as every new clock does; then it takes some
    milliseconds, and 128 MB, which torch keeps for what is allocated next.

    Returns:
        the bytes a second; None where the device is the CPU or has no clock, no room for the
        copies, or has not made them after 10 s
    """
    times = times_of(device)
    if not isinstance(times, DeviceTimes):
        return None
    try:
        x = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
        y = x.clone()  # the first copy, which is not timed
    except torch.OutOfMemoryError:
        return None
    marks = [times.mark()]
    for _ in range(_NUM_COPIES):
        y.copy_(x)
    marks.append(times.mark())
    found: list[float] = []

    def has_copied() -> bool:
        found.extend(times.seconds(marks) or ())
        return bool(found)

    if not until(has_copied, _COPIES_LIMIT_S, lambda: None):
        return None
    begin_s, end_s = found
    return 2 * _COPIED_BYTES * _NUM_COPIES / max(1e-9, end_s - begin_s)
