"""All that is to be tested and measured on a GPU, in one command of about 8 minutes.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --parts staging tests --limit-s 120 --output build/again.json
    python benchmarks/gpu.py --rehearse

It runs from a checkout, which need not be installed; torch, Lightning and pytest are all it needs.

    tests       those marked `gpu`: the transports' contract, marks, copies, every algorithm
    sanitizer   the same under TORCH_CUDA_SANITIZER=1, which looks at the main thread's accesses
    selection   accumulation and selection of 1%, by each form that there is: the share of a copy's
                bandwidth that they reach
    staging     messages through pinned chunks, down and up, beside one copy of the whole from and
                to pinned memory (cudaMemcpy), and from and to pageable memory
    stream      how much longer a step that computes takes while a lane moves 100 MB in each:
                through the stager, and by copies on the stream that trains
    step_time   a step of a plain loop, and of the same loop in `decentralized`, with one rank
    fits        `Trainer.fit` with every strategy, on ranks that share the device: do all ranks end
                with the same finite model, and what is its loss?
    launched    `Trainer(accelerator="gpu")` as a user starts it: alone, by torchrun, by mpiexec
    stuck       what `lightning-dsgd why` says of ranks that share the device, of which one never
                enters a sum of NCCL's: does it name that rank, its line and the collective?
    slow_kernel what the other ranks' steps take while one rank's kernel is slow, with messages, and
                with an NCCL that takes each rank for one on a node of its own
    throughput  steps a second where a random rank's kernel is slow, as in `benchmarks throughput`

Writes docs/results/gpus/NAME.json, NAME that of the device, anew after each figure and each test:
whatever ends it, nothing that it has found is lost.  A part that fails is noted with its error, and
the others follow.  Does nothing, and says why, where there is no GPU.

With `--rehearse` the parts run on the CPU with small sizes, those with several ranks on the tests'
emulated device if this torch can have it, pytest skips each test for want of a GPU, and the file is
build/cpu.json.  So one sees, before the GPU is there, that nothing is missing.  The sanitizer needs
a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # before what is installed, if anything is

import lightning_dsgd as dsgd
from benchmarks import slow_kernel, stuck_rank
from benchmarks.compare.throughput import flatten
from lightning_dsgd.algorithms import ALL_ALGORITHMS, BY_UNITS
from lightning_dsgd.devices import Port, port_of, until
from lightning_dsgd.hyperparameters import parse
from lightning_dsgd.lab import accelerators
from lightning_dsgd.lab.jobs.cells import Cell
from lightning_dsgd.lab.jobs.job import Job
from lightning_dsgd.lab.results import provenance, save
from lightning_dsgd.primitives import sparse
from lightning_dsgd.transport.memory import Pinned, Window
from lightning_dsgd.transport.mesh import Mesh
from lightning_dsgd.transport.messages import HEADER
from lightning_dsgd.transport.staging import Landing, Staging
from lightning_dsgd.transport.works import Done
from tests.support import fake_device
from tests.support.worlds import AcceleratorWorld, FakeWorld, NCCLWorld, ProcessWorld

Parts = dict[str, Generator[dict[str, Any]]]
LIMIT_S = 480.0
PART_S = 75.0
"""After how long the next part begins."""
ROOT = Path(__file__).parents[1]
RANKS = 3
"""How many share the device in a fit, and in `throughput`."""
VARIANTS = (
    "wagma:overlap=true",
    "wagma:wire_dtype=int8",
    "sgp:overlap=1",
    "allreduce:overlap=true",
)
"""What is fitted beside each strategy with its defaults."""
SLOW_KERNELS = ("allreduce", "wagma:sync_period=1000", "adpsgd", "popsgd", "hpsgd")
LATE = ("ddp", "allreduce", "wagma", "popsgd", "no_sync")
TESTS = (
    "tests/test_devices.py",
    "tests/primitives/test_sparse_choice.py",
    "tests/primitives/test_sparse_triton.py",
    "tests/replica/test_wide_triton.py",
    "tests/transport/test_staging_gpu.py",
    "tests/transport/test_native_device.py",
    "tests/algorithms/test_on_device.py",
    "tests/trainer/test_on_device.py",
)
TRAIN = """
import lightning as L, lightning_dsgd as dsgd
from tests.support.fits import Seeded
from tests.support.models import loader, weights
world_size = {world_size}
strategy = dsgd.DecentralizedStrategy("wagma", share_device=world_size > 1, timeout_s=60.0)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = L.Trainer(accelerator="gpu", devices=world_size, strategy=strategy, max_epochs=2, **quiet)
model = Seeded()
trainer.fit(model, loader(16 * world_size), loader(32))
print("rank", trainer.global_rank, "of", trainer.world_size, "on", trainer.strategy.root_device,
      "ends with", float(trainer.callback_metrics["val_loss"]), weights(model).sum().item())
"""
LAUNCHERS = {
    "python": (1, [sys.executable]),
    "torchrun": (2, [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]),
    "mpiexec": (2, ["mpiexec", "-n", "2", sys.executable]),
}
"""For each, how many ranks it starts, and what stands before the script."""


def why_not() -> str:
    """Why there is nothing to measure; empty if there is something."""
    if not torch.accelerator.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no accelerator"
        return f"needs a GPU, got none: torch {torch.__version__} is built for {built}"
    if "torch.cuda._sanitizer" in sys.modules:  # 6 ms for each wait for the device
        return "needs Python without CUDA's sanitizer; unset TORCH_CUDA_SANITIZER"
    return ""


def run_tests(
    found: dict[str, Any], write: Callable[[], None], limit_s: float, **environment: str
) -> None:
    """Adds what pytest says of the tests for a GPU, test by test."""
    command = [sys.executable, "-m", "pytest", "-v", "--color=no", "-m", "gpu"]
    process = subprocess.Popen(
        [*command, "-p", "no:cacheprovider", *TESTS],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # the ranks of a test end with it
    )
    late = threading.Timer(limit_s, os.kill, (process.pid, signal.SIGINT))  # it tells what failed
    too_late = threading.Timer(limit_s + 10, os.killpg, (process.pid, signal.SIGKILL))
    late.start(), too_late.start()
    begin = time.monotonic()
    found |= {"passed": False, "outcomes": [], "said": []}
    lines = []
    assert process.stdout is not None
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
            if outcome := re.match(r"(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)", line):
                row = dict(zip(("test", "outcome"), outcome.groups(), strict=True))
                found["outcomes"].append({**row, "at_s": round(time.monotonic() - begin, 1)})
                write()
        found["passed"] = process.wait() == 0
    finally:
        late.cancel(), too_late.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    errors = [line for line in lines if "Error" in line][-20:] or lines[-5:]
    if found["passed"]:
        found["said"] = lines[-1:]
    elif time.monotonic() - begin >= limit_s:
        last = next((line for line in reversed(lines) if line.startswith("tests/")), "imports")
        found["said"] = [f"out of time after {limit_s:.0f} s, in: {last}", *errors]
    else:
        found["said"] = errors
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


def selection(device: torch.device, sizes: tuple[int, ...]) -> Generator[dict[str, Any]]:
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
    """Takes chunks at once, as an infinitely fast network and a receiver would."""

    def __init__(self, window: Window) -> None:
        self._window = window

    def begin(self, header: bytes) -> None:
        """Forgets it."""

    def add(self, chunk: Tensor, *, is_last: bool) -> Done[None]:
        """It has left, and was taken."""
        self._window.hear_taken(0, len(chunk))
        return Done(None)


def stager() -> Staging:
    mesh = Mesh(0, 1, 60.0, 20.0)
    return Staging(mesh, lambda dst: Sink(mesh.memory.window))


def land(port: Port, payload: Tensor, pinned: Pinned) -> Tensor:
    """Takes a message up, and waits for it as a receipt does."""
    landing = Landing(port, payload, None, port.mark(), pinned)
    if not until(lambda: landing.has_landed(payload.nbytes), 60.0, lambda: None):
        raise TimeoutError("a copy to the device has not ended within 60 s")
    return landing.take()


def staging(device: torch.device, sizes: tuple[int, ...]) -> Generator[dict[str, Any]]:
    """Gigabytes a second of a message of so many bytes, in both directions."""
    port, stage, chunks = port_of(device), stager(), Pinned()
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
            "up_staged": lambda: land(port, pageable, chunks),  # noqa: B023
        }
        rates = {name: nbytes / seconds(way, device) / 1e9 for name, way in ways.items()}
        yield {"bytes": nbytes, **{f"{name}_gb_s": rate for name, rate in rates.items()}}
    stage.close()


def stream(device: torch.device, nbytes: int, side: int, steps: int) -> Generator[dict[str, Any]]:
    """A step's seconds on the stream that trains, alone and beside a lane."""
    port, stage, chunks = port_of(device), stager(), Pinned()
    header = HEADER.pack(0, 0, 0, 0, 0)
    x = torch.zeros(nbytes // 4, device=device)
    a = torch.randn(side, side, device=device)
    arrived = torch.ones(len(x))
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
                    land(port, arrived, chunks)
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


def step_time(device: torch.device, width: int, blocks: int) -> Generator[dict[str, Any]]:
    """Milliseconds of a step, in blocks of five that take turns: plain, and in `decentralized`."""
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers).to(device)
    batch = torch.randn(64, width, device=device)

    def block(optimizer: torch.optim.Optimizer) -> float:
        def step() -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        return 1e3 * seconds(lambda: [step() for _ in range(5)], device, 1) / 5

    plain = torch.optim.SGD(model.parameters(), lr=1e-3)
    ours = torch.optim.SGD(model.parameters(), lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that one process trains alone
        with dsgd.decentralized(model, ours, dsgd.AllReduce()):
            times = [(block(plain), block(ours)) for _ in range(blocks)]
    plain_ms, ours_ms = (statistics.median(column) for column in zip(*times, strict=True))
    yield {
        "parameters": sum(p.numel() for p in model.parameters()),
        "plain_ms": plain_ms,
        "decentralized_ms": ours_ms,
        "added": statistics.median(b / a for a, b in times) - 1,
    }


# ---- several ranks that share the device ----


def fit(cell: Cell, settings: dict[str, Any]) -> dict[str, Any]:
    """What a rank of a job does for one strategy: it fits a small model."""
    from lightning_dsgd.trainer.named import strategy_of
    from tests.support.fits import Seeded, accelerator_of
    from tests.support.models import loader, trainer, weights

    kind, begin = settings["device"], time.perf_counter()
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {"timeout_s": 60.0, "share_device": True}
        accelerator, num_devices = kind, "auto"
        if kind == "fake":
            accelerator, num_devices = accelerator_of(fake_device.install().device), RANKS
            stack.enter_context(fake_device.parameters_allowed())
        else:
            options["parallel_devices"] = [
                torch.device(kind if kind == "cpu" else f"{kind}:0")
            ] * RANKS
        model, (name, own) = Seeded(), parse(cell["strategy"])
        run = trainer(
            strategy_of(name, **own, **options),
            num_devices,
            accelerator=accelerator,
            max_epochs=settings["epochs"],
            accumulate_grad_batches=2 if name in BY_UNITS else 1,
        )
        run.fit(model, loader(16 * RANKS), loader(32))
        return {
            "seconds": time.perf_counter() - begin,
            "loss": float(run.callback_metrics["val_loss"]),
            "model": weights(model).double().cpu().sum().item(),
        }


def fits(kind: str, specs: Sequence[str], epochs: int) -> Generator[dict[str, Any]]:
    """One row for each strategy."""
    job = Job(f"{__file__}:fit", {"device": kind, "epochs": epochs}, RANKS, cell_timeout_s=60.0)
    for row in rows_of(job, [{"strategy": spec} for spec in specs]):
        ranks = row.pop("ranks", [])
        if ranks:
            row["loss"] = ranks[0]["loss"]
            row["seconds"] = max(rank["seconds"] for rank in ranks)
            if len({rank["model"] for rank in ranks}) > 1 or not math.isfinite(row["loss"]):
                row["error"] = f"ranks must end with one finite model, got {ranks}"
        yield row


def throughput(
    kind: str, specs: Sequence[str], params: int, steps: int
) -> Generator[dict[str, Any]]:
    """Steps a second where one rank's kernels take 0.3 s; on the CPU its host sleeps so long."""
    settings = {
        "world_size": RANKS, "compute_s": 0.02, "delay_s": 0.3, "delayed_ranks": 1, "steps": steps,
        "params": params, "device": kind, "shares_device": kind != "cpu", "link_bit_s": None,
        "delay_on": "host" if kind == "cpu" else "device",
    }  # fmt: skip
    job = Job("benchmarks.compare.throughput_cell:run", settings, RANKS, cell_timeout_s=60.0)
    names = ("allreduce_bandwidth", *specs)
    for row in rows_of(job, [{"strategy": name, "round": 0} for name in names]):
        is_rate = "error" not in row and row["strategy"] in specs
        yield flatten(row, steps) if is_rate else row


def rows_of(job: Job, cells: Sequence[Cell]) -> Iterator[Cell]:
    """Each cell's result, or its error, after which new ranks go on with the next cell."""
    while cells:
        num_done = 0
        try:
            for row in job.measure(cells):
                num_done += 1
                yield row
        except SystemExit as error:
            if not isinstance(error.code, str):  # this process is to end
                raise
            yield {**cells[num_done], "error": error.code}
            num_done += 1
        cells = cells[num_done:]


def launched(folder: Path) -> Generator[dict[str, Any]]:
    """What a job prints at its end, however it is started."""
    for launcher, (world_size, command) in LAUNCHERS.items():
        row: dict[str, Any] = {"launcher": launcher, "ranks": world_size}
        if shutil.which(command[0]) is None:
            yield row | {"skipped": f"there is no {command[0]}"}
            continue
        script = folder / f"{launcher}.py"
        script.write_text(TRAIN.format(world_size=world_size))
        given: Any = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 60}
        given["env"] = {k: v for k, v in os.environ.items() if not k.startswith("MASTER_")}
        given["env"] |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        try:
            ran = subprocess.run([*command, str(script)], check=False, **given)
        except subprocess.TimeoutExpired as error:
            yield row | {"error": str(error)}
            continue
        said = sorted(line for line in ran.stdout.splitlines() if line.startswith("rank "))
        if ran.returncode or len(said) < world_size:
            row["error"] = f"exit status {ran.returncode}: {ran.stderr[-2000:]}"
        yield row | {"said": said}


def slow_kernels(
    specs: Sequence[str], run_s: float, worlds: dict[str, ProcessWorld]
) -> Generator[dict[str, Any]]:
    """The steps of the ranks beside the one whose kernels are slow."""
    for name, world in worlds.items():
        for spec in specs:
            try:
                row = slow_kernel.measure(world, spec, 0, run_s)
            except AssertionError as error:  # a rank's
                row = {"strategy": spec, "error": str(error)}
            yield {"sums_and_pairs_by": name, **row}


def parts_of(device: torch.device, kind: str, folder: Path, *, small: bool) -> Parts:
    """All that is measured, part by part, first what one process does; none has begun.

    Args:
        device: of this process
        kind: the type of device of several ranks; "fake": the emulated one
        folder: for what parts write
        small: whether to see only that all runs
    """
    mb = 1 << (12 if small else 20)
    counts = (1, 20) if small else (1, 16, 100, 400)
    every = (*ALL_ALGORITHMS, *VARIANTS)
    parts: Parts = {
        "selection": selection(device, (10_000,) if small else (10**6, 10**7, 10**8)),
        "staging": staging(device, tuple(count * mb for count in counts)),
        "stream": stream(device, 100 * mb, 64 if small else 4096, 5 if small else 50),
    }
    if device.type != "fake":  # a parameter there is no leaf
        parts["step_time"] = step_time(device, 64 if small else 2048, 3 if small else 20)
    parts["fits"] = fits(kind, every[:2] if small else every, 1 if small else 4)
    parts["throughput"] = throughput(
        "cpu" if small else kind, LATE[2:3] if small else LATE, 10**4 if small else 10**7, 5
    )
    parts["stuck"] = stuck_rank.watched(folder / "why", "cpu" if small else kind)
    worlds: dict[str, ProcessWorld] = {"messages": FakeWorld(finds_races=False)}
    if not small:
        worlds = {"messages": AcceleratorWorld(), "NCCL": NCCLWorld()}
        parts["launched"] = launched(folder)
    if kind != "cpu":
        specs, run_s = (SLOW_KERNELS[3:4], 2.0) if small else (SLOW_KERNELS, 3.0)
        parts["slow_kernel"] = slow_kernels(specs, run_s, worlds)
    return parts


def add(
    found: dict[str, Any], write: Callable[[], None], parts: Parts, part_s: float = math.inf
) -> None:
    """Adds all figures of some parts, one after another, each for about so many seconds."""
    for name, rows in parts.items():
        found[name] = []
        begin = time.monotonic()
        try:
            for row in rows:
                found[name].append(row)
                write()
                print(f"{name}: {row}", flush=True)
                if time.monotonic() - begin > part_s:
                    found[name].append({"stopped_after_s": part_s})
                    rows.close()  # its ranks end, beside which the next part would run
                    break
        except Exception as error:  # the other parts follow
            traceback.print_exc()
            found[name].append({"error": f"{type(error).__name__}: {error}"})
            write()
        print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)


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
    parser.add_argument("--parts", nargs="*", default=None, help="some only, by their names")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="when tests end")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with small sizes")
    args = parser.parse_args()
    reason = "" if args.rehearse else why_not()
    if reason:
        print(f"nothing was done: {reason}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so tests end as well
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    os.environ["PYTHONPATH"] = path  # for the ranks, and for pytest
    began, limit_s = time.monotonic(), 1800.0 if args.rehearse else args.limit_s
    device = torch.device("cpu") if args.rehearse else chosen_device()
    kind = "fake" if args.rehearse and not fake_device.WHY_NOT else device.type
    name = accelerators.name_of(device)
    file = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") + ".json"
    folder = "build" if args.rehearse else "docs/results/gpus"
    output = args.output or ROOT / folder / file
    found: dict[str, Any] = {"measured": {}}

    def write(*, is_whole: bool = False) -> None:
        ran = {"seconds": math.ceil(time.monotonic() - began), "is_whole": is_whole}
        save({**made, **ran, **found}, output)

    made = {**provenance(), "device": name, **accelerators.seen()}
    tests: dict[str, dict[str, str]] = {"tests": {}}
    if not args.rehearse:
        tests["sanitizer"] = {"TORCH_CUDA_SANITIZER": "1"}
    with tempfile.TemporaryDirectory() as scripts:
        parts = parts_of(device, kind, Path(scripts), small=args.rehearse)
        chosen = set(args.parts or {*parts, *tests})
        if unknown := chosen - {*parts, *tests}:
            parser.error(f"parts must be some of {', '.join([*parts, *tests])}, got {unknown}")
        parts = {part: rows for part, rows in parts.items() if part in chosen}
        write()
        print(f"writing: {output}", flush=True)
        add(found["measured"], write, parts, math.inf if args.rehearse else PART_S)
    tests = {part: given for part, given in tests.items() if part in chosen}
    for num_left, (part, given) in zip(range(len(tests), 0, -1), tests.items(), strict=True):
        left = limit_s - (time.monotonic() - began)  # tests take the rest
        found[part] = {"passed": False, "said": ["out of time"]}
        if left > 20:
            run_tests(found[part], write, left / num_left, **given)
    write(is_whole=True)
    print(f"written: {output}")
    failed = [part for part in tests if not found[part]["passed"]]
    measured = found["measured"].items()
    failed += [part for part, rows in measured if any("error" in row for row in rows)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
