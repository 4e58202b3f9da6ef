"""What one rank of `membership` makes of what others tell it, message by message."""

from __future__ import annotations

from lightning_dsgd.elastic.ballots import ACCEPT, COMMIT, JOIN, PREPARE, PROMISE, WANT, Message
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


def test_a_newcomer_that_is_a_member_waits_no_more() -> None:
    """Else it would take the place of the one that is to be let in next."""
    rank_0 = Membership(0, (0, 1), patience_s=1.0, holds_joins=True)
    for newcomer in (2, 3):
        rank_0.hear(0.0, newcomer, Message(JOIN, 0))
    rank_0.hear(0.1, 1, Message(COMMIT, 1, members=ALL))
    assert rank_0.believes.waiting == {3}


def test_a_rank_outside_says_whom_its_replica_misses_though_others_alone_have_lost_it() -> None:
    rank_1 = Membership(1, range(4), patience_s=1.0, groups=[(0, 1), (2, 3)])
    rank_1.hear(0.0, 2, Message(WANT, 1, tuple(range(4)), lost=(0,)))
    assert not rank_1.believes.lost
    rank_1.hear(0.1, 2, Message(COMMIT, 1, members=(2, 3)))
    assert rank_1.ended == "cannot go on without rank 0, which held shards of its replica"


def test_newcomers_wait_as_a_whole_replica() -> None:
    rank_0 = Membership(0, range(4), patience_s=1.0, holds_joins=True, groups=[(0, 1), (2, 3)])
    for newcomer in (4, 6, 7):
        rank_0.hear(0.0, newcomer, Message(JOIN, 0))
    assert rank_0.waiting() == (6, 7)


def test_a_newcomer_that_has_lost_one_of_its_replica_ends_at_once() -> None:
    rank_4 = Membership(4, (), patience_s=1.0, groups=[(0, 1), (2, 3)])
    rank_4.ask(0.0, [0, 1, 2, 3, 5], within_s=60.0)
    rank_4.suspect(0.1, 5, died=True)
    assert rank_4.ended == "cannot join without rank 5, which was to hold shards of its replica"


def test_a_newcomer_ends_once_those_are_lost_that_could_let_its_replica_in() -> None:
    rank_4 = Membership(4, (), patience_s=1.0, groups=[(0, 1), (2, 3)])
    rank_4.ask(0.0, [0, 1, 2, 3, 5], within_s=60.0)
    for rank in range(4):
        assert not rank_4.ended
        rank_4.suspect(0.1, rank, died=True)
    assert rank_4.ended == "could not join, as none of those that it knows is left"


def test_newcomers_do_not_wait_for_each_other() -> None:
    rank_4 = Membership(4, (), patience_s=1.0, groups=[(0, 1), (2, 3)])
    rank_4.ask(0.0, [2, 3, 5, 6, 7], within_s=60.0)
    for newcomer in (6, 7):
        rank_4.hear(0.1, newcomer, Message(JOIN, 0))
    for rank in (2, 3):
        rank_4.suspect(0.2, rank, died=True)
    assert not rank_4.ended  # ranks 2 and 3 may have let the others in before
    rank_4.hear(0.9, 6, Message(JOIN, 0))
    assert not rank_4.ended
    rank_4.hear(0.9, 7, Message(JOIN, 0))
    assert rank_4.ended == "could not join, as none of those that it knows is left"


def test_no_view_has_newcomers_alone() -> None:
    """They have no weights yet."""
    rank_3 = Membership(3, (2, 3), patience_s=1.0, holds_joins=True, groups=[(0, 1), (2, 3)])
    for newcomer in (4, 5):
        rank_3.hear(0.0, newcomer, Message(JOIN, 0))
    rank_3.admit(0.1, [4, 5])
    rank_3.suspect(0.2, 2, died=True)
    assert rank_3.ended.startswith("must go on with more than half of view 0")
