"""The verdict as a function of records: who keeps the others waiting, and when nobody does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_dsgd.why.reader import _group
from lightning_dsgd.why.records import Collective, Ending, Group, Job, Rank
from lightning_dsgd.why.stacks import Frame
from lightning_dsgd.why.verdict import judge

AFTER_S = 30.0
ALL = (0, 1, 2)


def group(entered: int, over: int, still_s: float = 31.0, **names: str) -> Group:
    """A group in which a rank has come so far; `at_9="barrier"` names its ninth collective."""
    recent = {
        int(key.removeprefix("at_")): Collective("0", int(key.removeprefix("at_")), name, 20)
        for key, name in names.items()
    }
    return Group(ALL, entered, over, still_s, recent)


def ranks(*groups: Group, idle_s: float = 31.0) -> dict[int, Rank]:
    return {rank: Rank(rank, idle_s=idle_s, groups={"0": each}) for rank, each in enumerate(groups)}


WAITING_FOR_2 = ranks(group(9, 8), group(9, 8), group(8, 8))


def with_rank(known: dict[int, Rank], rank: int, **changes: Any) -> Job:
    return Job({**known, rank: replace(known[rank], **changes)}, 3)


def test_a_rank_that_never_entered_is_named() -> None:
    verdict = judge(Job(WAITING_FOR_2, 3), AFTER_S)
    assert verdict is not None
    assert (verdict.cause, verdict.culprits, verdict.waiting) == ("missing", (2,), (0, 1))
    assert verdict.collective is not None
    assert (verdict.collective.number, verdict.since_s) == (9, 31.0)
    assert not verdict.is_late_only


def test_a_rank_that_works_is_late_and_ten_times_later_stuck() -> None:
    known = with_rank(WAITING_FOR_2, 2, idle_s=0.5)
    verdict = judge(known, AFTER_S)
    assert verdict is not None
    assert verdict.is_late_only
    long = ranks(group(9, 8, 301.0), group(9, 8, 301.0), group(8, 8, 301.0))
    verdict = judge(with_rank(long, 2, idle_s=0.5), AFTER_S)
    assert verdict is not None
    assert not verdict.is_late_only


def test_nobody_is_stuck_before_the_time_is_up_or_ten_usual_steps() -> None:
    early = ranks(group(9, 8, 29.0), group(9, 8, 29.0), group(8, 8, 29.0))
    assert judge(Job(early, 3), AFTER_S) is None
    assert judge(with_rank(WAITING_FOR_2, 0, usual_s=4.0), AFTER_S) is None


@pytest.mark.parametrize("how", ["left", "raised", "killed", "crashed", "terminated"])
def test_a_rank_that_has_ended_is_named_before_the_time_is_up(how: str) -> None:
    early = ranks(group(9, 8, 4.0), group(9, 8, 4.0), group(8, 8, 4.0))
    verdict = judge(with_rank(early, 2, ending=Ending(how)), AFTER_S)
    assert verdict is not None
    assert (verdict.cause, verdict.culprits, verdict.waiting) == (how, (2,), (0, 1))


def test_the_rank_with_another_collective_is_named() -> None:
    known = ranks(
        group(9, 8, at_9="all_reduce"), group(9, 8, at_9="barrier"), group(9, 8, at_9="all_reduce")
    )
    verdict = judge(Job(known, 3), AFTER_S)
    assert verdict is not None
    assert (verdict.cause, verdict.culprits, verdict.waiting) == ("disagree", (1,), (0, 2))
    assert verdict.instead is not None
    assert verdict.instead.name == "barrier"


def test_a_rank_that_waits_elsewhere_is_not_the_culprit() -> None:
    """Rank 1 has not entered the others' sum, since it waits for rank 2 in a group of the two."""
    pair = Group((1, 2), 1, 0, 31.0)
    known = ranks(group(9, 8), group(8, 8), group(8, 8))
    known[1] = replace(known[1], groups={**known[1].groups, "1": pair})
    known[2] = replace(known[2], groups={**known[2].groups, "1": replace(pair, entered=0)})
    verdict = judge(Job(known, 3), AFTER_S)
    assert verdict is not None
    assert verdict.culprits == (2,)


def test_ranks_that_wait_for_each_other_are_a_cycle() -> None:
    first, second = Group((0, 1), 2, 1, 70.0), Group((0, 1), 1, 1, 70.0)
    known = {
        0: Rank(0, idle_s=70.0, groups={"1": first, "2": second}),
        1: Rank(1, idle_s=70.0, groups={"1": second, "2": first}),
    }
    verdict = judge(Job(known, 2), AFTER_S)
    assert verdict is not None
    assert verdict.cause == "cycle"


def test_a_sum_that_all_have_entered_ends_no_job_while_it_moves() -> None:
    known = ranks(group(9, 8, 151.0), group(9, 8, 151.0), group(9, 8, 151.0), idle_s=151.0)
    verdict = judge(Job(known, 3), AFTER_S)
    assert verdict is not None
    assert verdict.cause == "everyone"
    assert judge(with_rank(known, 0, idle_s=1.0), AFTER_S) is None


def test_ranks_that_never_started_and_that_are_late_are_told_apart() -> None:
    joining = {rank: Rank(rank, "joining", still_s=31.0, idle_s=31.0) for rank in (0, 1)}
    verdict = judge(Job(joining, 3), AFTER_S)
    assert verdict is not None
    assert (verdict.cause, verdict.culprits) == ("unstarted", (2,))
    with_a_late_one = {**joining, 2: Rank(2, "starting", still_s=31.0, idle_s=31.0)}
    verdict = judge(Job(with_a_late_one, 3), AFTER_S)
    assert verdict is not None
    assert (verdict.cause, verdict.culprits) == ("missing", (2,))


def test_ranks_that_all_idle_are_told_with_those_that_wait_in_torch() -> None:
    receives = (Frame("/x/torch/distributed/distributed_c10d.py", 9, "recv"),)
    known = {
        0: Rank(0, idle_s=151.0, frames=receives),
        1: Rank(1, idle_s=151.0, frames=(Frame("/home/me/train.py", 3, "main"),)),
    }
    verdict = judge(Job(known, 2), AFTER_S)
    assert verdict is not None
    assert (verdict.cause, verdict.culprits, verdict.waiting) == ("idle", (1,), (0,))
    assert judge(with_rank(known, 1, idle_s=1.0), AFTER_S) is None


GONE = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:6"


def test_at_the_end_the_first_error_is_named_and_not_what_it_caused() -> None:
    known = {
        0: Rank(0, ending=Ending("raised", GONE, at_s=1.0)),
        1: Rank(1, ending=Ending("raised", "ValueError: no", at_s=2.0)),
        2: Rank(2, ending=Ending("terminated", "SIGTERM", at_s=3.0)),
        3: Rank(3, ending=Ending("raised", "OSError: the same disk", at_s=4.0)),
    }
    verdict = judge(Job(known, 4, 1), AFTER_S)
    assert verdict is not None
    assert (verdict.cause, verdict.culprits, verdict.waiting) == ("raised", (1,), (0, 2, 3))


def test_at_the_end_a_rank_that_left_early_is_named() -> None:
    known = ranks(group(9, 8), group(9, 8), group(8, 8))
    for rank in (0, 1):
        known[rank] = replace(known[rank], ending=Ending("raised", GONE))
    known[2] = replace(known[2], ending=Ending("left"))
    verdict = judge(Job(known, 3, 1), AFTER_S)
    assert verdict is not None
    assert (verdict.cause, verdict.culprits) == ("left", (2,))


def test_at_the_end_a_rank_that_left_before_the_others_next_sum_is_named() -> None:
    """A sum that has failed is over, so the others do not wait in it any more."""
    known = ranks(group(9, 9, at_9="all_reduce"), group(9, 9), group(8, 8))
    for rank in (0, 1):
        known[rank] = replace(known[rank], ending=Ending("raised", GONE))
    known[2] = replace(known[2], ending=Ending("left"))
    verdict = judge(Job(known, 3, 1), AFTER_S)
    assert verdict is not None
    assert (verdict.cause, verdict.culprits, verdict.waiting) == ("left", (2,), (0, 1))
    assert verdict.collective is not None
    assert (verdict.collective.name, verdict.collective.number) == ("all_reduce", 9)


def test_a_run_that_ends_well_has_no_verdict() -> None:
    known = {rank: Rank(rank, ending=Ending("left")) for rank in ALL}
    assert judge(Job(known, 3, 0), AFTER_S) is None


def test_the_list_of_collectives_says_what_is_over_where_the_number_lags() -> None:
    told = {"ranks": [0, 1], "entered": 9, "over": 7, "still_s": 31.0}
    assert _group("0", told, [[8, "broadcast", 1, True], [9, "barrier", 0, False]], 0.0).over == 8
    assert _group("0", told, [[8, "broadcast", 1, True], [9, "barrier", 0, True]], 0.0).over == 9
    assert _group("0", told, [[6, "broadcast", 1, False]], 0.0).over == 7
