"""Where a rank stands in each process group, by torch's flight recorder.

torch numbers the collectives of each group on each rank, whichever thread calls them, in Python or
behind it as DDP does.  The last number is cheap to ask for, so each beat does; the list of the
recent collectives is asked for when the watcher wants it.  Each rank counts its own groups, and
these counts differ between ranks; only the list has the names, which do not.
"""

from __future__ import annotations

import json
import math
import sys
import time
from statistics import median
from typing import Any

_RECENT = 60
"""The number of collectives of a group that are told."""
_GAPS = 20


class Groups:
    """Sees how far this rank has come in its process groups.

    Attributes:
        has_begun: whether the rank has a process group
    """

    def __init__(self) -> None:
        self.has_begun = False
        self._last: dict[str, tuple[int, int]] = {}
        self._since_s: dict[str, float] = {}
        self._moved_s: float | None = None
        self._gaps_s: list[float] = []
        self._names: dict[str, str] = {}

    def look(self, with_recent: bool) -> dict[str, Any]:
        """Returns what to record."""
        if not self.has_begun:
            return {}
        flights = _ask(False)
        if flights is None:
            return {}
        now = time.monotonic()
        members = _members()
        by_number = flights.get("pg_status", {})
        everything = _ask(True) or {} if with_recent or by_number.keys() - self._names else {}
        for entry in everything.get("entries", ()):
            self._names[str(entry["pg_id"])] = str(entry["process_group"][0])
        groups = {}
        for number, status in by_number.items():
            name = self._names.get(number, number)
            at = int(status["last_enqueued_collective"]), int(status["last_completed_collective"])
            self._note(name, at, now)
            group = {
                "entered": at[0],
                "over": at[1],
                "still_s": round(now - self._since_s[name], 2),
            }
            groups[name] = group | {"ranks": members.get(name, [])}
        found: dict[str, Any] = {"groups": groups, "usual_s": round(self._usual_s(), 2)}
        if with_recent:
            found["recent"] = _recent(everything)
        return found

    def _note(self, name: str, at: tuple[int, int], now: float) -> None:
        if self._last.get(name) == at:
            return
        self._last[name], self._since_s[name] = at, now
        if self._moved_s is not None and now > self._moved_s:
            self._gaps_s = [*self._gaps_s, now - self._moved_s][-_GAPS:]
        self._moved_s = now

    def _usual_s(self) -> float:
        """Returns how long the rank usually takes from one collective to the next."""
        return median(self._gaps_s) if self._gaps_s else 0.0


def _ask(with_collectives: bool) -> dict[str, Any] | None:
    """Returns what torch's flight recorder has; None where this torch cannot be asked."""
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return None
    flights: dict[str, Any] = json.loads(dump(with_collectives, False))
    return flights


def _members() -> dict[str, list[int]]:
    """Returns the ranks of each process group that this rank belongs to, by the group's name."""
    world = sys.modules["torch.distributed.distributed_c10d"]._world  # noqa: SLF001
    ranks = dict(world.pg_group_ranks)
    return {name: sorted(ranks.get(group, ())) for group, name in dict(world.pg_names).items()}


def _recent(flights: dict[str, Any]) -> dict[str, list[tuple[int, str, int, bool]]]:
    """Returns the last collectives of each group: number, name, size, whether it is over."""
    found: dict[str, list[tuple[int, str, int, bool]]] = {}
    for entry in flights.get("entries", ()):
        if entry.get("is_p2p"):
            continue
        name = str(entry["profiling_name"]).partition(":")[2]
        size = sum(math.prod(sizes) for sizes in entry["input_sizes"])
        is_over = bool(entry["retired"]) or entry["state"] == "completed"
        told = int(entry["collective_seq_id"]), name, size, is_over
        found.setdefault(str(entry["process_group"][0]), []).append(told)
    return {name: entries[-_RECENT:] for name, entries in found.items()}
