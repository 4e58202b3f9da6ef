"""What goes wrong, and when: a schedule that is drawn from a seed.

    loss     processes end; with `at`, so does whoever then sends a message of that kind
    stop     a process stands still; for long enough, it is lost to the others
    cut      nothing passes between some ranks and the others, for longer than a heartbeat may take
    doubt    one rank alone takes another for lost
    leave    a rank is told to leave, and does so before a batch

An event names places: a place is held by one process at a time, and another one takes it once that
has ended.  Most events come alone; some come in bursts, in the midst of what the one before began.

More than half of the ranks are left alone at any time, so that a job must go on.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from lightning_dsgd.elastic.ballots import ACCEPT, ACCEPTED, COMMIT, PREPARE, PROMISE, WANT

KINDS: Final = ("loss", "stop", "cut", "doubt", "leave")
MESSAGES: Final = (WANT, PREPARE, PROMISE, ACCEPT, ACCEPTED, COMMIT)


@dataclass(frozen=True)
class Event:
    """Something that goes wrong.

    Args:
        at_s: when, from the beginning of the training
        kind: one of KINDS
        places: whom it befalls; of a doubt, who doubts and who is doubted
        seconds: how long a stop or a cut lasts
        at: for a loss, the kind of message with which another process ends; empty: none does
        after: how many such messages are sent before
    """

    at_s: float
    kind: str
    places: tuple[int, ...]
    seconds: float = 0.0
    at: str = ""
    after: int = 0

    @property
    def num_away(self) -> int:
        """How many processes may end of it."""
        return len(self.places) + bool(self.at)

    def in_words(self) -> str:
        """Says what the event does to which places."""
        who = ", ".join(map(str, self.places))
        if self.at:
            return f"loss: place {who}, and who sends message {self.after + 1} of {self.at}"
        if self.kind == "doubt":
            return "doubt: place {} takes place {} for lost".format(*self.places)
        during = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind}: place{'s' * (len(self.places) > 1)} {who}{during}"


@dataclass(frozen=True)
class Terms:
    """What a schedule is drawn for.

    Args:
        ranks: P
        seconds: how long the storm lasts
        every_s: the mean time from one event to the next
        heartbeat_s: how long a rank may be silent
        calm_s: how long it takes, at most, until a lost rank's place is taken
    """

    ranks: int
    seconds: float
    every_s: float
    heartbeat_s: float
    calm_s: float


def draw(seed: int, terms: Terms) -> list[Event]:
    """Returns a schedule, in the order of time."""
    chance = random.Random(seed)
    events: list[Event] = []
    hit: list[tuple[float, int]] = []  # until when how many places may be away
    at_s = 0.0
    while True:
        in_burst = bool(events) and chance.random() < 0.35
        at_s += chance.choice([0.0, 0.01, 0.3, 2.0]) if in_burst else _pause(chance, terms)
        if at_s >= terms.seconds:
            return events
        away = sum(count for until_s, count in hit if until_s > at_s)
        most = (terms.ranks - 1) // 2 - away
        event = _drawn(chance, terms, at_s, most)
        if event is not None:
            events.append(event)
            if event.seconds == 0.0 or event.seconds > terms.heartbeat_s / 4:
                hit.append((at_s + event.seconds + terms.calm_s, event.num_away))


def _pause(chance: random.Random, terms: Terms) -> float:
    return chance.expovariate(1 / terms.every_s)


def _drawn(chance: random.Random, terms: Terms, at_s: float, most: int) -> Event | None:
    """Returns an event that befalls so many places at most, or None."""
    kind = chance.choice([*KINDS, "loss"])
    heartbeat_s = terms.heartbeat_s
    places = chance.sample(range(terms.ranks), terms.ranks)
    if kind == "stop" and (most < 1 or chance.random() < 0.5):
        return Event(at_s, kind, tuple(places[:1]), chance.uniform(0.05, 0.2) * heartbeat_s)
    if most < (2 if kind == "doubt" else 1):
        return None
    count = min(most, chance.choice([1, 1, 1, 2, 3, most]))
    if kind == "stop":
        return Event(at_s, kind, tuple(places[:1]), chance.uniform(1.1, 3.0) * heartbeat_s)
    if kind == "cut":
        return Event(at_s, kind, tuple(places[:count]), chance.uniform(1.5, 4.0) * heartbeat_s)
    if kind == "doubt":
        return Event(at_s, kind, tuple(places[:2]))
    if kind == "leave":
        return Event(at_s, kind, tuple(places[: min(count, 2)]))
    if most > 1 and chance.random() < 0.4:
        message, after = chance.choice(MESSAGES), chance.randrange(terms.ranks // 2)
        return Event(at_s, kind, tuple(places[:1]), at=message, after=after)
    return Event(at_s, kind, tuple(places[:count]))
