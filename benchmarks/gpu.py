"""All that is to be tested and measured on a GPU, in one command of at most 8 minutes.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --rehearse

It runs from a checkout, which need not be installed; torch, Lightning and pytest are all it needs.

    tests       those marked `gpu`
    sanitizer   the same under TORCH_CUDA_SANITIZER=1, which looks at the main thread's accesses
    selection   accumulation and selection of 1%, by each form that there is: the share of a copy's
                bandwidth that they reach
    staging     messages through pinned chunks, down and up, beside one copy of the whole from and
                to pinned memory (cudaMemcpy), and from and to pageable memory
    stream      how much longer a step that computes takes while a lane moves 100 MB in each:
                through the stager, and by copies on the stream that trains

Writes docs/results/gpus/NAME.json, NAME that of the device, anew after each figure and each test:
whatever ends it, nothing that it has found is lost.  A part that fails is noted with its error, and
the others follow.  Does nothing, and says why, where there is no GPU.

With `--rehearse` the parts run on the CPU with small sizes, pytest skips each test for want of a
GPU, and the file is build/cpu.json.  So one sees, before the GPU is there, that nothing is missing.
The sanitizer needs a GPU.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # before what is installed, if anything is

from lightning_dsgd.devices import Port, port_of, until
from lightning_dsgd.lab import accelerators
from lightning_dsgd.lab.results import provenance, save
from lightning_dsgd.primitives import sparse
from lightning_dsgd.transport.frames import HEADER
from lightning_dsgd.transport.mesh import Mesh
from lightning_dsgd.transport.pinned import Pinned
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


def run_tests(
    found: dict[str, Any], write: Callable[[], None], limit_s: float, **environment: str
) -> None:
    """Adds what pytest says of the tests for a GPU, test by test."""
    command = [sys.executable, "-m", "pytest", "-v", "--color=no", "-m", "gpu"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [*command, "-p", "no:cacheprovider", *TESTS],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # the ranks of a test end with it
    )
    late = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
    late.start()
    found |= {"passed": False, "outcomes": [], "said": []}
    lines = []
    assert process.stdout is not None
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
            if outcome := re.match(r"(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)", line):
                found["outcomes"].append(
                    dict(zip(("test", "outcome"), outcome.groups(), strict=True))
                )
                write()
        found["passed"] = process.wait() == 0
    finally:
        late.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode == -signal.SIGKILL:
        found["said"] = [
            f"out of time after {limit_s:.0f} s, in: {lines[-1] if lines else 'imports'}"
        ]
    elif found["passed"]:
        found["said"] = lines[-1:]
    else:
        found["said"] = [line for line in lines if "Error" in line][-20:] or lines[-5:]
    write()


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


def selection(device: torch.device, sizes: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """16 n bytes are read and written at the least, 8 n by a copy."""
    for n in sizes:
        r, g = (torch.randn(n, device=device) for _ in range(2))
        other = torch.empty_like(r)
        threshold = sparse.kth_magnitude(r, n // 100)
        copy_s = seconds(lambda: other.copy_(r), device)  # noqa: B023 - called at once
        row: dict[str, Any] = {"elements": n, "copy_gb_s": 8 * n / copy_s / 1e9}
        for name, form in sparse.forms(r).items():
            form_s = seconds(lambda: form(r, threshold, g), device)  # noqa: B023
            row |= {f"{name}_gb_s": 16 * n / form_s / 1e9, f"{name}_share": 2 * copy_s / form_s}
        yield row


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
    landing = Landing(port, payload, None, port.mark(), Pinned())
    if not until(landing.has_landed, 60.0, lambda: None):
        raise TimeoutError("a copy to the device has not ended within 60 s")
    return landing.take()


def staging(device: torch.device, sizes: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Gigabytes a second of a message of so many bytes, in both directions."""
    port, stage = port_of(device), stager()
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
        yield {"bytes": nbytes, **{f"{name}_gb_s": rate for name, rate in rates.items()}}
    stage.close()


def stream(device: torch.device, nbytes: int, side: int, steps: int) -> Iterator[dict[str, Any]]:
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
    yield {
        "bytes_each_way": nbytes,
        "alone_s": alone,
        "beside_a_lane_s": beside,
        "copied_by_the_training_stream_s": synchronous,
        "longer_beside": beside / alone - 1,
        "longer_copied": synchronous / alone - 1,
        "moves_per_step": len(moved) / steps,
    }


def measure(
    found: dict[str, Any], write: Callable[[], None], device: torch.device, *, small: bool = False
) -> None:
    """Adds all that is measured, figure by figure; small: to see that it runs."""
    mb = 1 << (12 if small else 20)
    counts = (1, 20) if small else (1, 16, 100, 400)
    parts = {
        "selection": selection(device, (10_000,) if small else (10**6, 10**7, 10**8)),
        "staging": staging(device, tuple(count * mb for count in counts)),
        "stream": stream(device, 100 * mb, 64 if small else 4096, 5 if small else 50),
    }
    for name, rows in parts.items():
        found[name] = []
        try:
            for row in rows:
                found[name].append(row)
                write()
                print(f"{name}: {row}", flush=True)
        except Exception as error:  # the other parts follow
            traceback.print_exc()
            found[name].append({"error": f"{type(error).__name__}: {error}"})
            write()


def chosen_device() -> torch.device:
    """The accelerator that this thread has."""
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return port_of(found).device


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with small sizes")
    args = parser.parse_args()
    reason = "" if args.rehearse else why_not()
    if reason:
        print(f"nothing was done: {reason}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so tests end as well
    began = time.monotonic()
    device = torch.device("cpu") if args.rehearse else chosen_device()
    name = accelerators.name_of(device)
    file = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") + ".json"
    folder = "build" if args.rehearse else "docs/results/gpus"
    path = args.output or ROOT / folder / file
    found: dict[str, Any] = {"measured": {}}

    def write(*, is_whole: bool = False) -> None:
        ran = {"seconds": math.ceil(time.monotonic() - began), "is_whole": is_whole}
        save({**made, **ran, **found}, path)

    made = {**provenance(), "device": name, **accelerators.seen()}
    write()
    print(f"writing: {path}", flush=True)
    measure(found["measured"], write, device, small=args.rehearse)  # the tests may take the rest
    parts = {"tests": {}, "sanitizer": {"TORCH_CUDA_SANITIZER": "1"}}
    for part in ["tests"] if args.rehearse else parts:
        left = LIMIT_S - (time.monotonic() - began)
        found[part] = {"passed": False, "said": ["out of time"]}
        if left > 20:
            run_tests(found[part], write, left / 2 if part == "tests" else left, **parts[part])
    write(is_whole=True)
    print(f"written: {path}")
    failed = [part for part in parts if not found.get(part, {"passed": True})["passed"]]
    failed += [part for part, rows in found["measured"].items() if "error" in rows[-1]]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
