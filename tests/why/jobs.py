"""Jobs that are watched: the command as a user types it, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).with_name("scripts")
STUCK_AFTER_S = 3.0
WITHIN_S = 280.0


@dataclass(frozen=True)
class Watched:
    """What a watched command has said, and what the watcher has found."""

    status: int
    said: str
    told: list[dict[str, Any]]

    @property
    def verdict(self) -> dict[str, Any]:
        """The last verdict that is none of a rank that is only late."""
        found = [each for each in self.told if not each["is_late_only"]]
        assert found, self.said
        return found[-1]


def watched(to: Path, *command: str, options: tuple[str, ...] = (), **env: str) -> Watched:
    """Watches a command until it ends."""
    given = ["--stuck-after", str(STUCK_AFTER_S), "--to", str(to), *options, "--", *command]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", "lightning_dsgd", "why", *given],
        cwd=to.parent,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WITHIN_S,
    )
    told = json.loads((to / "why.json").read_text())["told"]
    return Watched(done.returncode, done.stdout, told)


def forked(
    to: Path, script: str, num_ranks: int, options: tuple[str, ...] = (), **env: str
) -> Watched:
    """Watches the forked ranks of one of the scripts, and ends it where it is stuck."""
    started = [sys.executable, str(SCRIPTS / "forked.py"), str(SCRIPTS / f"{script}.py")]
    return watched(to, *started, str(num_ranks), options=("--end", *options), **env)


def place(script: str, who: str) -> str:
    """`script.py:LINE` of the line of a script that is marked as this one's."""
    lines = (SCRIPTS / f"{script}.py").read_text().splitlines()
    [line] = [number for number, text in enumerate(lines, 1) if re.search(f"# <- {who}$", text)]
    return f"{script}.py:{line}"
