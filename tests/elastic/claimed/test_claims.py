"""Claims of batches, message by message; schedules of them are in test_dealing.py."""

from __future__ import annotations

from lightning_dsgd.elastic.claimed.claims import NONE, Claims, Epoch


def exchange(*ranks: Claims) -> None:
    """Lets all messages arrive."""
    while any(rank.outbox for rank in ranks):
        for place, rank in enumerate(ranks):
            outbox, rank.outbox = rank.outbox, []
            for dst, words in outbox:
                ranks[dst].hear(place, words)


def test_a_rank_without_units_gets_one_that_another_has_not_begun() -> None:
    slow, fast = ranks = Claims(0, 2), Claims(1, 2)
    for rank in ranks:
        rank.begin_epoch(Epoch(0, 3))
    for _ in range(3):
        slow.ask(is_urgent=False)
        exchange(*ranks)
    assert slow.order == [0, 1, 2]
    assert slow.begin(0)
    fast.ask(is_urgent=False)
    exchange(*ranks)
    assert (fast.order, fast.is_dry) == ([], True)
    for expected in ([2], [2, 1], [2, 1]):
        fast.ask(is_urgent=True)
        exchange(*ranks)
        assert fast.order == expected
    assert fast.is_dry
    assert slow.order == [0, NONE, NONE]
    assert not slow.begin(1)
    assert not slow.begin(2)


def test_what_a_lost_dealer_has_told_is_not_trained_on_again() -> None:
    dealer, witness, third = ranks = [Claims(rank, 3) for rank in range(3)]
    for rank in ranks:
        rank.begin_epoch(Epoch(0, 9))
    for position in range(4):
        dealer.ask(is_urgent=not position)
        exchange(*ranks)
        if position < 3:
            dealer.begin(position)
    third.ask(is_urgent=True)
    exchange(*ranks)
    reports = [witness.report(), third.report()]
    for place, rank in enumerate((witness, third)):
        rank.change_view(place, reports)
    assert witness.trained == third.trained == {0, 1}  # the third unit was begun
    assert witness.num_free == 6
