"""All that is to be tested and measured on one GPU that is lent for 15 minutes, in two calls.

    python benchmarks/gpu.py 1                      at most 330 s
    python benchmarks/gpu.py 2                      at most 330 s
    python benchmarks/gpu.py 2 --parts straggler --output build/again.json
    python benchmarks/gpu.py --rehearse             on any machine: is all there that it needs?

`CALLS` below lists the parts, what is worth most first.  Each part runs in a process group of its
own with a hard end (`on_gpu/apart.py`): a part that hangs is killed with all that it has started,
and the next one begins.  The last part of a call has all that is left of its time.

The result file is written anew after each row, so a killed run loses nothing.  A row is a
measurement, or an error.  Beside it, NAME.log has what the parts have printed.

It runs from a checkout, which need not be installed; torch, Lightning and pytest are all it needs.
With `--rehearse` all parts of both calls run on the CPU with tiny sizes, tests skip for want of a
GPU, and what is measured means nothing.

Ranks that share a GPU show fixed costs, passes over memory and who waits for whom; never ratios of
bandwidth (`on_gpu/together.py`).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # before what is installed, if anything is
os.environ["TESTS_START_METHOD"] = "fork"  # ranks have what a part has: torch and Lightning
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else who asks for a GPU cannot fork any more

from benchmarks.on_gpu import alone, apart, gpt, tested, together
from benchmarks.on_gpu.place import Place
from lightning_dsgd.lab.results import provenance, save

ROOT = Path(__file__).parents[1]
CALL_S = 330.0
FIRST = (
    "tests/test_devices.py::test_copies_run_beside_what_the_current_stream_computes",
    "tests/transport/test_native_device.py::test_nccl_makes_of_pairs_what_messages_make",
    "tests/transport/test_native_device.py::test_groups_sum_by_nccl",
    "tests/transport/test_native_device.py::test_a_lost_rank_ends_what_nccl_does",
    "tests/replica/test_wide_triton.py",
)
"""What failed or ran out of time on a GPU, and what has never run there."""
TESTS = (
    "tests/test_devices.py",
    "tests/primitives/test_sparse_choice.py",
    "tests/primitives/test_sparse_triton.py",
    "tests/replica/test_wide_triton.py",
    "tests/transport/test_staging_gpu.py",
    "tests/transport/test_native_device.py",
    "tests/algorithms/test_on_device.py",
    "tests/trainer/test_on_device.py",
    "tests/lab/timeline/test_on_device.py",
)


@dataclass(frozen=True)
class Part:
    """One part of a call.

    Args:
        name: its name
        limit_s: when it is ended by force
        shows: what its rows show
        rows: measures
    """

    name: str
    limit_s: float
    shows: str
    rows: Callable[[Place], Iterator[apart.Row]]


CALLS = {
    1: (
        Part("card", 15, "its name, and versions", alone.card),
        Part("ceilings", 25, "copy, products of matrices, the bus to the host", alone.ceilings),
        Part(
            "mended",
            60,
            "tests that failed there, or never ran",
            partial(tested.tests, names=FIRST),
        ),
        Part("copies", 30, "messages through pinned chunks, beside plain copies", alone.copies),
        Part("passes", 40, "publish, snapshot, correct, pull, push", alone.passes),
        Part("selection", 20, "Triton's form, torch's form, torch.topk", alone.selection),
        Part("gpt", 135, "a step of GPT-2 by every face, with StepTrace and without", gpt.steps),
    ),
    2: (
        Part("card", 15, "its name, and versions", alone.card),
        Part("added", 80, "what strategies add to a step of DDP's", together.added),
        Part("straggler", 85, "who waits for a rank that fills the GPU", together.straggler),
        Part("memory", 45, "peaks beside what is said; communicators", together.memory),
        Part("capture", 25, "a CUDA graph beside a lane", alone.capture),
        Part("launched", 35, "a script as a user starts it", tested.launched),
        Part("stuck", 30, "what `why` says of a rank that enters no sum", tested.stuck),
        Part("tests", 25, "the tests marked gpu", partial(tested.tests, names=TESTS)),
    ),
}


def measure(part: Part, place: Place, limit_s: float) -> Iterator[apart.Row]:
    """Yields a part's rows, and says how long it took."""
    begin = time.monotonic()
    yield from apart.rows(lambda: part.rows(place), limit_s, place.log)
    print(f"{part.name}: {time.monotonic() - begin:.1f} s", flush=True)


def parts_of(call: int | None, chosen: list[str] | None) -> list[Part]:
    """Returns the parts of one call, or of both, whose names are chosen."""
    every = CALLS[call] if call else tuple({p.name: p for c in CALLS.values() for p in c}.values())
    unknown = set(chosen or ()) - {part.name for part in every}
    if unknown:
        names = ", ".join(part.name for part in every)
        raise SystemExit(f"--parts must be some of {names}, got {', '.join(sorted(unknown))}")
    return [part for part in every if chosen is None or part.name in (*chosen, "card")]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("call", type=int, nargs="?", choices=CALLS)
    parser.add_argument("--parts", nargs="*", default=None, help="some only, by their names")
    parser.add_argument("--output", type=Path, default=None, help="the result file")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny sizes")
    args = parser.parse_args(argv)
    if args.call is None and not args.rehearse:
        parser.error("a call is needed, 1 or 2, or --rehearse")
    parts = parts_of(args.call, args.parts)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # parts end as well
    name = f"gpu_{args.call or 'rehearsed'}.json"
    folder = "build" if args.rehearse else "docs/results/gpus"
    output = (args.output or ROOT / folder / name).absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    log = output.with_suffix(".log")
    log.write_text("")
    place = Place("cpu" if args.rehearse else "cuda", args.rehearse, log)
    sys.exit(run(parts, place, output, patience=1 if args.call else 3))


def run(parts: list[Part], place: Place, output: Path, patience: int) -> str | None:
    """Runs parts one after another, and writes the file; returns which have failed.

    Args:
        parts: their last one has all the time that is left
        place: where
        output: the file
        patience: how many times as long as on a GPU all may take
    """
    began, made = time.monotonic(), provenance()
    found: dict[str, list[apart.Row]] = {}

    def write(*, is_whole: bool = False) -> None:
        ran = {"seconds": round(time.monotonic() - began, 1), "is_whole": is_whole}
        save({**made, **ran, "parts": found}, output)

    for part in parts:
        left_s = began + patience * CALL_S - time.monotonic()
        limit_s = left_s if part is parts[-1] else min(patience * part.limit_s, left_s)
        found[part.name] = []
        if limit_s < 1:
            found[part.name].append({"error": "no time was left"})
            continue
        for row in measure(part, place, limit_s):
            found[part.name].append(row)
            write()
            print(f"{part.name}: {briefly(row)}", flush=True)
        if part.name == "card" and any("error" in row for row in found["card"]):
            write()
            return f"nothing was measured: {found['card'][-1]['error']}"
    write(is_whole=True)
    print(f"written: {output}")
    failed = [name for name, rows in found.items() if any("error" in row for row in rows)]
    return f"failed: {', '.join(failed)}" if failed else None


def briefly(row: dict[str, Any]) -> str:
    """Returns a row in few words, as the end of all output is short."""
    words = {
        name: float(f"{value:.3g}") if isinstance(value, float) else value
        for name, value in row.items()
    }
    return str(words)[:300]


if __name__ == "__main__":
    main()
