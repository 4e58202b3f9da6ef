"""Messages and receives meet, whichever comes first."""

from __future__ import annotations

import pytest
import torch

from lightning_dsgd.transport import ANY, PeerLost
from lightning_dsgd.transport.mailboxes import Expected, Mailboxes

KEY = (4, 0)
X, Y = torch.ones(3), torch.zeros(3)


@pytest.mark.parametrize("src", [2, ANY])
def test_a_message_fills_the_receive_that_waits_for_it(src: int) -> None:
    boxes, first, second = Mailboxes(), Expected(src, KEY, None), Expected(src, KEY, None)
    boxes.collect(first)
    boxes.collect(second)
    boxes.deliver(2, KEY, 0, X)
    assert first.arrived.is_set()
    assert (first.source, first.payload) == (2, X)
    assert not second.arrived.is_set()


def test_a_receive_takes_the_first_message_of_its_rank() -> None:
    boxes, expected = Mailboxes(), Expected(2, KEY, None)
    boxes.deliver(1, KEY, 0, Y)
    boxes.deliver(2, KEY, 0, X)
    boxes.deliver(2, KEY, 0, Y)
    boxes.collect(expected)
    assert expected.payload is X


def test_only_memory_that_fits_is_claimed_and_only_once() -> None:
    boxes, into = Mailboxes(), torch.empty(3)
    boxes.collect(Expected(2, KEY, into))
    assert boxes.claim(1, KEY, torch.float32, 12) is None
    assert boxes.claim(2, KEY, torch.float64, 12) is None
    assert boxes.claim(2, KEY, torch.float32, 8) is None
    assert boxes.claim(2, KEY, torch.float32, 12) is into
    assert boxes.claim(2, KEY, torch.float32, 12) is None


def test_a_receive_is_withdrawn_unless_its_message_is_being_read() -> None:
    boxes = Mailboxes()
    given_up, being_read = Expected(2, KEY, None), Expected(2, KEY, torch.empty(3))
    boxes.collect(given_up)
    assert boxes.withdraw(given_up)
    assert not boxes.withdraw(given_up)
    boxes.collect(being_read)
    boxes.claim(2, KEY, torch.float32, 12)
    assert not boxes.withdraw(being_read)
    boxes.deliver(2, KEY, 0, X)
    assert given_up.payload is None
    assert being_read.payload is X


def test_receives_end_that_have_become_hopeless() -> None:
    boxes = Mailboxes()
    gone, other, late = (Expected(src, KEY, None) for src in (2, 1, 2))
    boxes.collect(gone)
    boxes.collect(other)
    boxes.break_off(left=2)
    boxes.collect(late)
    assert [str(e.failure) for e in (gone, late)] == ["rank 2 has left (its training is over)"] * 2
    assert not other.arrived.is_set()
    lost = PeerLost(3, "died")
    boxes.break_off(lost)
    assert other.failure is lost
