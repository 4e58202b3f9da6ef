"""The tables of faults, one file a room: `rooms/transport.txt` and so on.

    = lightning_dsgd/transport/memory.py         the file, for all faults below it
    $ tests/transport/test_flow.py -k window   arguments of pytest, for all faults below it
    # A sender may go one byte over the window.
    -         if self.free < nbytes:
    +         if self.free < nbytes - 1:

A fault begins with what it does, in words.  The text of its `-` lines must stand in the file once,
and the text of the `+` lines takes its place.  The first and last line may be parts of lines.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOMS = Path(__file__).with_name("rooms")


class TableError(Exception):
    """A table is not true any more, or is not written as it must be."""


@dataclass
class Fault:
    """One small change to one file, that some test ought to notice."""

    room: str
    number: int
    path: str
    tests: str
    what: str
    old_lines: list[str] = field(default_factory=list)
    new_lines: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name by which the command is told to try this fault alone."""
        return f"{self.room}:{self.number}"

    @property
    def arguments(self) -> list[str]:
        """The arguments that have pytest run the tests that belong to this fault."""
        return shlex.split(self.tests)

    def text_with_fault(self, root: Path) -> str:
        """Returns the text of the file with this fault in it."""
        file = root / self.path
        if not file.is_file():
            raise TableError(f"fault {self.name} must name a file, got {self.path}; mend the table")
        text, old, new = file.read_text(), "\n".join(self.old_lines), "\n".join(self.new_lines)
        if old == new or not old.strip():
            raise TableError(f"fault {self.name} in {self.path} must change something")
        count = text.count(old)
        if count != 1:
            raise TableError(
                f"the old text of fault {self.name} ({self.what}) must stand once in {self.path}, "
                f"stands {count} times; mend the table:\n{old}"
            )
        return text.replace(old, new)


def read(room: Path) -> list[Fault]:
    """Returns the faults of one room's table."""
    faults: list[Fault] = []
    path = tests = ""
    for place, line in enumerate(room.read_text().splitlines(), 1):
        mark, text = line[:1], line[2:]
        if line[1:2] not in ("", " "):
            raise TableError(f"{room}:{place} must have a space after its mark, got {line!r}")
        if mark == "=":
            path = text
        elif mark == "$":
            tests = text
        elif mark == "#":
            faults.append(Fault(room.stem, len(faults) + 1, path, tests, text))
        elif mark == "-":
            faults[-1].old_lines.append(text)
        elif mark == "+":
            faults[-1].new_lines.append(text)
        elif line:
            raise TableError(f"{room}:{place} must begin with one of = $ # - +, got {line!r}")
    return faults


def chosen(names: list[str], rooms: Path = ROOMS) -> list[Fault]:
    """Returns the faults of these rooms (`mpi`) and numbers (`mpi:3`, `mpi:3-7`); none: all."""
    known = {room.stem: read(room) for room in sorted(rooms.glob("*.txt"))}
    faults: list[Fault] = []
    for name in names or known:
        room, _, numbers = name.partition(":")
        if room not in known:
            raise TableError(f"a room must be one of {', '.join(known)}, got {room!r}")
        first, _, last = numbers.partition("-")
        low, high = int(first or 1), int(last or first or len(known[room]))
        faults += [fault for fault in known[room] if low <= fault.number <= high]
    return faults
