"""Errors that a rank survives, on every transport."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_dsgd.transport import ANY, Timeout, Transport, TransportError
from tests.transport.contract.helpers import EMPTY, PATIENCE_S, same


def arguments_are_checked(net: Transport) -> None:
    me, x = net.rank, torch.ones(4)
    wide = torch.ones(2, 2)
    shape = r"one-dimensional and contiguous, got the shape \(2, 2\)"
    wrong: list[tuple[str, Callable[[], object]]] = [
        (rf"dst must be a rank of 0 to 1, got dst=2 on rank {me}", lambda: net.send(x, 2)),
        (r"got dst=-1 on rank", lambda: net.send(x, ANY)),
        (r"src must be a rank of 0 to 1, got src=5", lambda: net.recv(x, 5)),
        (r"got src=-2 on rank", lambda: net.recv(x, -2)),
        (shape, lambda: net.send(wide, 1 - me)),
        (shape, lambda: net.all_reduce(wide)),
        (shape, lambda: net.all_gather(wide)),
        (shape, lambda: net.broadcast(wide, 0)),
        (r"contiguous, .* the strides \(2,\)", lambda: net.send(x[::2], 1 - me)),
        (rf"must hold this rank.*got group=\({1 - me},\)", lambda: net.all_reduce(x, [1 - me])),
        (r"got group=\(0, 1, 0\)", lambda: net.all_gather(x, [0, 1, 0])),
        (r"got group=\(0, 1, 2\)", lambda: net.barrier([0, 1, 2])),
        (r"got group=\(-1, 0, 1\)", lambda: net.barrier([-1, 0, 1])),
        (r"src must be in the group, got src=2", lambda: net.broadcast(x, 2)),
    ]
    for message, call in wrong:
        try:
            with pytest.raises(ValueError, match=message):
                call()
        except BaseException as error:  # pytest's own failures say nothing of which case it was
            raise AssertionError(f"{message}: {error}") from error


def mismatched_collectives_name_both(net: Transport) -> None:
    def both(zero: Callable[[Transport], Any], one: Callable[[Transport], Any], name: str) -> str:
        with pytest.raises(TransportError) as info:
            (one if net.rank else zero)(net.sub(name)).wait()
        return str(info.value)

    text = both(
        lambda end: end.all_reduce(torch.ones(8)), lambda end: end.all_gather(torch.ones(8)), "a"
    )
    for word in ("disagree", "all_reduce", "all_gather", f"rank {1 - net.rank} calls"):
        assert word in text, text
    text = both(lambda end: end.barrier(), lambda end: end.all_gather(EMPTY), "b")
    for word in ("disagree", "barrier", "all_gather"):
        assert word in text, text


def mismatched_lengths_and_dtypes_are_errors(net: Transport) -> None:
    me = net.rank
    wrong: dict[str, Callable[[Transport], Any]] = {
        "float32|float64": lambda end: end.all_reduce(
            torch.ones(8).to([torch.float32, torch.float64][me])
        ),
        "elements": lambda end: end.all_reduce(torch.ones(8 + 2 * me)),
        "elements from": lambda end: end.all_reduce(torch.ones(2 + 2 * me)),
    }
    for message, call in wrong.items():
        with pytest.raises(TransportError, match=message):
            call(net.sub(message)).wait()
    net.send(torch.ones(3), 1 - me, tag=5)
    with pytest.raises(
        TransportError, match=r"expected torch.int64 from rank ., got torch.float32"
    ):
        net.recv(torch.empty(0, dtype=torch.int64), 1 - me, tag=5).wait()
    x = torch.ones(3 + me)
    if me == 0:
        net.broadcast(x, 0).wait()
    else:
        with pytest.raises(
            TransportError, match="expected 4 elements from rank 0 in broadcast, got 3"
        ):
            net.broadcast(x, 0).wait()


def timeouts_say_who_waited_for_what(net: Transport) -> None:
    me, other = net.rank, 1 - net.rank

    def times_out(message: str, work: Any) -> None:
        begin = net.now()
        with pytest.raises(Timeout, match=message):
            work.wait(timeout_s=0.2)
        assert 0.19 <= net.now() - begin < PATIENCE_S

    who = f"rank {me} has waited 0.2 s for "
    times_out(who + f"a message with tag 7 from rank {other}$", net.recv(EMPTY, other, tag=7))
    times_out(who + "a message with tag 0 from any rank", net.recv(EMPTY, ANY))
    times_out(
        who + r"a message with tag 0 from any rank \[inner\]", net.sub("inner").recv(EMPTY, ANY)
    )
    if me == 0:
        times_out(who + "broadcast number 0 from rank 1", net.sub("x").broadcast(torch.ones(2), 1))
    net.barrier().wait()
    net.send(torch.ones(2), other, tag=7)  # not for those who gave up
    same(net.recv(EMPTY, other, tag=7).wait(), torch.ones(2))
    lane = net.spawn_lane(lambda lane_net: lane_net.recv(EMPTY, ANY).wait() and None)
    with pytest.raises(Timeout, match=f"rank {me} has waited 0.2 s for .*lane-1"):
        lane.join(timeout_s=0.2)
    lane.check()
    lane.stop()


SURVIVED = (
    arguments_are_checked,
    mismatched_collectives_name_both,
    mismatched_lengths_and_dtypes_are_errors,
    timeouts_say_who_waited_for_what,
)


def run_survived(net: Transport) -> list[str]:
    failed = []
    for check in SURVIVED:
        net.barrier().wait()
        try:
            check(net)
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{check.__name__}: {type(error).__name__}: {error}")
    return failed


def test_errors_that_a_rank_survives(world):
    for outcome in world.outcomes(2, run_survived):
        assert (outcome.error, outcome.result) == ("", [])
