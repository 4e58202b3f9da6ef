"""What is written at the rendezvous about a training whose ranks may be lost.

    training     how a training stands that goes on where a rank is lost: "joinable" or "alone", if
                 ranks can join it or cannot, once it has begun; then "over" or "stopped"
    trains/3     since when rank 3 has trained, until when, and why no longer; times by the clock of
                 its machine
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
from typing import Any, Final, NamedTuple, TypeVar

import torch.distributed as dist

from lightning_dsgd.transport.contract import TransportError

T = TypeVar("T")

_ANSWER_WITHIN_S: Final = 20.0
_LOOK_EVERY_S: Final = 0.1
JOINABLE, ALONE, OVER, STOPPED = "joinable", "alone", "over", "stopped"
GOES_ON: Final = (JOINABLE, ALONE)


def outlives_ranks() -> bool:
    """Whether the store where the ranks meet is kept by their launcher, not by rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def num_restarts() -> str:
    """How often torchrun has started the ranks again."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _own_rank() -> str:
    """What this process was started as."""
    return os.environ.get("RANK", "")


class Trained(NamedTuple):
    """For how long the process of a rank has trained.

    Args:
        since: when it began; None if it has not begun
        until: when it ended; None if it goes on
        why: it ended, if it has said so
    """

    since: float | None = None
    until: float | None = None
    why: str = ""

    @property
    def goes_on(self) -> bool:
        """Whether it trains."""
        return self.since is not None and self.until is None

    @property
    def seconds(self) -> float:
        """For how long; it has ended, or ends now, on this machine."""
        if self.since is None:
            return 0.0
        return (time.monotonic() if self.until is None else self.until) - self.since


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

    # ---- how training stands ----

    def training(self) -> str:
        """How it stands: see the head of the file; empty if none has begun that survives a loss."""
        return self.read("training")

    def survives(self) -> bool:
        """Whether training has begun, and not ended yet, and goes on where a rank is lost."""
        return self.training() in GOES_ON

    def await_training(self, within_s: float, is_over: Callable[[], bool]) -> bool:
        """Waits until training begins; whether it goes on."""
        return self.wait(["training"], within_s, is_over) and self.survives()

    def can_be_joined(self) -> bool:
        """Whether a rank that is started again can join that training."""
        return self.training() == JOINABLE

    def say_survives(self, *, can_be_joined: bool) -> None:
        """Training has begun, and goes on where a rank is lost."""
        self.say("training", JOINABLE if can_be_joined else ALONE)

    def say_over(self) -> None:
        """Training has come to its end; comes back once the store knows."""
        self.say("training", OVER)
        self.training()

    def say_stopped(self) -> None:
        """All have stopped before its end: who came later would find nobody."""
        self.say("training", STOPPED)

    # ---- who trains ----

    def say_trains(self) -> None:
        """This process trains from now on; comes back once the store knows."""
        self._say_trained(Trained(time.monotonic()))

    def say_trains_no_more(self, why: str) -> None:
        """This process will not go on, for that reason."""
        rank = _own_rank()
        self._say_trained(self.trained(rank)._replace(until=time.monotonic(), why=why))

    def _say_trained(self, trained: Trained) -> None:
        rank = _own_rank()
        self.say(f"trains/{rank}", json.dumps(trained))
        self.read(f"trains/{rank}")

    def trained(self, rank: str | int) -> Trained:
        """For how long the newest process of a rank has trained."""
        text = self.read(f"trains/{rank}")
        return Trained(*json.loads(text)) if text else Trained()

    def forget_training_of(self, rank: int) -> None:
        """The process of that rank has ended."""
        self.say(f"trains/{rank}", "")

    def everyones_training(self) -> list[Trained]:
        """What `trained` gives for every rank that was started."""
        nodes, size = self.size()
        return [self.trained(rank) for rank in range(nodes * size + self._count("started"))]

    # ---- who has left, and where all have ended ----

    def say_left(self, *, has_left: bool = True) -> None:
        """This process has left, as it was told to; or stands in for one that has."""
        self.say(f"left/{_own_rank()}", "yes" if has_left else "")
        if has_left:
            self.say_trains_no_more("has left")

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
        return first_size - 1 + self._count("next", 1)

    def _count(self, key: str, more: int = 0) -> int:
        """What is counted there, with so many more."""
        return int(self._ask(lambda: self._store.add(self._prefix + key, more)))

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
        end = first_size + self._count("started", count)
        return range(end - count, end)

    def more_supervisors(self, count: int) -> int:
        """How many there are besides those of the first nodes, with so many more."""
        return self._count("supervisors", count)

    def cards(self, number: int, first_size: int) -> dict[int, tuple[str, int]]:
        """Where all others listen, as far as they have said so.

        A newcomer says it before it asks this: so of any two, one knows where the other listens.
        """
        others = range(first_size + self._count("next"))
        texts = {other: self.read(f"card/{other}") for other in others if other != number}
        cards = {other: json.loads(text) for other, text in texts.items() if text}
        return {other: (str(host), int(port)) for other, (host, port) in cards.items()}
