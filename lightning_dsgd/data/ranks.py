"""What those that deal the data ask of the ranks that train, and of their session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from lightning_dsgd.transport import Transport

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks that train: they end with a lost one, or go on without it."""

    def together(self, call: Callable[[], T], adopt: Callable[[], None] | None = None) -> T:
        """Returns what `call` returns, which all ranks call; see `session.ranks`."""

    def step(self, call: Callable[[], None], *, again: bool) -> None:
        """Makes a step of this rank alone, which is made again after a loss, or ends with it."""


class Session(Protocol):
    """One rank's part in a training."""

    @property
    def ranks(self) -> Ranks:
        """The ranks that train."""

    @property
    def meetings(self) -> Transport:
        """The network on which all ranks meet."""


def step_of(ranks: Ranks, call: Callable[[], T]) -> T:
    """Returns what a step of this rank returns, which is made again after a loss."""
    made: list[T] = []
    ranks.step(lambda: made.append(call()), again=True)
    return made[-1]
