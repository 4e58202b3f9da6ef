"""What is written at the rendezvous about a training whose ranks may be lost.

    training     how a training stands that goes on where a rank is lost: "joinable" or "alone", if
                 ranks can join it or cannot, once it has begun; then "over" or "stopped"
    trains/3     since when rank 3 has trained, until when, why no longer, and on which node; times
                 by the clock of its machine
    secret       by which the ranks know each other
    card/3       the host and port where rank 3 listens
    next         how many numbers newcomers have been given
    shards       how many ranks hold a replica together
    row/1        the attempt in which the ranks of row 1 gather: see `gathering`
    gone/3       rank 3 is not started again, unless its node's launcher is
    size         how many nodes there are at the start, and how many ranks each of them has
    started      how many ranks were started besides these
    supervisors  how many supervisors have started them
    left/3       rank 3 has left, as it was told to
    ended/1      the ranks of node 1 have ended
    lives/1      when the supervisor of node 1 said last that it lives, by the clock of its machine

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
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import torch.distributed as dist

from lightning_dsgd.transport.contract import TransportError
from lightning_dsgd.transport.rendezvous import num_restarts

T = TypeVar("T")

_ANSWER_WITHIN_S: Final = 20.0
_LOOK_EVERY_S: Final = 0.1
SILENT_S: Final = 20.0
"""A supervisor counts as dead that has not said for so long that it lives."""
JOINABLE, ALONE, OVER, STOPPED = "joinable", "alone", "over", "stopped"
GOES_ON: Final = (JOINABLE, ALONE)


def _own_rank() -> str:
    """Returns the rank that this process was started as."""
    return os.environ.get("RANK", "")


def _own_node() -> int:
    """Returns the node that this process was started on."""
    return int(os.environ.get("GROUP_RANK") or 0)


class Trained(NamedTuple):
    """When the process of a rank began and ended its training.

    Args:
        since: when it began; None if it has not begun
        until: when it ended; None if it goes on
        why: why it ended, if it has said so
        node: the node of the process
    """

    since: float | None = None
    until: float | None = None
    why: str = ""
    node: int = 0

    @property
    def goes_on(self) -> bool:
        """Whether the process trains now."""
        return self.since is not None and self.until is None

    @property
    def seconds(self) -> float:
        """How long the process has trained; if it still trains, on this machine, until now."""
        if self.since is None:
            return 0.0
        return (time.monotonic() if self.until is None else self.until) - self.since


def _open_store(host: str, port: int, timeout_s: float, *, serves: bool) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        None,
        is_master=serves,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


class Register:
    """What this process reads and writes at the rendezvous.

    Args:
        host: the store's host
        port: the store's port
        timeout_s: how long it may take to reach the store; an answer may take 20 s
        serves: whether this process keeps the store; then the port may be 0, for any free one
    """

    def __init__(self, host: str, port: int, timeout_s: float, *, serves: bool = False) -> None:
        self._open = partial(_open_store, host, port, timeout_s)
        try:
            self._store = self._open(serves=serves)
        except dist.DistError as err:
            do = "listen" if serves else "reach the store"
            raise TransportError(
                f"this process must {do} at {host}:{port}, where the ranks meet, got {err}; give "
                "an address of node 0 that all nodes reach, and a port that is free there"
            ) from err

        self._store.set_timeout(timedelta(seconds=min(timeout_s, _ANSWER_WITHIN_S)))
        # torchrun keeps its store when it starts the ranks again, from a checkpoint.
        self._prefix = f"lightning_dsgd/members/{num_restarts()}/"
        self._heard: dict[int, tuple[str, float]] = {}
        """What a node's supervisor has said last, and since when this process knows that."""

    @property
    def port(self) -> int:
        """The store's port."""
        return int(self._store.port)

    def say(self, key: str, text: str = "yes") -> None:
        """Writes a text under a key; raises `TransportError` if the store has ended."""
        self._ask(lambda: self._store.set(self._prefix + key, text))

    def wait(self, keys: Sequence[str], within_s: float, is_over: Callable[[], bool]) -> bool:
        """Waits until all keys are written; returns whether they are.

        Args:
            keys: the keys that are to be written
            within_s: for how long to wait at most
            is_over: whether to wait no longer; asked ten times a second
        """
        names, end = [self._prefix + key for key in keys], time.monotonic() + within_s
        while not self._ask(lambda: self._store.check(names)):
            if is_over() or time.monotonic() > end:
                return False
            time.sleep(_LOOK_EVERY_S)
        return True

    def read(self, key: str) -> str:
        """Returns what is written under a key; an empty text if nothing is.

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
        """Returns how a training stands that survives a loss; an empty text if none has begun."""
        return self.read("training")

    def survives(self) -> bool:
        """Returns whether a training has begun, and not ended, that goes on after a loss."""
        return self.training() in GOES_ON

    def await_training(self, within_s: float, is_over: Callable[[], bool]) -> bool:
        """Waits until a training begins; returns whether it goes on."""
        return self.wait(["training"], within_s, is_over) and self.survives()

    def can_be_joined(self) -> bool:
        """Returns whether a rank that is started again can join that training."""
        return self.training() == JOINABLE

    def say_survives(self, *, can_be_joined: bool, num_shards: int = 1) -> None:
        """Says that a training has begun that goes on where a rank is lost.

        Args:
            can_be_joined: whether a rank that is started again can join it
            num_shards: how many ranks hold a replica together
        """
        self.say("shards", str(num_shards))
        self.say("training", JOINABLE if can_be_joined else ALONE)

    def num_shards(self) -> int:
        """Returns how many ranks hold a replica together in that training."""
        return int(self.read("shards") or 1)

    def say_over(self) -> None:
        """Says that training has come to its end; returns once the store knows."""
        self.say("training", OVER)
        self.training()

    def say_stopped(self) -> None:
        """Says that all have stopped before the end: who came later would find nobody."""
        self.say("training", STOPPED)

    # ---- who trains ----

    def say_trains(self) -> None:
        """Says that this process trains from now on; returns once the store knows."""
        self._say_trained(Trained(time.monotonic(), node=_own_node()))

    def say_trains_no_more(self, why: str) -> None:
        """Says that this process will not go on, and why."""
        rank = _own_rank()
        self._say_trained(self.trained(rank)._replace(until=time.monotonic(), why=why))

    def _say_trained(self, trained: Trained) -> None:
        rank = _own_rank()
        self.say(f"trains/{rank}", json.dumps(trained))
        self.read(f"trains/{rank}")

    def trained(self, rank: str | int) -> Trained:
        """Returns when the newest process of a rank has trained."""
        text = self.read(f"trains/{rank}")
        return Trained(*json.loads(text)) if text else Trained()

    def forget_training_of(self, rank: int) -> None:
        """Forgets when a rank has trained, as its process has ended."""
        self.say(f"trains/{rank}", "")

    def everyones_training(self) -> list[Trained]:
        """Returns what `trained` gives for every rank that was started."""
        nodes, size = self.size()
        return [self.trained(rank) for rank in range(nodes * size + self._count("started"))]

    def say_lives(self, node: int) -> None:
        """Says that the supervisor of a node lives, without waiting for an answer."""
        self.say(f"lives/{node}", str(time.monotonic()))

    def living(self, nodes: set[int]) -> set[int]:
        """Returns the nodes whose supervisors live.

        A supervisor counts as dead if it has said nothing new for `SILENT_S` since this process
        asked first, or since it last heard something new.
        """
        now = time.monotonic()
        for node in nodes:
            text = self.read(f"lives/{node}")
            if node not in self._heard or self._heard[node][0] != text:
                self._heard[node] = text, now
        return {node for node in nodes if now - self._heard[node][1] < SILENT_S}

    # ---- who has left, and where all have ended ----

    def say_left(self, *, has_left: bool = True) -> None:
        """Says that this process has left, as it was told to; or stands in for one that has."""
        self.say(f"left/{_own_rank()}", "yes" if has_left else "")
        if has_left:
            self.say_trains_no_more("has left")

    def has_left(self, rank: int) -> bool:
        """Returns whether the newest process of a rank has said that it left."""
        return bool(self.read(f"left/{rank}"))

    def say_gone(self, rank: int, *, is_gone: bool = True) -> None:
        """Says that a rank is not started again, or has been; returns once the store knows."""
        self.say(f"gone/{rank}", "yes" if is_gone else "")
        self.read(f"gone/{rank}")

    def is_gone(self, rank: int) -> bool:
        """Returns whether a rank is not started again."""
        return bool(self.read(f"gone/{rank}"))

    def say_ended(self, node: int) -> None:
        """Says that the ranks of this node have ended."""
        self.say(f"ended/{node}")

    def await_ended(
        self, nodes: Sequence[int], within_s: float, is_over: Callable[[], bool]
    ) -> bool:
        """Waits until the ranks of these nodes have ended; returns whether they have."""
        return self.wait([f"ended/{node}" for node in nodes], within_s, is_over)

    # ---- who is there ----

    def write_card(self, number: int, card: tuple[str, int, str]) -> None:
        """Tells newcomers where this rank listens; returns once the store knows."""
        host, port, secret = card
        self.say("secret", secret)
        self.say(f"card/{number}", json.dumps([host, port]))
        self.read(f"card/{number}")

    def secret(self) -> str:
        """Returns the secret by which the ranks know each other."""
        return self.read("secret")

    def forget(self, number: int) -> None:
        """Withdraws the card of a rank that nobody is to look for any more."""
        self.say(f"card/{number}", "")

    def new_numbers(self, count: int, first_size: int) -> range:
        """Returns numbers that no rank has had."""
        end = first_size + self._count("next", count)
        return range(end - count, end)

    def replace(self, key: str, before: str, text: str) -> str:
        """Writes a text unless another has come first; returns what is written then.

        Args:
            key: the key
            before: what must be written there; an empty text stands for nothing
            text: what is written in its place
        """
        name = self._prefix + key
        return str(self._ask(lambda: self._store.compare_set(name, before, text)).decode())

    def store(self, name: str) -> Any:
        """Returns a store with keys of its own, for a process group.

        It is another connection: one on which somebody waits keeps others from asking.
        """
        store = self._open(serves=False)
        return dist.PrefixStore(self._prefix + name, store)  # type: ignore[attr-defined]

    def _count(self, key: str, more: int = 0) -> int:
        """Adds to a counter, and returns what it has counted."""
        return int(self._ask(lambda: self._store.add(self._prefix + key, more)))

    # ---- who was started besides the first ----

    def write_size(self, nodes: int, ranks: int) -> None:
        """Writes how many nodes there are at the start, and how many ranks each of them has."""
        self.say("size", json.dumps([nodes, ranks]))

    def size(self) -> tuple[int, int]:
        """Returns the numbers that `write_size` was given.

        Raises:
            TransportError: if nobody has called `write_size`
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
        """Returns numbers for ranks that are started besides the first; no other rank has them."""
        end = first_size + self._count("started", count)
        return range(end - count, end)

    def more_supervisors(self, count: int) -> int:
        """Adds supervisors to those of the first nodes; returns how many were added so far."""
        return self._count("supervisors", count)

    def cards(self, number: int, first_size: int) -> dict[int, tuple[str, int]]:
        """Returns where all other ranks listen, as far as they have said so.

        A newcomer writes its card before it reads the others: so of any two newcomers, one knows
        where the other listens.
        """
        others = range(first_size + self._count("next"))
        texts = {other: self.read(f"card/{other}") for other in others if other != number}
        cards = {other: json.loads(text) for other, text in texts.items() if text}
        return {other: (str(host), int(port)) for other, (host, port) in cards.items()}
