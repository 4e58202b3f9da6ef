"""What one process measures on a GPU.

card        its name, and versions
ceilings    what a copy, a sum, a product of matrices and the bus to the host reach
copies      messages through pinned chunks, down and up, beside one copy from and to pinned
            memory and pageable memory; what a lane that copies costs the stream that trains
passes      what a publication, a snapshot, a correction, a pull and a push take, as GB of the
            weights a second and in copies of the weights: 2.0 lasts as long as two
selection   selection of 1%, by each form that there is, and torch.topk
capture     a CUDA graph is captured beside a lane that asks for events and pins memory
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.on_gpu import apart
from benchmarks.on_gpu.apart import Row
from benchmarks.on_gpu.place import LONGEST_S, Busy, Place, finish, seconds
from lightning_dsgd.devices import Port, port_of, runs_triton, until
from lightning_dsgd.lab import accelerators
from lightning_dsgd.primitives import sparse
from lightning_dsgd.primitives.published import (
    Contributed,
    ContributedAhead,
    Published,
    PublishedAhead,
)
from lightning_dsgd.replica import flat, wide
from lightning_dsgd.transport.memory import Pinned, Window
from lightning_dsgd.transport.mesh import Mesh
from lightning_dsgd.transport.messages import HEADER
from lightning_dsgd.transport.staging import Landing, Staging
from lightning_dsgd.transport.works import Done


def card(place: Place) -> Iterator[Row]:
    """The card and its software; an error where there is none."""
    if place.kind == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"needs a GPU, got none that torch {torch.__version__} sees")
    device = place.device()
    row: Row = {
        "name": accelerators.name_of(device),
        "versions": {name: version(name) for name in ("torch", "lightning")},
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        row |= {
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "nccl": accelerators.nccl_version(),
            "driver": _asked("driver_version"),
            "clock": _asked("clocks.max.sm"),
        }
    yield row


def _asked(what: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"not told: {error}"


# ---- ceilings ----


def ceilings(place: Place) -> Iterator[Row]:
    """Each row is a ceiling that others are compared with."""
    device, n = place.device(), place.size(1 << 28, 1 << 12)
    x, y = (torch.randn(n, device=device) for _ in range(2))
    yield {"what": "copy", "gb_s": 8 * n / seconds(lambda: y.copy_(x), device) / 1e9}
    yield {"what": "y += x", "gb_s": 12 * n / seconds(lambda: y.add_(x), device) / 1e9}
    side = place.size(8192, 64)
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.randn(side, side, device=device).to(dtype)
        out = torch.empty_like(a)
        took_s = seconds(lambda: torch.mm(a, a, out=out), device)  # noqa: B023 - called at once
        yield {"what": f"product, {dtype}", "tflop_s": 2 * side**3 / took_s / 1e12}
    port, m = port_of(device), place.size(100 << 20, 1 << 12)
    x, y = x[:m], y[:m]
    down, up = (port.pinned(len(x), x.dtype) for _ in range(2))
    other = port.new()

    def both() -> None:
        port.copy(down, x)
        with port.using(other):
            port.copy(y, up)
        finish_stream(port, other)

    yield {"what": "down", "gb_s": 4 * len(x) / seconds(lambda: port.copy(down, x), device) / 1e9}
    yield {"what": "up", "gb_s": 4 * len(x) / seconds(lambda: port.copy(y, up), device) / 1e9}
    yield {"what": "down and up at once", "gb_s": 8 * len(x) / seconds(both, device) / 1e9}


def finish_stream(port: Port, stream: Any) -> None:
    """Has the current stream wait for another one."""
    with port.using(stream):
        mark = port.mark()
    mark.hold()


# ---- copies ----


class Sink:
    """Takes chunks at once, as an infinitely fast network and a receiver would."""

    def __init__(self, window: Window) -> None:
        self._window = window

    def begin(self, header: bytes) -> None:
        """Takes the header of a message, of which nothing is kept."""

    def add(self, chunk: Tensor, *, is_last: bool) -> Done[None]:
        """Says that a chunk has left, and that its receiver has taken it."""
        self._window.hear_taken(0, len(chunk))
        return Done(None)


def stager() -> Staging:
    mesh = Mesh(0, 1, 60.0, 20.0)
    return Staging(mesh, lambda dst: Sink(mesh.memory.window))


def land(port: Port, payload: Tensor, pinned: Pinned) -> Tensor:
    """Takes a message up, and waits for it as a receipt does."""
    landing = Landing(port, payload, None, port.mark(), pinned)
    if not until(lambda: landing.has_landed(payload.nbytes), LONGEST_S, lambda: None):
        raise TimeoutError(f"a copy to the device has not ended within {LONGEST_S:.0f} s")
    return landing.take()


def copies(place: Place) -> Iterator[Row]:
    """Gigabytes a second of a message of so many bytes, in both directions."""
    device = place.device()
    port, stage, chunks = port_of(device), stager(), Pinned()
    header = HEADER.pack(0, 0, 0, 0, 0)
    for nbytes in place.size((1 << 20, 16 << 20, 400 << 20), (1 << 12, 20 << 12)):
        x = torch.ones(nbytes // 4, device=device)
        pinned, pageable = port.pinned(len(x), x.dtype), torch.empty(len(x))
        ways: dict[str, Callable[[], object]] = {
            "down_pinned": lambda: port.copy(pinned, x),  # noqa: B023 - called at once
            "down_pageable": lambda: pageable.copy_(x),  # noqa: B023
            "down_staged": lambda: stage.send(0, header, x, copy=False).wait(LONGEST_S),  # noqa: B023
            "up_pinned": lambda: port.copy(x, pinned),  # noqa: B023
            "up_pageable": lambda: x.copy_(pageable),  # noqa: B023
            "up_staged": lambda: land(port, pageable, chunks),  # noqa: B023
        }
        rates = {name: nbytes / seconds(way, device, 3) / 1e9 for name, way in ways.items()}
        yield {"bytes": nbytes, **{f"{name}_gb_s": rate for name, rate in rates.items()}}
    stage.close()
    yield beside_a_lane(place, device)


def beside_a_lane(place: Place, device: torch.device) -> Row:
    """A step's seconds on the stream that trains, alone and beside a lane that moves 100 MB."""
    port, stage, chunks = port_of(device), stager(), Pinned()
    header = HEADER.pack(0, 0, 0, 0, 0)
    x = torch.zeros(place.size(25 << 20, 1 << 12), device=device)
    compute = Busy(device, place.size(8192, 64))
    arrived = torch.ones(len(x))
    stepped, ended = threading.Semaphore(0), threading.Event()
    moved: list[int] = []

    def lane() -> None:
        port.enter()
        with port.using(port.new()):
            while not ended.is_set():
                if stepped.acquire(timeout=0.01):
                    stage.send(0, header, x, copy=True)
                    land(port, arrived, chunks)
                    moved.append(1)

    def step_s(before: Callable[[], object], steps: int = 20) -> float:
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            before()
            compute(20)
            finish(device)
            times.append(time.perf_counter() - begin)
        return statistics.median(times[steps // 5 :])

    thread = threading.Thread(target=lane, daemon=True)
    thread.start()
    alone, beside = step_s(lambda: None), step_s(stepped.release)
    ended.set()
    thread.join(LONGEST_S)
    stage.close()
    return {
        "bytes_each_way": x.nbytes,
        "alone_s": alone,
        "beside_a_lane_s": beside,
        "moves_per_step": len(moved) / 20,
    }


# ---- passes over memory ----


def passes(place: Place) -> Iterator[Row]:
    """What each pass takes, at the sizes of GPT-2 and of a model of 1e9 weights."""
    device = place.device()
    for n in place.size((124_000_000, 1_000_000_000), (10_000,)):
        for pass_s in (published, pulled):
            x = torch.randn(n, device=device) if pass_s is published else torch.empty(0)
            for name, took_s, copy_s in pass_s(x, n, device):
                yield {
                    "weights": n,
                    "pass": name,
                    "ms": 1e3 * took_s,
                    "x_gb_s": 4 * n / took_s / 1e9,
                    "copies": took_s / copy_s,
                }
            del x


Timed = Iterator[tuple[str, float, float]]
"""A pass, its seconds, and those of a copy of the weights."""


def published(x: Tensor, n: int, device: torch.device) -> Timed:
    """Publications, as wagma, adpsgd and popsgd make them, with and without overlap."""
    d = torch.randn_like(x)
    copy_s = seconds(lambda: d.copy_(x), device, 3)
    yield "a copy in fp32", copy_s, copy_s
    alone: Any = SimpleNamespace(timeout_s=LONGEST_S, rank=0, check=lambda: None)
    makers: dict[str, Callable[[], Any]] = {
        "Published": lambda: Published(x),
        "PublishedAhead": lambda: PublishedAhead(alone, x),
        "Contributed": lambda: Contributed(x, while_summing=True),
        "ContributedAhead": lambda: ContributedAhead(alone, x),
    }
    for name, make in makers.items():
        mine = make()
        if name.startswith("Published"):
            work: dict[str, Callable[[], object]] = {
                "publish": lambda: mine.publish(x),  # noqa: B023 - called at once
                "snapshot": lambda: mine.snapshot(),  # noqa: B023
                "correct": lambda: mine.correct(d),  # noqa: B023
                "correct, publish": lambda: (mine.correct(d), mine.publish(x)),  # noqa: B023
            }
        else:
            work = {
                "publish": lambda: mine.publish(x, 0),  # noqa: B023
                "contribute, reduce": lambda: (mine.contribution(), mine.reduced(1)),  # noqa: B023
                "contribute, reduce, publish": lambda: (
                    mine.contribution(),  # noqa: B023
                    mine.reduced(1),  # noqa: B023
                    mine.publish(x, 0),  # noqa: B023
                ),
            }
        for what, each in work.items():
            yield f"{name}: {what}", seconds(each, device, 3), copy_s


def pulled(_: Tensor, n: int, device: torch.device) -> Timed:
    """Pull and push of weights in bfloat16, by each form that there is."""
    parameter = nn.Parameter(torch.randn(n, device=device, dtype=torch.bfloat16))
    [home] = flat.flatten([("w", parameter)])
    both = wide.WideParameters(home)
    copy_s = seconds(lambda: both.x.copy_(both.x.clone()), device, 3) / 2
    yield "a copy of its fp32", copy_s, copy_s
    yield "WideParameters: pull", seconds(both.pull, device, 3), copy_s
    yield "WideParameters: push", seconds(both.push, device, 3), copy_s
    plainly = seconds(lambda: wide.follow_plainly(both.x, home.x), device, 3)
    yield "follow by torch", plainly, copy_s
    if runs_triton(both.x):
        from lightning_dsgd.replica import wide_triton

        yield (
            "follow by Triton",
            seconds(lambda: wide_triton.follow(both.x, home.x), device, 3),
            copy_s,
        )


# ---- selection ----


def selection(place: Place) -> Iterator[Row]:
    """Of 1%: 16 n bytes are read and written at the least with g, 8 n by a copy."""
    device = place.device()
    for n in place.size((10**7, 10**8), (10_000,)):
        r, g = (torch.randn(n, device=device) for _ in range(2))
        k, other = n // 100, torch.empty_like(r)
        copy_s = seconds(lambda: other.copy_(r), device, 3)  # noqa: B023 - called at once
        row: Row = {"elements": n, "copy_ms": 1e3 * copy_s}
        threshold = sparse.kth_magnitude(r, k)
        ways: dict[str, Callable[[], object]] = {
            "kth_magnitude": lambda: sparse.kth_magnitude(r, k),  # noqa: B023
            "torch.topk": lambda: torch.topk(r.abs(), k, sorted=False),  # noqa: B023
        }
        for name, form in sparse.forms(r).items():
            ways[f"select by {name}"] = lambda form=form: form(r, threshold, g)  # noqa: B023
        yield row | {f"{name}_ms": 1e3 * seconds(way, device, 3) for name, way in ways.items()}


# ---- graphs ----


def capture(place: Place) -> Iterator[Row]:
    """Whether a capture survives a lane, in each mode; a process for each, as CUDA may not."""
    for mode in ("thread_local", "global"):
        for row in apart.rows(lambda mode=mode: [captured(place, mode)], 15.0, None):
            yield {"mode": mode, **row}


def captured(place: Place, mode: str) -> Row:
    """Captures a graph again and again while a lane asks for events and pins memory."""
    device = place.device()
    port, ended = port_of(device), threading.Event()
    asked: list[int] = []
    failed: list[str] = []

    def lane() -> None:
        port.enter()
        with port.using(port.new()):
            try:
                while not ended.is_set():
                    port.mark().has_passed()
                    port.pinned(1 << 12, torch.float32)
                    asked.append(1)
            except RuntimeError as error:
                failed.append(str(error).splitlines()[0])

    x = torch.ones(1 << 10, device=device)
    thread = threading.Thread(target=lane, daemon=True)
    thread.start()
    error, count = "", 0
    try:
        for _ in range(place.size(50, 2)):
            if device.type == "cuda":
                with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=mode):
                    for _ in range(100):
                        x.mul_(1.0)
            count += 1
    except RuntimeError as failure:
        error = str(failure).splitlines()[0]
    ended.set()
    thread.join(LONGEST_S)
    said = failed[0] if failed else ""
    return {"captures": count, "said": error, "lane_asked": len(asked), "lane_said": said}
