"""Newcomers that are to hold a replica together find each other, whoever ends meanwhile."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from lightning_dsgd.elastic import gathering
from lightning_dsgd.elastic.gathering import Gathering
from lightning_dsgd.elastic.register import JOINABLE, OVER, Register
from lightning_dsgd.transport import PeerLost, Timeout, TransportError
from tests.support.launched import until
from tests.support.thorough import times

ROW = (2, 3)
FIRST_SIZE = 4


class Killed(BaseException):
    """Ends a process of the test, wherever it is."""


class Table:
    """What is written, without a store; `die` may end whoever asks."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {"training": JOINABLE}
        self.lock = threading.Lock()
        self.num_given = 0


class Process:
    """A register of one process's, as far as `Gathering` asks it."""

    def __init__(self, table: Table, die: Callable[[], None] = lambda: None) -> None:
        self.table, self.die = table, die

    def read(self, key: str) -> str:
        self.die()
        with self.table.lock:
            return self.table.texts.get(key, "")

    def say(self, key: str, text: str) -> None:
        self.die()
        with self.table.lock:
            self.table.texts[key] = text

    def replace(self, key: str, before: str, text: str) -> str:
        self.die()
        with self.table.lock:
            if self.table.texts.get(key, "") == before:
                self.table.texts[key] = text
            return self.table.texts[key]

    def new_numbers(self, count: int, first_size: int) -> range:
        with self.table.lock:
            self.table.num_given += count
            end = first_size + self.table.num_given
        return range(end - count, end)

    def say_gone(self, rank: int, *, is_gone: bool = True) -> None:
        self.say(f"gone/{rank}", "yes" if is_gone else "")

    def is_gone(self, rank: int) -> bool:
        return bool(self.read(f"gone/{rank}"))

    def training(self) -> str:
        return self.read("training")


class Gathers(Gathering):
    """Connects by the table, in place of a process group."""

    def __init__(self, register: Any, rank: int, row: tuple[int, ...] = ROW) -> None:
        super().__init__(register, rank, row, 60.0, 60.0)

    def _connect(self) -> None:
        keys = [self._of(f"connected/{column}") for column in range(len(self._row))]
        table = self._register.table  # type: ignore[attr-defined]
        table.texts[keys[self._column]] = "yes"
        end = time.monotonic() + 60.0
        while not all(table.texts.get(key) for key in keys) and time.monotonic() < end:
            time.sleep(0.001)  # between two looks


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_LOOK_EVERY_S", 0.002)


def gather(process: Process, rank: int, row: tuple[int, ...] = ROW) -> Any:
    """Its number, or what it ends with."""
    try:
        return Gathers(process, rank, row).gather(FIRST_SIZE)
    except TransportError as error:
        return error


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """What each of them gives, at the same time."""
    results: dict[int, Any] = {}

    def run(number: int, call: Callable[[], Any]) -> None:
        results[number] = call()

    threads = [threading.Thread(target=run, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return [results.get(number) for number in range(len(calls))]


def test_rows_take_numbers_from_a_multiple_of_their_size_on() -> None:
    table = Table()
    for number, row in enumerate([(2, 3), (0, 1), (2, 3)]):
        begin = FIRST_SIZE + 2 * number
        calls = [lambda rank=rank, row=row: gather(Process(table), rank, row) for rank in row]
        assert in_threads(*calls) == [begin, begin + 1]


def test_whoever_waits_goes_to_the_attempt_that_a_later_process_begins() -> None:
    """The first process of rank 1 has ended once it had come, and rank 2 is late."""
    table, row = Table(), (0, 1, 2)
    table.texts["row/0/0/1"] = "a process that has ended"

    def come_late() -> Any:
        until(lambda: table.texts.get("row/0") == "1")
        return gather(Process(table), 2, row)

    calls = [lambda rank=rank: gather(Process(table), rank, row) for rank in row[:2]]
    assert in_threads(*calls, come_late) == [4, 5, 6]
    assert table.texts["row/0"] == "1"


def test_a_rank_that_ends_while_all_connect_ends_the_others() -> None:
    """Once it is started again; then they meet in another attempt."""
    table = Table()
    table.texts["row/1/0/3"] = "a process that has ended"

    def again() -> Any:
        until(lambda: "row/1/0/connected/0" in table.texts)
        return gather(Process(table), 3)

    first = "the ranks 2 and 3 gather anew, as one of them has ended while they were to connect"
    (error, number), other = in_threads(
        lambda: (gather(Process(table), 2), gather(Process(table), 2)), again
    )
    assert str(error) == first
    assert other == number + 1


def test_a_rank_that_is_not_started_again_is_not_waited_for() -> None:
    process = Process(Table())
    process.say_gone(3)
    error = gather(process, 2)
    assert isinstance(error, PeerLost)
    assert "rank 3 is not started again, and rank 2 joins with it" in str(error)


@pytest.mark.parametrize("row", [ROW, (0, 1, 2, 3)])
def test_a_rank_that_has_come_and_is_not_started_again_is_not_waited_for(
    row: tuple[int, ...],
) -> None:
    process = Process(Table())
    key = f"row/{row[0] // len(row)}/0/3"
    process.say(key, "a process that has ended")
    process.say_gone(3)
    assert "rank 3 is not started again, and rank 2 joins with it" in str(gather(process, 2, row))


def in_row(table: Table, limit_s: float = 60.0) -> Gathers:
    """Rank 2, once its row has gathered."""
    row = Gathers(Process(table), 2)
    in_threads(lambda: row.gather(FIRST_SIZE), lambda: gather(Process(table), 3))
    row._limit_s = limit_s
    return row


def test_what_a_row_does_together_ends_with_a_rank_of_it() -> None:
    table, ends = Table(), threading.Event()
    row = in_row(table)
    assert row.watch(lambda: 7, "meet") == 7

    def again() -> None:
        """Rank 3 is started again, and then given up."""
        process = Process(table, lambda: ends.is_set() and sys.exit())
        with contextlib.suppress(SystemExit):
            gather(process, 3)

    later = threading.Thread(target=again)
    later.start()
    with pytest.raises(
        TransportError, match=r"ranks 2 and 3 gather anew, .* were to lay their mesh"
    ):
        row.watch(lambda: ends.wait(60.0), "lay their mesh")
    ends.set()
    later.join()
    row._attempt = row._now()
    Process(table).say_gone(3)
    with pytest.raises(PeerLost, match="rank 3 is not started again, and rank 2 joins with it"):
        row.watch(lambda: threading.Event().wait(60.0), "meet")


def test_what_a_row_does_together_fails_with_its_ranks_named() -> None:
    def fail() -> None:
        raise RuntimeError("connection reset")

    row = in_row(Table(), 0.05)
    with pytest.raises(TransportError, match=r"ranks 2 and 3 must meet, .*, got connection reset;"):
        row.watch(fail, "meet")
    with pytest.raises(Timeout, match=r"ranks 2 and 3 must meet within .*, but rank 2 waits still"):
        row.watch(lambda: threading.Event().wait(60.0), "meet")


def test_nobody_is_waited_for_once_training_is_over() -> None:
    process = Process(Table())
    process.say("training", OVER)
    assert "their training was over before the rest of its replica" in str(gather(process, 2))


def test_a_rank_that_does_not_come_is_named() -> None:
    row = Gathers(Process(Table()), 2)
    row._limit_s = 0.05
    with pytest.raises(Timeout, match=r"started again within .*, but rank 3 has not come"):
        row.gather(FIRST_SIZE)


def storm(seed: int, row: tuple[int, ...]) -> None:
    """Processes end anywhere, some often, and are started again until their row has gathered."""
    table, end = Table(), time.monotonic() + 60.0

    def live(rank: int) -> tuple[int, int] | None:
        chance = random.Random(f"{seed}/{rank}")
        for number in range(1000):
            left = [chance.randrange(1, 40) if number < 5 and chance.random() < 0.6 else 10**9]

            def die(left: list[int] = left) -> None:
                left[0] -= 1
                if not left[0]:
                    raise Killed

            gathers = Gathers(Process(table, die), rank, row)
            try:
                number = gathers.gather(2 * len(row))
            except (Killed, TransportError):
                continue
            come = f"{gathers._attempt}/back/"
            table.texts[f"{come}{rank}"] = "yes"
            # As in a process group, which the end of a rank ends.
            while table.texts.get(gathers._key, "0") == str(gathers._attempt):
                if all(f"{come}{other}" in table.texts for other in row):
                    return gathers._attempt, number
                assert time.monotonic() < end, f"{seed}: rank {rank} waits"
                time.sleep(0.001)  # between two looks
        return None

    ends = in_threads(*[lambda rank=rank: live(rank) for rank in row])
    assert None not in ends, f"{seed}: {ends}"
    assert len({its_attempt for its_attempt, _ in ends}) == 1, f"{seed}: {ends}"
    first = ends[0][1]
    assert first % len(row) == 0, f"{seed}: {ends}"
    assert [number for _, number in ends] == [*range(first, first + len(row))], f"{seed}: {ends}"


@pytest.mark.parametrize("row", [(2, 3), (3, 4, 5)])
def test_a_row_gathers_whoever_ends_meanwhile(row: tuple[int, ...]) -> None:
    for seed in times(10):
        storm(seed, row)


def test_the_store_writes_once_and_counts_on() -> None:
    """What `Table` stands for."""
    keeper = Register("localhost", 0, 20.0, serves=True)
    register = Register("localhost", keeper.port, 20.0)
    assert register.replace("row/1", "", "1") == "1"
    assert keeper.replace("row/1", "", "2") == "1"
    assert keeper.replace("row/1", "1", "2") == "2"
    assert [*register.new_numbers(2, 4)] == [4, 5]
    assert [*keeper.new_numbers(2, 4)] == [6, 7]
    keeper.say_gone(3)
    assert register.is_gone(3)
    keeper.say_gone(3, is_gone=False)
    assert not register.is_gone(3)
    keeper.say_survives(can_be_joined=True, num_shards=2)
    assert keeper.survives()
    assert register.num_shards() == 2
