"""Claims over a network: lanes deal, ranks are lost, killed dealers included."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import Any

import pytest
import torch

from lightning_dsgd.data.claims.claims import NONE, Claims, Epoch
from lightning_dsgd.data.claims.dealing import ClaimDealing
from lightning_dsgd.elastic.calls import Calls
from lightning_dsgd.elastic.simulated import SurvivingWorld
from lightning_dsgd.simulated import Killed, RankFailed, SimulatedWorld
from lightning_dsgd.transport import PeerLost, Timeout
from lightning_dsgd.transport.view import View
from tests.support.thorough import times

NUM_PORTIONS = 24


def train(net: Any, seed: int, made: dict[int, list[int]]) -> None:
    """Two epochs, in which a rank meets the others where it is told that there is none."""
    chance = random.Random(f"{seed}/{net.rank}")
    depth, step_s = chance.randrange(3), chance.choice([0.1, 0.1, 0.2, 0.7])
    mine = made.setdefault(net.rank, [])

    def enter(view: View) -> None:
        nonlocal dealing
        dealing = dealing.in_view(view.sub("claims"))

    def do(name: str, *args: Any, **how: Any) -> Any:
        made = []
        calls.step(lambda: made.append(getattr(dealing, name)(*args, **how)), again=True)
        return made[-1]

    def count_left() -> int:
        return int(calls.view.sub("left").all_reduce(torch.tensor([dealing.num_free()])).wait())

    calls = Calls(net, enter)
    dealing = ClaimDealing(calls.view.sub("claims"))
    for number in range(2):
        do("begin_epoch", Epoch(number, NUM_PORTIONS, 5))
        position = 0
        while True:
            while do("secure", position, is_urgent=True):
                for ahead in range(depth):
                    do("secure", position + ahead, is_urgent=False)
                if do("begin", position):
                    net.compute(step_s)
                    mine.append(NUM_PORTIONS * number + dealing.portion(position))
                    dealing.end()
                position += 1
            if not calls.together(count_left):
                break
    calls.leave()
    with contextlib.suppress(PeerLost):  # which its lane may have met since
        dealing.close()


def run(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.randrange(1, 6)
    world = SurvivingWorld(
        size,
        latency_s=chance.choice([0.0, 0.001, 0.05]),
        detect_s=chance.choice([0.003, 0.2]),
        heartbeat_timeout_s=2.0,
        timeout_s=60.0,
        min_ranks=1,
        strict=False,
    )
    killed = chance.sample(range(size), (size - 1) // 2 - chance.randrange(2) * (size > 4))
    if seed % 2 and killed:
        killed[0] = 0  # who deals
        killed[1:] = [rank for rank in killed[1:] if rank > 1]  # not who knows what it dealt
    for rank in killed:
        world.kill(rank, chance.choice([0.1, 0.35, 0.8, chance.uniform(0.0, 3.0)]))
    made: dict[int, list[int]] = {}
    outcomes = world.outcomes(train, seed, made)
    lost = [rank for rank, outcome in enumerate(outcomes) if isinstance(outcome, Killed)]
    assert set(lost) <= set(killed), seed
    there = [rank for rank in range(size) if rank not in lost]
    for rank in there:
        assert outcomes[rank] is None, (seed, rank, outcomes[rank])
    count = Counter(portion for rank in there for portion in made[rank])
    by_lost = {portion for rank in lost for portion in made.get(rank, [])}
    assert set(count) | by_lost == set(range(2 * NUM_PORTIONS)), seed
    assert not count or max(count.values()) == 1, seed
    if lost == [0]:  # it has told of all but the newest
        assert len(by_lost & set(count)) <= 1, seed


def test_every_portion_is_trained_on_once_by_those_that_are_left() -> None:
    for seed in times(30):
        run(seed)


def misled(net: Any, late: int) -> None:
    dealing = ClaimDealing(net.sub("claims"))
    if net.rank == late:
        net.compute(1.0)
    dealing.begin_epoch(Epoch(0, 5, net.rank))
    dealing.secure(0, is_urgent=True)


@pytest.mark.parametrize(("late", "refused"), [(1, 1), (0, 0)], ids=["member", "dealer"])
def test_a_rank_with_other_batches_ends_with_both_named(late: int, refused: int) -> None:
    """The dealer too, where another has begun the epoch before it."""
    both = f"the checksum {refused} on rank {refused} and epoch 0 of 5 with the checksum "
    with pytest.raises(RankFailed, match=f"{both}{1 - refused} "):
        SimulatedWorld(2, timeout_s=5.0).run(misled, late)


def lonely(net: Any) -> None:
    if net.rank:
        dealing = ClaimDealing(net.sub("claims"))
        dealing.begin_epoch(Epoch(0, 5))
        dealing.secure(0, is_urgent=True)
    net.compute(60.0)


def test_a_wait_for_a_dealer_that_does_not_deal_ends() -> None:
    with pytest.raises(RankFailed) as caught:
        SimulatedWorld(2, timeout_s=5.0, strict=False).run(lonely)
    assert isinstance(caught.value.__cause__, Timeout)
    assert "waited 5 s for the first member to deal it a batch" in str(caught.value)


# ---- message by message ----
def exchange(*ranks: Claims) -> None:
    """Lets all messages arrive."""
    while any(rank.outbox for rank in ranks):
        for place, rank in enumerate(ranks):
            outbox, rank.outbox = rank.outbox, []
            for dst, words in outbox:
                ranks[dst].hear(place, words)


def test_a_rank_without_portions_gets_one_that_another_has_not_begun() -> None:
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
