"""All ranks do something after the same batch: what they agree, in real processes; and how a rank
waits for rank 0's word, in one process: it notices a loss, and waits no longer.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_dsgd.agreement import everyones
from lightning_dsgd.session import stopping
from lightning_dsgd.session.meeting import END_EPOCH
from lightning_dsgd.session.session import Session
from lightning_dsgd.session.stopping import END, MEET, SAVE, STOP, AgreedBatch, Stopping
from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.transport import PeerLost, Timeout
from tests.support.launched import until
from tests.support.worlds import ProcessWorld

SOON_S = 20.0  # on a busy machine; else nothing would end the wait
EMPTY = torch.empty(0)


class Silent:
    """The network of rank 1, on which rank 0 says nothing."""

    rank, world_size, timeout_s = 1, 2, 0.5
    lost: PeerLost | None = None
    now = staticmethod(time.monotonic)

    def check(self) -> None:
        if self.lost is not None:
            raise self.lost


def raised_by(wait: Callable[[], Any]) -> BaseException | None:
    """What a wait ends with; None if it does not end."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            wait()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SOON_S)
    return errors[0] if errors else None


def held(net: Silent) -> AgreedBatch:
    """A rank that was told to begin no batch."""
    agreed = AgreedBatch(net, serves=False)  # type: ignore[arg-type]
    agreed._hold(what=3)
    return agreed


def test_a_rank_that_rank_0_tells_nothing_says_so_after_the_timeout() -> None:
    found = raised_by(held(Silent()).begin_batch)
    assert isinstance(found, Timeout)
    assert str(found).startswith("rank 1 has waited 0.5 s for rank 0 to say after which batch")


@pytest.mark.parametrize("wait", ["begin_batch", "await_stop"])
def test_a_rank_that_waits_for_rank_0_notices_its_loss(wait: str) -> None:
    net = Silent()
    net.timeout_s = 1000.0
    net.lost = PeerLost(0, "died")
    found = raised_by(getattr(held(net), wait))
    assert found is net.lost


# ---- what all agree ----
def do_as_agreed(
    net: Any, asks: dict[int, list[tuple[int, int, int]]], apart_until: int = 0
) -> tuple[int, list[Any]]:
    """Steps in a ring; at a batch a rank asks for what it has been told to.

    Until some batch a rank waits for the answer, for else two wishes may become one.
    """
    agreed = AgreedBatch(net.sub("stop"))
    done = []
    batches = 0
    while agreed.begin_batch():
        batches += 1
        for at, what, detail in asks.get(net.rank, []):
            if at == batches:
                agreed.ask(what, detail)
                if at < apart_until:
                    agreed.finish()
        net.send(EMPTY, (net.rank + 1) % net.world_size)
        net.recv(EMPTY, (net.rank - 1) % net.world_size).wait()
        done += [(batches, *due) for due in agreed.take_due()]
        if any(what == END for _, what, _ in done):
            break
    agreed.finish()
    net.barrier().wait()
    agreed.close()
    return batches, done


def ask_again_and_again(net: Any) -> tuple[int, list[Any]]:
    asks = {
        0: [(40, SAVE, 0), (80, SAVE, 1)],
        1: [(20, SAVE, 0), (80, SAVE, 1), (120, END, 0)],
        2: [(60, SAVE, 0), (80, SAVE, 0), (120, END, 0)],
    }
    return do_as_agreed(net, asks, apart_until=80)


def stop_while_others_save(net: Any) -> tuple[int, list[Any]]:
    asks = {0: [(30, SAVE, 0)], 1: [(30, STOP, 15)], 2: [(30, SAVE, 0), (31, STOP, 15)]}
    return do_as_agreed(net, asks)


def ask_and_leave(net: Any) -> None:
    """What a rank asks in its last batch does not outlive the network."""
    agreed = AgreedBatch(net.sub("stop"))
    assert agreed.begin_batch()
    agreed.ask(SAVE, net.rank)
    agreed.finish()
    net.barrier().wait()
    agreed.close()


def ask_in_each_way(net: Any) -> list[Any]:
    found = [ask_again_and_again(net.sub("again")), stop_while_others_save(net.sub("stop"))]
    ask_and_leave(net.sub("leave"))
    return found


def test_all_ranks_do_the_same_after_the_same_batch_whoever_asks() -> None:
    """One asks for what another has asked for already, two ask at once, and one asks as it ends."""
    first, *others = ProcessWorld().run(3, ask_in_each_way)
    assert others == [first] * 2
    (batches, done), (_, while_others_save) = first
    assert done[-1] == (batches, END, 0)
    assert batches > 120
    saves = [(at, detail) for at, what, detail in done if what == SAVE]
    assert min(at for at, detail in saves if detail == 0) > 20
    assert len([at for at, detail in saves if detail == 0]) == 4
    assert min(at for at, detail in saves if detail == 1) > 80
    assert {what for _, what, _ in while_others_save} <= {SAVE}


def miss_a_meeting(net: Any) -> list[bool]:
    """Ranks claim batches; the first asks the others to meet it, and has none left to do so."""
    session, is_first = Session(), net.rank == 0
    session.rank, session.world_size = net.rank, net.world_size
    session.open(net)
    agreed = AgreedBatch(net.sub("stop"), is_of_each=True)
    parts = {"replica": SimpleNamespace(parts=(), settle=bool), "claiming": agreed}
    session.training = SimpleNamespace(agreed=agreed, algorithm=None, **parts)
    came = []
    for epoch in range(2):
        assert agreed.begin_batch()
        assert not agreed.take_meeting()
        net.barrier().wait()
        if is_first:
            agreed.ask_to_meet()
        until(lambda: bool(agreed._due))
        if epoch or not is_first:
            assert agreed.begin_batch()
            assert agreed.take_meeting()
            came.append(session.meet(MEET))
        came.append(session.meet(END_EPOCH))
    agreed.finish()
    net.barrier().wait()
    agreed.close()
    return came


def test_a_rank_that_missed_a_meeting_asks_for_another_and_waits_for_nobody() -> None:
    """Else the first rank stands alone from its next batch on, until the others end their epoch."""
    first, *others = ProcessWorld().run(3, miss_a_meeting)
    assert first == [True, True, True]
    assert others == [[False, True, True, True]] * 2


# ---- in another view ----
def go_on(net: Any, is_missed: bool) -> tuple[Stopping, int, int, bool]:
    """One rank knows of a stop before its third batch, and all go on in another view."""
    old = AgreedBatch(net.sub("old"))
    for _ in range(2):
        assert old.begin_batch()
    if net.rank == 1:
        old.stop_here(signal.SIGTERM, 1)
    new = old.in_view(net.sub("new"), has_stopped=is_missed and net.rank == 1)
    new.catch_up(old)
    newest = new.in_view(net.sub("newest"), has_stopped=False)  # after another loss
    newest.close()
    return newest.stopping, newest.signum, newest.origin, newest.begin_batch()


@pytest.mark.parametrize("is_missed", [False, True])
def test_a_stop_that_one_member_knows_of_holds_on_all_in_the_next_view(is_missed: bool) -> None:
    stopping = Stopping.MISSED if is_missed else Stopping.DECIDED
    outcomes = SimulatedWorld(3).run(go_on, is_missed)
    assert outcomes == [(stopping, signal.SIGTERM, 1, False)] * 3


def ask_anew(net: Any, is_known: bool) -> tuple[Stopping, int, int]:
    """A signal comes to rank 1 in a view that rank 2 enters late; is_known: all stop already."""
    old = AgreedBatch(net.sub("old"))
    for _ in range(2 if net.rank == 1 else 4):
        assert old.begin_batch()
    if is_known and net.rank == 1:
        old._take(STOP, signal.SIGTERM, 1, 4)

    def told_late(of: Any, text: str) -> list[str]:
        told = everyones(of, text)
        if net.rank == 2:
            net.compute(5.0)
        return told

    with mock.patch.object(stopping, "everyones", told_late):
        new = old.in_view(net.sub("new"), has_stopped=False)
    if net.rank == 1:
        new._ask(STOP, signal.SIGINT, 0)
    net.compute(20.0)
    new.close()
    return new.stopping, new.signum, new.stop_at


@pytest.mark.parametrize("is_known", [True, False])
def test_a_stop_that_is_asked_anew_is_the_same_on_all(is_known: bool) -> None:
    outcomes = SimulatedWorld(3).run(ask_anew, is_known)
    expected = (signal.SIGTERM, 4) if is_known else (signal.SIGINT, 5)
    assert outcomes == [(Stopping.DECIDED, *expected)] * 3


def test_of_two_stops_that_are_agreed_on_the_first_holds() -> None:
    agreed = AgreedBatch(Silent(), serves=False)  # type: ignore[arg-type]
    agreed._hold(STOP)
    agreed._take(STOP, signal.SIGINT, 0, 7)
    agreed._take(STOP, signal.SIGTERM, 1, 8)
    assert (agreed.signum, agreed.stop_at) == (signal.SIGINT, 7)


# ---- what one rank makes of rank 0's words ----
@pytest.mark.parametrize("heard_after", [0, 2])
def test_a_rank_comes_once_for_each_wish_whenever_it_hears_of_it(heard_after: int) -> None:
    """Else one comes once more than the others, and waits for them."""
    agreed, came = AgreedBatch(Silent(), serves=False), []  # type: ignore[arg-type]
    agreed._take(MEET, 0, 0, 1)
    for number in range(4):
        if number == heard_after:
            agreed._take(MEET, 0, 1, 2)
        came += [number] * agreed.take_meeting()
        assert agreed.begin_batch()
    assert came == [1, 2]


def test_a_rank_that_misses_a_save_forgets_that_one_alone() -> None:
    agreed = AgreedBatch(Silent(), serves=False)  # type: ignore[arg-type]
    for number in (0, 1):
        agreed._take(SAVE, number, 0, 1 + number)
    agreed.forget([SAVE])
    for _ in range(2):
        assert agreed.begin_batch()
    assert agreed.take_due() == [(SAVE, 1)]


def test_a_rank_that_is_told_late_forgets_what_others_have_come_for() -> None:
    """Else it comes alone, and the other ranks of its replica wait for it."""
    agreed, waits = AgreedBatch(Silent(), serves=False), threading.Event()  # type: ignore[arg-type]
    wait = agreed._changed.wait

    def note(seconds: float) -> bool:
        waits.set()
        return wait(seconds)

    agreed._changed.wait = note  # type: ignore[method-assign, assignment]
    forgets = threading.Thread(target=agreed.forget, args=([MEET],))
    forgets.start()
    assert waits.wait(60.0)
    agreed._take(MEET, 0, 0, 1)
    forgets.join()
    assert agreed.begin_batch()
    assert not agreed.take_meeting()
