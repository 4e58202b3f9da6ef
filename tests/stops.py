"""Runs a command, and stops random processes of it for a moment: do its tests wait for time?

    python tests/stops.py [--seed N] [--at-most SECONDS] -- python -m pytest tests/transport -n 2

Each process and thread keeps its order of events, but not its pace, as on a machine that is
overloaded.  What fails here and passes without is a race.  Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Every process that has been started below this one and still runs."""
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, path.read_text().split())
    return children + [each for child in children for each in descendants(child)]


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped already, as a test that loses a rank may have stopped it."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def stop_for(pid: int, seconds: float, is_over: threading.Event) -> None:
    """Stops a process that runs, and has it go on after so many seconds."""
    if is_stopped(pid):
        return  # it would go on too, when the seconds are over
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        try:
            is_over.wait(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-most", type=float, default=1.0, help="the longest stop, in seconds")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    draw, is_over, num_stops = random.Random(args.seed), threading.Event(), 0
    command = subprocess.Popen(args.command)

    def wait() -> None:
        command.wait()
        is_over.set()

    threading.Thread(target=wait).start()
    while not is_over.is_set():
        if running := descendants(command.pid):
            stop_for(draw.choice(running), draw.uniform(0, args.at_most), is_over)
            num_stops += 1
        is_over.wait(draw.uniform(0, args.at_most / 2))
    print(f"{num_stops} stops, seed {args.seed}: the command ended with {command.returncode}")
    return command.returncode


if __name__ == "__main__":
    sys.exit(main())
