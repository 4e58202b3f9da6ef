"""All that is to be tested and measured on a GPU, in one command of at most 8 minutes.

    python benchmarks/gpu.py

    tests       those marked `gpu`
    sanitizer   the same under TORCH_CUDA_SANITIZER=1, which looks at the main thread's accesses
    selection   accumulation and selection of 1%, by each form that there is: the share of a copy's
                bandwidth that they reach
    staging     messages through pinned chunks, down and up, beside one copy of the whole from and
                to pinned memory (cudaMemcpy), and from and to pageable memory
    stream      how much longer a step that computes takes while a lane moves 100 MB in each:
                through the stager, and by copies on the stream that trains

Writes docs/results/gpus/NAME.json, NAME that of the device.  Does nothing, and says why, where
there is no GPU.  Tests that take too long are noted as "out of time"; what was measured before is
written all the same.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_dsgd import devices
from lightning_dsgd.devices import Port, port_of, until
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.primitives import sparse
from lightning_dsgd.transport.frames import HEADER
from lightning_dsgd.transport.mesh import Mesh
from lightning_dsgd.transport.staging import Landing, Staging
from lightning_dsgd.transport.works import Done

LIMIT_S = 480.0
ROOT = Path(__file__).parents[1]
TESTS = (
    "tests/test_devices.py",
    "tests/primitives/test_sparse_choice.py",
    "tests/primitives/test_sparse_triton.py",
    "tests/transport/test_staging_gpu.py",
    "tests/transport/test_native_device.py",
    "tests/algorithms/test_on_device.py",
    "tests/trainer/test_on_device.py",
)


def why_not() -> str:
    """Why there is nothing to measure; empty if there is something."""
    if not torch.accelerator.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no accelerator"
        return f"needs a GPU, got none: torch {torch.__version__} is built for {built}"
    return ""


def run_tests(limit_s: float, **environment: str) -> dict[str, Any]:
    """What pytest says of the tests for a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *TESTS]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return {"passed": False, "said": ["out of time"]}
    lines = (done.stdout + done.stderr).splitlines()
    print("\n".join(lines[-40:]))
    kept = lines[-1:] if done.returncode == 0 else [line for line in lines if "Error" in line][-20:]
    return {"passed": done.returncode == 0, "said": kept}


def seconds(work: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """The median time of something, until the device has done it."""
    times = []
    for _ in range(repeats + 1):
        port_of(device).finish()
        begin = time.perf_counter()
        work()
        port_of(device).finish()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def selection(device: torch.device, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """16 n bytes are read and written at the least, 8 n by a copy."""
    found = []
    for n in sizes:
        r, g = (torch.randn(n, device=device) for _ in range(2))
        other = torch.empty_like(r)
        threshold = sparse.kth_magnitude(r, n // 100)
        copy_s = seconds(lambda: other.copy_(r), device)  # noqa: B023 - called at once
        row: dict[str, Any] = {"elements": n, "copy_gb_s": 8 * n / copy_s / 1e9}
        for name, form in sparse.forms(r).items():
            form_s = seconds(lambda: form(r, threshold, g), device)  # noqa: B023
            row |= {f"{name}_gb_s": 16 * n / form_s / 1e9, f"{name}_share": 2 * copy_s / form_s}
        found.append(row)
    return found


class Sink:
    """Takes chunks at once, as an infinitely fast network would."""

    def begin(self, header: bytes) -> None:
        """Forgets it."""

    def add(self, chunk: Tensor, *, is_last: bool) -> Done[None]:
        """It has left."""
        return Done(None)


def stager() -> Staging:
    return Staging(Mesh(0, 1, 60.0, 20.0), lambda dst: Sink())


def land(port: Port, payload: Tensor) -> Tensor:
    """Takes a message up, and waits for it as a receipt does."""
    landing = Landing(port, payload, None, port.mark())
    if not until(landing.has_landed, 60.0, lambda: None):
        raise TimeoutError("a copy to the device has not ended within 60 s")
    return landing.take()


def staging(device: torch.device, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Gigabytes a second of a message of so many bytes, in both directions."""
    port, stage, found = port_of(device), stager(), []
    header = HEADER.pack(0, 0, 0, 0, 0)
    for nbytes in sizes:
        x = torch.ones(nbytes // 4, device=device)
        pinned, pageable = port.pinned(len(x), x.dtype), torch.empty(len(x))
        ways: dict[str, Callable[[], object]] = {
            "down_memcpy": lambda: pinned.copy_(x, non_blocking=True),  # noqa: B023
            "down_pageable": lambda: pageable.copy_(x),  # noqa: B023
            "down_staged": lambda: stage.send(0, header, x, copy=False).wait(60),  # noqa: B023
            "up_memcpy": lambda: x.copy_(pinned, non_blocking=True),  # noqa: B023
            "up_pageable": lambda: x.copy_(pageable),  # noqa: B023
            "up_staged": lambda: land(port, pinned),  # noqa: B023
        }
        rates = {name: nbytes / seconds(way, device) / 1e9 for name, way in ways.items()}
        found.append({"bytes": nbytes, **{f"{name}_gb_s": rate for name, rate in rates.items()}})
    stage.close()
    return found


def stream(device: torch.device, nbytes: int, side: int, steps: int) -> dict[str, Any]:
    """A step's seconds on the stream that trains, alone and beside a lane."""
    port, stage = port_of(device), stager()
    header = HEADER.pack(0, 0, 0, 0, 0)
    x = torch.zeros(nbytes // 4, device=device)
    a = torch.randn(side, side, device=device)
    arrived = port.pinned(len(x), x.dtype)
    stepped, ended = threading.Semaphore(0), threading.Event()
    moved: list[int] = []

    def compute() -> None:
        y = a
        for _ in range(20):
            y = (y @ a).clamp_(-1, 1)

    def lane() -> None:
        port.enter()
        with port.using(port.new()):
            while not ended.is_set():
                if stepped.acquire(timeout=0.01):
                    stage.send(0, header, x, copy=True)
                    land(port, arrived)
                    moved.append(1)

    def step_s(before: Callable[[], object]) -> float:
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            before()
            compute()
            computed = port.mark()
            until(computed.has_passed, 60.0, lambda: None)
            times.append(time.perf_counter() - begin)
        return statistics.median(times[steps // 5 :])

    def as_before() -> None:
        x.cpu()
        x.copy_(torch.empty(len(x)))

    thread = threading.Thread(target=lane, daemon=True)
    thread.start()
    alone = step_s(lambda: None)
    beside = step_s(stepped.release)
    ended.set()
    thread.join(60)
    stage.close()
    synchronous = step_s(as_before)
    return {
        "bytes_each_way": nbytes,
        "alone_s": alone,
        "beside_a_lane_s": beside,
        "copied_by_the_training_stream_s": synchronous,
        "longer_beside": beside / alone - 1,
        "longer_copied": synchronous / alone - 1,
        "moves_per_step": len(moved) / steps,
    }


def measure(device: torch.device, *, small: bool = False) -> dict[str, Any]:
    """All that is measured; small: to see that it runs."""
    mb = 1 << (12 if small else 20)
    return {
        "selection": selection(device, (10_000,) if small else (10**6, 10**7, 10**8)),
        "staging": staging(
            device, tuple(n * mb for n in ((1, 20) if small else (1, 16, 100, 400)))
        ),
        "stream": stream(device, 100 * mb, 64 if small else 4096, 5 if small else 50),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    reason = why_not()
    if reason:
        print(f"nothing was done: {reason}")
        return
    began = time.monotonic()
    found = torch.accelerator.current_accelerator()
    assert found is not None
    device = port_of(found).device
    name = devices.name_of(device)
    path = args.output or Path(
        "docs/results/gpus", re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") + ".json"
    )
    result = {**provenance(), "device": name, **devices.seen()}
    result["measured"] = measure(device)
    write_result(result, path)  # first: the tests may take the rest of the time
    for part, environment in (("tests", {}), ("sanitizer", {"TORCH_CUDA_SANITIZER": "1"})):
        left = LIMIT_S - (time.monotonic() - began)
        share = left / 2 if part == "tests" else left
        result[part] = run_tests(share, **environment) if left > 20 else {"said": ["out of time"]}
        write_result(result, path)
    result["seconds"] = math.ceil(time.monotonic() - began)
    write_result(result, path)


if __name__ == "__main__":
    main()
