"""Result files: JSON with one record per line, and how the figures were made.

    {
     "command": "python -m benchmarks throughput --ranks 4",
     "cells": [
      {"strategy": "ddp", "round": 0, "seconds": [7.1, 7.2, 7.1, 7.3]},
      {"strategy": "wagma", "round": 0, "seconds": [6.0, 6.1, 6.2, 6.0]}
     ]
    }

So a result can be read, searched and compared line by line; `json.load` reads it as any other.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from lightning_dsgd import __version__

_LONGEST: Final = 32
"""A list of more values than this has a line of its own."""


def provenance(command: str | None = None) -> dict[str, Any]:
    """Says with what, and on what, a result was made.

    Args:
        command: the command that makes it again; by default the script that runs
    """
    return {
        "command": command or shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "versions": {
            "python": platform.python_version(),
            "torch": version("torch"),
            "lightning": version("lightning"),
            "lightning_dsgd": __version__,
        },
    }


def commit() -> str | None:
    """Returns the commit of this package, with + where files have changed; None outside of git."""
    texts = []
    for question in ("rev-parse HEAD", "status --porcelain --untracked-files=no ."):
        words = ["git", "-C", str(Path(__file__).parents[1]), *question.split()]
        try:
            asked = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        texts.append(asked.stdout.strip())
    number, changes = texts
    return f"{number}+" if changes else number


def typed(command: str, argv: Sequence[str] | None) -> str:
    """Returns the command as typed, with its arguments; None means this process's arguments."""
    return shlex.join([*command.split(), *(sys.argv[1:] if argv is None else argv)])


def write_result(result: dict[str, Any], path: Path) -> None:
    """Writes the file, and says where it is."""
    save(result, path)
    print(f"\nwritten: {path}")


def save(result: dict[str, Any], path: Path) -> None:
    """Writes the file whole, or leaves the old one as it was.

    Folders that are missing are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(text(result) + "\n")
    new.replace(path)


def text(value: Any, depth: int = 0) -> str:
    """Returns the value as JSON, one record per line."""
    if not value or (depth and _is_record(value)):
        return json.dumps(value)
    ends, indent = "{}" if isinstance(value, dict) else "[]", "\n" + " " * depth
    if isinstance(value, dict):
        # Keys as json.dumps writes them: numbers become text.
        lines = [
            f"{json.dumps({key: None})[1:-7]}: {text(each, depth + 1)}"
            for key, each in value.items()
        ]
    else:
        lines = [text(each, depth + 1) for each in value]
    return f"{ends[0]}{indent} " + f",{indent} ".join(lines) + f"{indent}{ends[1]}"


def _is_record(value: Any) -> bool:
    """Returns whether a value is a list of plain values, or maps names to plain or short values."""
    if isinstance(value, dict):
        return all(_is_plain(each) or _is_short(each) for each in value.values())
    return _is_plain(value) or all(map(_is_plain, value))


def _is_plain(value: Any) -> bool:
    return not isinstance(value, dict | list | tuple)


def _is_short(value: Any) -> bool:
    members = value.values() if isinstance(value, dict) else value
    return len(value) <= _LONGEST and all(map(_is_plain, members))
