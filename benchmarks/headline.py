"""README's figures, measured anew in about an hour, beside those that README shows.

    python -m benchmarks headline                     # a quiet machine with 2 cores; Linux
    python -m benchmarks headline --only demo,real    # some of them

Each is the command behind a stored result with fewer seeds or rounds, so a figure comes near
README's, and not to its last digit.  The emulated network of `size` needs root, and is left out
without.  New results are written to a folder of their own, and README's stay.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
Figures = dict[str, float]
CHOSEN = {
    "random": "wagma:overlap=true, claimed",
    "heavy-tail": "wagma:overlap=true, claimed",
    "slow-rank": "popsgd, claimed",
}
"""Situations of the digits, and the strategy that README names."""
SLOW_LINK = "wagma:overlap=true:sync_period=10:wire_dtype=int8"
ROUNDED = "allreduce:wire_dtype=int8:overlap=true"
DIGITS = ("target", "--task", "digits", "--seeds", "3", "--epoch-steps", "30", "--jobs", "2")
LANGUAGE = (
    *("real_size", "--accumulate", "4", "--situation", "slow-rank", "--network", "none"),
    *("--lrs", "0.003", "--epochs", "8", "--epoch-steps", "55", "--size", "64,64,2,4"),
    *("--batch", "4", "--compute-ms", "60", "--validated", "128", "--seeds", "1"),
    "--strategies",
    "ddp,balanced,wagma:overlap=true:scale_steps=true:data=claimed,"
    "popsgd:scale_steps=true:data=claimed",
)


def of_demo(result: dict[str, Any]) -> Figures:
    """How long `balanced` took beside `ddp`."""
    last = {(job["strategy"], job["seed"]): job["rows"][-1] for job in result["jobs"]}
    seeds = {seed for _, seed in last}
    shares = [last["balanced", s]["seconds"] / last["ddp", s]["seconds"] for s in seeds]
    return {"balanced: of ddp's time": median(shares)}


def of_real(result: dict[str, Any]) -> Figures:
    """The shares of DDP's time with 8 micro-batches."""
    rows = [row for row in result["rows"] if row["k"] == 8]
    return {f"{row['situation']}: of ddp's time": row["share_of_ddp"] for row in rows}


def of_virtual(result: dict[str, Any]) -> Figures:
    """The share of 16 ranks with stalls."""
    place = {"ranks": 16, "k": 8, "situation": "stalls", "backups": True}
    row = next(row for row in result["rows"] if place.items() <= row.items())
    return {"16 ranks, stalls: of ddp's time": row["share_of_ddp"]}


def of_language(result: dict[str, Any]) -> Figures:
    """How long each took for all steps, beside `ddp` with the same seed."""
    seconds = {
        (cell["strategy"], cell["seed"]): cell["rows"][-1]["seconds"] for cell in result["cells"]
    }
    names = dict.fromkeys(name for name, _ in seconds if not name.startswith("ddp"))
    return {
        f"{name.partition(':')[0]}: of ddp's time": median(
            took / seconds["ddp", seed] for (other, seed), took in seconds.items() if other == name
        )
        for name in names
    }


def of_size(result: dict[str, Any]) -> Figures:
    """Seconds and loss at the end."""
    found: Figures = {}
    for row in result["summary"]:
        name = row["strategy"].partition(":")[0]
        found |= {f"{name}: seconds": row["seconds"], f"{name}: loss": row["last"]}
    return found


def of_digits(result: dict[str, Any]) -> Figures:
    """When training ends and 99% of the quality is there, and the final accuracy."""
    found: Figures = {}
    for row in result["summary"]:
        place = row["situation"]
        if row["strategy"] == CHOSEN.get(place, SLOW_LINK):
            found[f"{place}: training ends"] = row["end"]["share"]
            found[f"{place}: 99% is there"] = row["to_target"]["0.99"]["share"]
            found[f"{place}: points"] = 100 * row["difference"]
    return found


@dataclass(frozen=True)
class Headline:
    """What README shows, and how to measure it anew.

    Args:
        stored: the result behind README, in docs/results/
        command: a script or a measurement of `python -m benchmarks`, and its options
        figures: those that README shows of a result
        minutes: about how long it takes on 2 cores
        writes: the file that it writes in the folder that it is given; None: it is given the file
        needs_root: whether it emulates a network
    """

    stored: str
    command: tuple[str, ...]
    figures: Callable[[dict[str, Any]], Figures]
    minutes: int
    writes: str | None = None
    needs_root: bool = False


HEADLINES = {
    "demo": Headline(
        "getting_started/demo.json",
        ("examples/demo.py", "--seeds", "1"),
        of_demo,
        2,
        writes="demo.json",
    ),
    "real": Headline(
        "balanced/real.json", ("balanced", "--steps", "16", "--rounds", "3"), of_real, 7
    ),
    "virtual": Headline("balanced/virtual.json", ("balanced", "--virtual"), of_virtual, 3),
    "language": Headline("balanced/text.json", LANGUAGE, of_language, 12),
    "digits": Headline(
        "choosing/target_epochs.json",
        (
            *(*DIGITS, "--situations", ",".join(CHOSEN), "--data", "equal,claimed"),
            *("--strategies", "allreduce,popsgd,wagma:overlap=true"),
            *("--lrs", "0.4,0.8", "--tuning-seeds", "1"),
        ),
        of_digits,
        15,
    ),
    "slow-link": Headline(
        "choosing/target_epochs_slow_link.json",
        (
            *(*DIGITS, "--situations", "slow-link", "--baseline", ROUNDED),
            *("--strategies", f"{ROUNDED},{SLOW_LINK}", "--lrs", "0.4,0.8", "--tuning-seeds", "1"),
        ),
        of_digits,
        4,
    ),
    "size": Headline(
        "benchmarks/real_size.json",
        ("real_size", "--lrs", "0.001", "--seeds", "1"),
        of_size,
        13,
        needs_root=True,
    ),
}


def measured(name: str, folder: Path) -> dict[str, Any]:
    """Runs a command, whose output is shown, and returns its result."""
    headline = HEADLINES[name]
    what, *options = headline.command
    program = [str(ROOT / what)] if what.endswith(".py") else ["-m", "benchmarks", what]
    output = folder / name if headline.writes else folder / f"{name}.json"
    command = [sys.executable, *program, *options, "--output", str(output)]
    print(f"\n{name}, about {headline.minutes} minutes: {' '.join(command[1:])}", flush=True)
    subprocess.run(command, cwd=ROOT, check=True)
    file = output / headline.writes if headline.writes else output
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def table(name: str, now: Figures) -> str:
    """Returns the figures of README and of now, line by line."""
    headline = HEADLINES[name]
    stored = headline.figures(json.loads((ROOT / "docs/results" / headline.stored).read_text()))
    lines = [f"{name:44}{'README':>10}{'now':>10}"]
    for figure, then in stored.items():
        again = f"{now[figure]:10.2f}" if figure in now else f"{'':10}"
        lines.append(f"  {figure:42}{then:10.2f}{again}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(HEADLINES), help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=ROOT / "build/headline", help="a folder")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := set(names) - HEADLINES.keys():
        parser.error(f"--only must name some of {', '.join(HEADLINES)}, got {', '.join(unknown)}")
    folder = args.output.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    begin, tables, failed = time.monotonic(), list[str](), list[str]()
    for name in names:
        if HEADLINES[name].needs_root and os.geteuid():
            tables.append(f"{name}: left out, as an emulated network needs root")
            continue
        try:
            tables.append(table(name, HEADLINES[name].figures(measured(name, folder))))
        except subprocess.CalledProcessError as error:
            failed.append(f"{name} has ended with {error.returncode}")
    minutes = (time.monotonic() - begin) / 60
    print("\n" + "\n\n".join(tables) + f"\n\nAfter {minutes:.0f} minutes: {folder}")
    if failed:
        sys.exit("; ".join(failed))


if __name__ == "__main__":
    main()
