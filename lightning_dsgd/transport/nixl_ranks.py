"""Between which ranks NIXL is of use: those of one machine, and those with RDMA.

All ranks find the same from the same cards, of which each writes its own.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

_LONGEST_REASON: Final = 60
"""Characters: a card is short, see `processes`."""


@dataclass(frozen=True)
class Card:
    """What the other ranks are to know of one.

    Args:
        machine: the same for processes that can read each other's memory
        has_rdma: whether a port of an RDMA device is active
        why_not: why NIXL cannot be used there; empty if it can
    """

    machine: str
    has_rdma: bool
    why_not: str

    @classmethod
    def own(cls, why_not: str) -> Self:
        """This process's."""
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text()]
        parts += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user")]
        machine = hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
        states = Path("/sys/class/infiniband").glob("*/ports/*/state")
        has_rdma = any("ACTIVE" in state.read_text() for state in states)
        return cls(machine, has_rdma, why_not[:_LONGEST_REASON])

    @classmethod
    def read(cls, words: str) -> Self:
        """One that was written by `words`; that of a rank which has none, if empty."""
        if not words:
            return cls("", False, "it is not installed, or not asked for")
        machine, has_rdma, why_not = [*words.split(maxsplit=2), ""][:3]
        return cls(machine, has_rdma == "rdma", why_not)

    @property
    def words(self) -> str:
        """As text."""
        return f"{self.machine} {'rdma' if self.has_rdma else '-'} {self.why_not}".rstrip()

    def is_near(self, other: Card) -> bool:
        """Whether both are on one machine."""
        return self.machine == other.machine


def who_reads(cards: list[Card]) -> tuple[list[set[int]], str]:
    """For each rank those that can read its memory; and why none can, if so."""
    for rank, card in enumerate(cards):
        if card.why_not:
            return [set() for _ in cards], f"rank {rank} cannot use NIXL ({card.why_not})"
    readers = [
        {
            other
            for other, its in enumerate(cards)
            if other != rank and (card.is_near(its) or (card.has_rdma and its.has_rdma))
        }
        for rank, card in enumerate(cards)
    ]
    is_any = any(readers)
    return readers, "" if is_any else "no two ranks share a machine, or have RDMA devices"
