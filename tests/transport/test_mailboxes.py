"""Where messages and receives meet: which receive gets which message, and who is told of it."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch
from torch import Tensor

from lightning_dsgd.transport import ANY, PeerLost
from lightning_dsgd.transport.contract import Reason
from lightning_dsgd.transport.mailboxes import Expected, Key, Mailboxes, Once
from lightning_dsgd.transport.memory import CREDIT_BYTES
from lightning_dsgd.transport.messages import ASKED, TAKEN

BOX, OTHER = (1, 2), (1, 3)
X = torch.arange(4.0)


class Told:
    """What the mailboxes have told other ranks."""

    def __init__(self) -> None:
        self.news: list[tuple[int, int, Key]] = []
        self.reaches = True

    def __call__(self, rank: int, kind: int, key: Key) -> bool:
        if self.reaches:
            self.news.append((rank, kind, key))
        return self.reaches


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def boxes(told: Told) -> Mailboxes:
    return Mailboxes(told)


def receive(boxes: Mailboxes, src: int, into: Tensor | None = None, key: Key = BOX) -> Expected:
    expected = Expected(src, key, into)
    boxes.collect(expected)
    return expected


def claim(boxes: Mailboxes, source: int, x: Tensor = X) -> Expected | None:
    return boxes.claim(source, BOX, x.dtype, x.nbytes)


def test_what_happens_once_ends_waits_before_it_and_after_it() -> None:
    once = Once()
    assert not once.wait(0.0)
    threading.Thread(target=once.set).start()
    assert once.wait(60.0)
    once.set()
    assert once.wait(60.0)
    assert once.wait(60.0)


def test_a_message_fills_the_first_receive_that_is_for_its_sender(boxes: Mailboxes) -> None:
    of_two, of_any, of_one = (receive(boxes, src) for src in (2, ANY, 1))
    boxes.deliver(1, BOX, 0, X)
    boxes.deliver(1, OTHER, 0, X)
    assert [e.arrived.is_set() for e in (of_two, of_any, of_one)] == [False, True, False]
    assert of_any.source == 1
    assert receive(boxes, 1, key=OTHER).payload is X


def test_only_the_first_receive_of_a_mailbox_may_be_read_into(boxes: Mailboxes) -> None:
    receive(boxes, 1, torch.empty(3))  # too short for the message, but before the other
    receive(boxes, 1, torch.empty(4))
    assert claim(boxes, 1) is None


def test_a_receive_that_is_being_read_into_is_its_senders_alone(boxes: Mailboxes) -> None:
    expected = receive(boxes, ANY, torch.empty(4))
    assert claim(boxes, 2, X.double()) is None
    assert claim(boxes, 2) is expected
    assert claim(boxes, 1) is None
    assert not boxes.withdraw(expected)
    boxes.deliver(1, BOX, 0, X)
    assert not expected.arrived.is_set()
    boxes.deliver(2, BOX, 0, X)
    assert expected.source == 2


def test_what_is_withdrawn_or_broken_off_gets_no_message(boxes: Mailboxes) -> None:
    withdrawn, broken, last = (receive(boxes, 1) for _ in range(3))
    assert boxes.withdraw(withdrawn)
    assert not boxes.withdraw(withdrawn)
    broken.break_off(PeerLost(3, "died"))
    boxes.deliver(1, BOX, 0, X)
    assert (withdrawn.payload, broken.payload) == (None, None)
    assert last.payload is X


def test_a_rank_that_leaves_ends_the_waits_for_it_alone(boxes: Mailboxes) -> None:
    of_one, of_two, of_any = (receive(boxes, src) for src in (1, 2, ANY))
    boxes.break_off(left=1)
    assert [e.failure is not None for e in (of_one, of_two, of_any)] == [True, False, False]
    assert receive(boxes, 1).failure is not None
    boxes.break_off(PeerLost(0, "died"))
    for expected in (of_two, of_any):
        with pytest.raises(PeerLost, match="rank 0 died; noticed in: a test"):
            expected.raise_failure("a test")


def test_a_sender_is_told_once_of_what_was_taken(boxes: Mailboxes, told: Told) -> None:
    half = torch.empty(CREDIT_BYTES // 2, dtype=torch.uint8)
    for _ in range(5):
        boxes.deliver(1, BOX, 0, half)
    assert told.news == []
    for _ in range(4):
        receive(boxes, 1)
    assert told.news == [(1, TAKEN, (0, CREDIT_BYTES))] * 2
    told.reaches = False
    receive(boxes, 1)
    boxes.deliver(1, BOX, 0, half)
    receive(boxes, 1)
    told.reaches = True
    boxes.hear_held(1, OTHER)
    assert told.news[2:] == [(1, TAKEN, (0, CREDIT_BYTES))]


def test_what_is_held_is_asked_for_once_by_a_receive_that_is_for_it(
    boxes: Mailboxes, told: Told
) -> None:
    boxes.hear_held(1, BOX)
    boxes.hear_held(2, BOX)
    receive(boxes, 2)
    assert told.news == [(2, ASKED, BOX)]
    receive(boxes, 2)
    receive(boxes, 3)
    assert told.news[1:] == []
    boxes.hear_held(2, BOX)
    boxes.hear_held(2, BOX)
    assert told.news[1:] == [(2, ASKED, BOX)]
    receive(boxes, ANY)
    assert told.news[2:] == [(1, ASKED, BOX)]


def test_after_a_view_only_new_channels_go_on(boxes: Mailboxes, told: Told) -> None:
    whole = torch.empty(CREDIT_BYTES, dtype=torch.uint8)
    old, new = (7, 0), (8, 0)
    for key in (old, new):
        boxes.deliver(1, key, 0, whole)
    old_receive = receive(boxes, 2, key=old)
    boxes.break_off(PeerLost(2, "died"))
    num_breaks = boxes.num_breaks
    boxes.go_on(lambda channel: channel < 8)
    assert boxes.failure is None
    assert boxes.num_breaks == num_breaks + 1
    assert told.news == [(1, TAKEN, (0, CREDIT_BYTES))]  # of what was dropped
    assert receive(boxes, 1, key=new).payload is whole
    boxes.deliver(2, old, 0, X)
    assert old_receive.payload is None
    boxes.deliver(1, old, 0, whole)  # takes no room, as no receive will take it
    assert told.news[1:] == [(1, TAKEN, (0, CREDIT_BYTES))] * 2


def test_a_launcher_may_hand_on_who_was_lost() -> None:
    """As Ray does, which pickles the error of a worker."""
    lost = PeerLost(2, Reason("failed: x", ends_all=True), "recv")
    told = pickle.loads(pickle.dumps(lost))
    assert vars(told) == vars(lost)
    assert (str(told), told.ends_all) == (str(lost), True)
