"""What is written where the ranks meet outlives ranks, and its end is an error that says so."""

from __future__ import annotations

import pytest

from lightning_dsgd.elastic.register import Register
from lightning_dsgd.transport import TransportError


def two_registers() -> tuple[Register, Register]:
    keeper = Register("127.0.0.1", 0, 10.0, serves=True)
    return keeper, Register("127.0.0.1", keeper.port, 10.0)


def test_ranks_that_start_again_from_a_checkpoint_find_no_training_of_before(monkeypatch) -> None:
    keeper, other = two_registers()
    keeper.say_survives(can_be_joined=True)
    assert keeper.survives()  # once it is asked again, the store has taken it
    assert other.survives()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not Register("127.0.0.1", keeper.port, 10.0).survives()
    keeper.say_stopped()
    assert not keeper.survives()
    assert not other.survives()


def test_newcomers_do_not_look_for_a_rank_that_is_forgotten() -> None:
    keeper, other = two_registers()
    for rank in range(3):
        keeper.write_card(rank, ("127.0.0.1", 1000 + rank, "secret"))
    keeper.forget(1)
    assert not keeper.read("card/1")
    assert other.cards(other.new_number(3), 3) == {0: ("127.0.0.1", 1000), 2: ("127.0.0.1", 1002)}


def test_ranks_that_are_started_later_are_counted_behind_the_first() -> None:
    keeper, other = two_registers()
    assert not other.await_training(0.05, lambda: False)
    looks = iter([False, False, True])
    assert not other.await_training(600.0, lambda: next(looks))  # a signal has come
    with pytest.raises(TransportError, match="must have been started by `lightning-dsgd launch`"):
        other.size()
    keeper.write_size(2, 4)
    keeper.say_survives(can_be_joined=True)
    assert other.await_training(10.0, lambda: False)
    assert other.size() == (2, 4)
    assert [*other.more_ranks(2, 8), *keeper.more_ranks(1, 8)] == [8, 9, 10]
    assert [other.more_supervisors(1), other.more_supervisors(0)] == [1, 1]


def test_a_rank_trains_until_it_says_or_its_launcher_sees_that_it_does_not(monkeypatch) -> None:
    keeper, other = two_registers()
    keeper.write_size(1, 2)
    assert other.more_ranks(1, 2) == range(2, 3)
    assert [each.goes_on for each in keeper.everyones_training()] == [False] * 3
    for rank in "02":
        monkeypatch.setenv("RANK", rank)
        other.say_trains()
    other.say_trains_no_more("failed")
    assert keeper.trained(2).why == "failed"
    assert [each.goes_on for each in keeper.everyones_training()] == [True, False, False]
    keeper.forget_training_of(0)
    assert [each.goes_on for each in keeper.everyones_training()] == [False] * 3
    assert keeper.trained(0).seconds == 0.0 < keeper.trained(2).seconds


def test_a_supervisor_lives_for_as_long_as_it_says_something_new(monkeypatch) -> None:
    keeper, other = two_registers()
    other.say_lives(1)
    assert keeper.living({1, 2}) == {1, 2}  # nobody is dead who was asked after for the first time
    monkeypatch.setattr("lightning_dsgd.elastic.register.SILENT_S", 0.0)
    assert keeper.living({1}) == set()
    monkeypatch.undo()
    other.say_lives(1)
    assert keeper.living({1}) == {1}


def test_a_store_that_has_ended_is_an_error() -> None:
    keeper, other = two_registers()
    keeper.say_survives(can_be_joined=True)
    assert keeper.survives()
    del keeper
    with pytest.raises(TransportError, match="the store where the ranks meet has ended"):
        other.survives()
