"""What a rank makes of messages of a dead one: one rank of `membership`, message by message."""

from __future__ import annotations

from lightning_dsgd.elastic.ballots import ACCEPT, COMMIT, PREPARE, PROMISE, Message
from lightning_dsgd.elastic.membership import Membership

ALL = (0, 1, 2)


def without_rank_0() -> Membership:
    """Rank 1 of three, which leads the agreement on a view without rank 0."""
    rank_1 = Membership(1, ALL, patience_s=1.0)
    rank_1.suspect(0.0, 0, died=True)
    assert rank_1.outbox.pop() == (2, Message(PREPARE, 1, ALL, ballot=(1, 1), lost=(0,), dead=(0,)))
    rank_1.outbox.clear()
    return rank_1


def test_a_view_that_a_dead_rank_has_committed_is_entered() -> None:
    """Others may be in it: who went on without it could agree on another view of that number."""
    rank_1 = without_rank_0()
    rank_1.hear(0.1, 0, Message(COMMIT, 1, members=ALL))
    assert (rank_1.number, rank_1.members) == (1, ALL)
    assert rank_1.is_changing  # on to a view without rank 0


def test_a_dead_rank_leads_nobody() -> None:
    rank_1 = without_rank_0()
    rank_1.hear(0.1, 0, Message(PREPARE, 1, ALL, ballot=(5, 0)))
    assert rank_1.outbox == []
    rank_1.hear(0.2, 2, Message(PROMISE, 1, ALL, ballot=(1, 1), dead=(0,)))
    [(to, message)] = rank_1.outbox
    assert (to, message.kind, message.members, message.ballot) == (2, ACCEPT, (1, 2), (1, 1))
