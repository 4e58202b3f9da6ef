"""What is written at the rendezvous about a training whose ranks may be lost.

    survives     training has begun, and goes on where a rank is lost: "yes" if others can join it,
                 "alone" if they cannot; empty once all have stopped
    secret       by which the ranks know each other
    card/3       the host and port where rank 3 listens
    next         the number of the process that came last
    size         how many nodes there are at the start, and how many ranks each of them has
    started      how many ranks were started besides these
    supervisors  how many supervisors have started them
    left/3       rank 3 has left, as it was told to
    ended/1      the ranks of node 1 have ended

The store is torch's, kept by whoever has started the ranks.  Each question waits for an answer for
a limited time.

**Threads.**  One thread uses a register.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed as dist

from lightning_dsgd.transport.contract import TransportError

T = TypeVar("T")

_ANSWER_WITHIN_S: Final = 20.0
_LOOK_EVERY_S: Final = 0.1
_JOINED: Final = "yes"
_ALONE: Final = "alone"


def outlives_ranks() -> bool:
    """Whether the store where the ranks meet is kept by their launcher, not by rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def num_restarts() -> str:
    """How often torchrun has started the ranks again."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


class Register:
    """What this process reads and writes there.

    Args:
        host: of the store
        port: of the store
        timeout_s: how long it may take to reach it; an answer may take 20 s
        serves: whether this process keeps it; then the port may be 0, for any that is free
    """

    def __init__(self, host: str, port: int, timeout_s: float, *, serves: bool = False) -> None:
        try:
            self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
                host,
                port,
                None,
                is_master=serves,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
            )
        except dist.DistError as err:
            do = "listen" if serves else "reach the store"
            raise TransportError(
                f"this process must {do} at {host}:{port}, where the ranks meet, got {err}; give "
                "an address of node 0 that all nodes reach, and a port that is free there"
            ) from err

        self._store.set_timeout(timedelta(seconds=min(timeout_s, _ANSWER_WITHIN_S)))
        # torchrun keeps its store when it starts the ranks again, from a checkpoint.
        self._prefix = f"lightning_dsgd/members/{num_restarts()}/"

    @property
    def port(self) -> int:
        """Of the store."""
        return int(self._store.port)

    def say(self, key: str, text: str = "yes") -> None:
        """Writes it; raises `TransportError` if the store has ended."""
        self._ask(lambda: self._store.set(self._prefix + key, text))

    def wait(self, keys: Sequence[str], within_s: float, is_over: Callable[[], bool]) -> bool:
        """Waits until all are written; whether they are.

        Args:
            keys: what is to be written
            within_s: for how long it waits at most
            is_over: whether to wait no longer; asked ten times a second
        """
        names, end = [self._prefix + key for key in keys], time.monotonic() + within_s
        while not self._ask(lambda: self._store.check(names)):
            if is_over() or time.monotonic() > end:
                return False
            time.sleep(_LOOK_EVERY_S)
        return True

    def read(self, key: str) -> str:
        """What is written there; empty if nothing is.

        Raises:
            TransportError: if the store has ended
        """
        name = self._prefix + key
        is_there = self._ask(lambda: self._store.check([name]))
        return str(self._ask(lambda: self._store.get(name)).decode()) if is_there else ""

    def _ask(self, question: Callable[[], T]) -> T:
        try:
            return question()
        except dist.DistError as err:
            raise TransportError(
                f"the store where the ranks meet has ended, or cannot be reached any more: {err}"
            ) from err

    def survives(self) -> bool:
        """Whether training has begun, and not ended yet, and goes on where a rank is lost."""
        return bool(self.read("survives"))

    def await_training(self, within_s: float, is_over: Callable[[], bool]) -> bool:
        """Waits until training begins; whether it goes on."""
        return self.wait(["survives"], within_s, is_over) and self.survives()

    def can_be_joined(self) -> bool:
        """Whether a rank that is started again can join that training."""
        return self.read("survives") == _JOINED

    def say_survives(self, *, can_be_joined: bool) -> None:
        """Training has begun, and goes on where a rank is lost."""
        self.say("survives", _JOINED if can_be_joined else _ALONE)

    def say_stopped(self) -> None:
        """All have stopped: who came later would find nobody."""
        self.say("survives", "")

    # ---- who has left, and where all have ended ----

    def say_left(self, *, has_left: bool = True) -> None:
        """This process has left, as it was told to; or stands in for one that has."""
        self.say(f"left/{os.environ.get('RANK', '')}", "yes" if has_left else "")

    def has_left(self, rank: int) -> bool:
        """Whether the newest process of that rank has said so."""
        return bool(self.read(f"left/{rank}"))

    def say_ended(self, node: int) -> None:
        """The ranks of this node have ended."""
        self.say(f"ended/{node}")

    def await_ended(
        self, nodes: Sequence[int], within_s: float, is_over: Callable[[], bool]
    ) -> bool:
        """Waits until the ranks of these nodes have ended; whether they have."""
        return self.wait([f"ended/{node}" for node in nodes], within_s, is_over)

    # ---- who is there ----

    def write_card(self, number: int, card: tuple[str, int, str]) -> None:
        """Tells newcomers where this rank listens."""
        host, port, secret = card
        self.say("secret", secret)
        self.say(f"card/{number}", json.dumps([host, port]))

    def secret(self) -> str:
        """By which the ranks know each other."""
        return self.read("secret")

    def forget(self, number: int) -> None:
        """Nobody is to look for this rank any more."""
        self.say(f"card/{number}", "")

    def new_number(self, first_size: int) -> int:
        """One that no rank has had."""
        return first_size - 1 + int(self._ask(lambda: self._store.add(self._prefix + "next", 1)))

    # ---- who was started besides the first ----

    def write_size(self, nodes: int, ranks: int) -> None:
        """How many nodes there are at the start, and how many ranks each of them has."""
        self.say("size", json.dumps([nodes, ranks]))

    def size(self) -> tuple[int, int]:
        """What `write_size` was given.

        Raises:
            TransportError: if nobody has called that
        """
        text = self.read("size")
        if not text:
            raise TransportError(
                "the training must have been started by `lightning-dsgd launch`, which says how "
                "many ranks it has, got one that another launcher has started; start it so"
            )
        nodes, ranks = json.loads(text)
        return int(nodes), int(ranks)

    def more_ranks(self, count: int, first_size: int) -> range:
        """What so many ranks are started as that nobody else is."""
        end = first_size + int(self._ask(lambda: self._store.add(self._prefix + "started", count)))
        return range(end - count, end)

    def more_supervisors(self, count: int) -> int:
        """How many there are besides those of the first nodes, with so many more."""
        return int(self._ask(lambda: self._store.add(self._prefix + "supervisors", count)))

    def cards(self, number: int, first_size: int) -> dict[int, tuple[str, int]]:
        """Where all others listen, as far as they have said so.

        A newcomer says it before it asks this: so of any two, one knows where the other listens.
        """
        others = range(
            first_size + int(self._ask(lambda: self._store.add(self._prefix + "next", 0)))
        )
        texts = {other: self.read(f"card/{other}") for other in others if other != number}
        cards = {other: json.loads(text) for other, text in texts.items() if text}
        return {other: (str(host), int(port)) for other, (host, port) in cards.items()}
