"""Replicas that several ranks hold together go on without one that has lost a rank, and come back.

In a simulated world, with a collective of a replica's ranks that is as gloo's: whoever is in it
waits for the others of its replica, and a view that changes does not end that.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dsgd.agreement import everyones
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.elastic.ballots import group_of
from lightning_dsgd.elastic.calls import Calls
from lightning_dsgd.elastic.simulated import SurvivingWorld
from lightning_dsgd.elastic.surviving import Circle, SurvivingReplica
from lightning_dsgd.elastic.trainer import IN_NONE, takers
from lightning_dsgd.simulated import Killed
from lightning_dsgd.simulated.baton import Awaited
from lightning_dsgd.transport import PeerLost, Timeout, TransportError
from lightning_dsgd.transport.view import View
from tests.support.thorough import times

NUM_STEPS = 20
LOOK_EVERY_S = 0.05
HANGS_S = 300.0
ALGORITHMS = [
    *("local_sgd:sync_period=3", "diloco:sync_period=3:outer_lr=1.0:outer_momentum=0.5", "dpsgd"),
    *("sgp", "wagma", "hpsgd", "adpsgd", "popsgd", "popsgd:blocking=true", "no_sync"),
]


class Turn(Awaited):
    """That all ranks of a replica have come to one of their collectives."""

    needs_others = False

    def in_words(self) -> str:
        return "the others of its replica"


class Row:
    """A collective of a replica's ranks: of one rank's, the n-th meets the n-th of the others."""

    def __init__(self, net: Any, ranks: tuple[int, ...], board: dict[Any, Any]) -> None:
        self.net, self.ranks, self.board = net, ranks, board
        self.num_turns = 0

    def has_lost(self, lost: PeerLost | None) -> bool:
        return self.sum(int(lost is not None)) > 0

    def sum(self, number: int) -> int:
        baton = self.net._simulation.baton
        told = self.board.setdefault((self.ranks, self.num_turns), {})
        self.num_turns += 1
        turn, begin_s = Turn(), self.net.now()
        told[self.net.rank] = number, turn
        if len(told) == len(self.ranks):
            for _, other in told.values():
                baton.ready(other, baton.running.clock)
        while len(told) < len(self.ranks):
            try:
                baton.wait(turn, LOOK_EVERY_S, HANGS_S)
            except Timeout:
                self._blame()
                assert self.net.now() < begin_s + HANGS_S, f"{self.ranks} wait for each other"
        return sum(each for each, _ in told.values())

    def _blame(self) -> None:
        """Fails for a rank that is lost, once that is known here; before a view, at once."""
        faults = self.net._simulation.faults
        if self.net.rank not in faults._views:
            gone = faults.gone.intersection(self.ranks)
            if gone:
                raise PeerLost(min(gone), "died")
        elif self.net.views.ended:
            self.net.views.next_view(PeerLost(self.net.rank, "is in no view any more"))


class Model(nn.Module):
    """One shard, and a buffer."""

    def __init__(self, shard: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((3,), float(shard)))
        self.register_buffer("seen", torch.zeros(1))


def train(
    net: Any, name: str, num_shards: int, board: dict[Any, Any]
) -> tuple[tuple[int, ...], Tensor, list[Any]]:
    """As a sharded loop does: collectives of the replica, steps, and calls of all ranks."""
    number, shard = divmod(net.rank, num_shards)
    ranks = tuple(range(number * num_shards, (number + 1) * num_shards))
    row, model = Row(net, ranks, board), Model(shard)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def column(view: View) -> View:
        return View(view, [k for k, r in enumerate(view.members) if r % num_shards == shard])

    def begin(view: View) -> None:
        inside = view.sub("replica")
        replica.change_view(Circle(column(inside)), Circle(inside))

    calls = Calls(net, begin)
    calls.hold_together(row)
    inside = calls.view.sub("replica")
    replica = SurvivingReplica(
        *(column(inside), model, [optimizer], make_algorithm(name)), everyone=inside
    )
    shown: list[Any] = []
    chance = random.Random(net.rank)
    for k in range(NUM_STEPS + 3 * number):  # numbers of batches differ between replicas
        net.compute(chance.choice([0.05, 0.1, 0.3]))
        assert row.sum(k) == k * num_shards  # all are at this batch
        model.x.grad = (model.x - number).detach()
        calls.step(lambda: replica.before_update(optimizer), again=True)
        optimizer.step()
        calls.step(lambda: replica.after_update(optimizer), again=False)
        if k % 10 == 9 and k < NUM_STEPS:
            calls.together(replica.show_consensus, replica.show_as_shared)
            assert row.sum(-k) == -k * num_shards  # as an evaluation is
            shown.append(calls.together(lambda k=k: everyones(calls.view.sub("all"), str(k))))
            replica.show_own()
    calls.together(replica.finish, replica.finish_as_shared)
    assert row.sum(7) == 7 * num_shards
    calls.leave()
    return calls.view.members, model.x.detach(), shown


def lose(name: str, num_replicas: int, num_shards: int, seed: int, num_losses: int) -> None:
    """At any time; of several, each of another replica, so many that the others can go on."""
    chance, num_ranks = random.Random(f"{name}/{seed}"), num_replicas * num_shards
    groups = [range(i, i + num_shards) for i in range(0, num_ranks, num_shards)]
    world = SurvivingWorld(
        num_ranks,
        latency_s=chance.choice([0.001, 0.01, 0.05]),
        detect_s=chance.choice([0.003, 0.1]),
        groups=groups,
        strict=False,
    )
    broken = chance.sample(range(num_replicas), num_losses)
    lost, at_s = [chance.choice(groups[number]) for number in broken], chance.uniform(0.5, 6.0)
    for rank in lost:
        world.kill(rank, at_s)
        at_s += chance.choice([0.0, 0.001, 0.01, 0.05, 0.5])
    outcomes = world.outcomes(train, name, num_shards, {})
    what = f"{name}, {seed}: ranks {lost} of {num_replicas} x {num_shards}"
    ends = [o for k, o in enumerate(outcomes) if k // num_shards not in broken]
    for end in ends:
        assert isinstance(end, tuple), f"{what}: {end!r}"
    for rank, outcome in enumerate(outcomes):
        if rank in lost:
            assert isinstance(outcome, Killed | tuple), f"{what}: {outcome!r}"
        elif rank // num_shards in broken and not isinstance(outcome, tuple):
            assert isinstance(outcome, PeerLost), f"{what}: {outcome!r}"
            why = f"rank {rank} cannot go on without rank {lost[broken.index(rank // num_shards)]},"
            assert why in str(outcome), f"{what}: {outcome}"
    for shard in range(num_shards):
        xs = [x for k, (_, x, _) in enumerate(ends) if k % num_shards == shard]
        assert all(torch.equal(x, xs[0]) for x in xs), what
        assert torch.isfinite(xs[0]).all(), what
    for _, _, shown in ends:
        assert [set(each) for each in shown] == [{"9"}, {"19"}], what


def doubt(name: str, num_replicas: int, num_shards: int, seed: int) -> None:
    """One rank takes another for lost, which lives, and may do the same a moment later."""
    chance, num_ranks = random.Random(f"doubt/{name}/{seed}"), num_replicas * num_shards
    world = SurvivingWorld(
        num_ranks,
        latency_s=chance.choice([0.001, 0.01, 0.05]),
        groups=[range(i, i + num_shards) for i in range(0, num_ranks, num_shards)],
        strict=False,
    )
    rank, other = chance.sample(range(num_ranks), 2)
    at_s = chance.uniform(0.5, 4.0)
    world.doubt(rank, other, at_s)
    if chance.random() < 0.5:
        world.doubt(other, rank, at_s + chance.choice([0.001, 0.02, 0.5]))
    outcomes = world.outcomes(train, name, num_shards, {})
    what = f"{name}, {seed}: rank {rank} doubts {other} of {num_replicas} x {num_shards}"
    [members] = {outcome[0] for outcome in outcomes if isinstance(outcome, tuple)}
    assert len(members) == num_ranks - num_shards, what
    assert {rank // num_shards, other // num_shards} - {r // num_shards for r in members}, what
    for each, outcome in enumerate(outcomes):
        is_left = each in members
        assert isinstance(outcome, tuple if is_left else PeerLost), f"{what}: {outcome!r}"
    for shard in range(num_shards):
        xs = [outcomes[r][1] for r in members if r % num_shards == shard]
        assert all(torch.equal(x, xs[0]) for x in xs), what


def train_and_let_in(
    net: Any, name: str, num_shards: int, board: dict[Any, Any]
) -> tuple[tuple[int, ...], Tensor, Tensor, int]:
    """The same, with as many batches on all ranks; every third step all let in who has come.

    A newcomer takes the number of its giver's replica for its state, and returns it; others, -1.
    """
    shard, begun = net.rank % num_shards, [-1 if net.is_newcomer else 0]
    row, model = Row(net, group_of(net.rank, [range(num_shards)]), board), Model(shard)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    took_in: list[int | None] = [IN_NONE if net.is_newcomer else None]
    state = torch.tensor([-1])
    chance = random.Random(net.rank)

    def column(view: View) -> View:
        return View(view, [k for k, r in enumerate(view.members) if r % num_shards == shard])

    def hand_over(view: View, new: list[int]) -> None:
        givers = [r for r, n in enumerate(view.members) if r not in new and n % num_shards == shard]
        mine = [r for r in new if view.members[r] % num_shards == shard]
        if mine and view.rank == givers[0]:
            net.compute(board.get(("gives", net.rank), 0.0))
            for rank in mine:
                view.send(torch.tensor([net.rank // num_shards]), rank)
        elif view.rank in mine:
            state.copy_(view.recv(state, givers[0]).wait())
            took_in[0] = view.number

    def begin(view: View) -> None:
        texts = everyones(view.sub("begun"), json.dumps([begun[0], took_in[0]]))
        told = [int(json.loads(text)[0]) for text in texts]
        new = takers([json.loads(text)[1] for text in texts])
        columns = {n % num_shards for r, n in enumerate(view.members) if r not in new}
        if len(columns) < num_shards:
            raise TransportError("nobody is left that holds some shard")
        inside = view.sub("replica")
        mine = column(inside)
        among = [mine.members.index(rank) for rank in new if rank in mine.members]
        replica.change_view(Circle(mine, among), Circle(inside, new))
        begun[0] = max(begun[0], max(told)) if begun[0] < 0 else begun[0]
        key = view.number, shard  # all of a column begin with the same
        assert torch.equal(board.setdefault(key, model.x.detach().clone()), model.x), key
        hand_over(view.sub("state"), new)

    calls = Calls(net, begin, is_newcomer=net.is_newcomer)
    calls.hold_together(row)
    inside = calls.view.sub("replica")
    first = inside if net.is_newcomer else column(inside)
    replica = SurvivingReplica(
        *(first, model, [optimizer], make_algorithm(name)),
        everyone=inside,
        is_newcomer=net.is_newcomer,
    )
    if net.is_newcomer:
        row.sum(0)
        net.join(within_s=30.0)
        calls.join()
        took_in[0] = None
    while begun[0] < 2 * NUM_STEPS:
        k = begun[0]
        net.compute(chance.choice([0.05, 0.1, 0.3]))
        assert row.sum(k) == k * num_shards
        model.x.grad = (model.x - net.rank // num_shards).detach()
        model.seen += 1
        calls.step(lambda: replica.before_update(optimizer), again=True)
        optimizer.step()
        calls.step(lambda: replica.after_update(optimizer), again=False)
        newcomers = 0
        if k % 3 == 2:
            calls.together(replica.settle)
            bits = torch.tensor([sum(1 << n for n in calls.view.views.newcomers())])
            told = calls.together(lambda bits=bits: calls.view.all_gather(bits).wait())
            newcomers = int(told[0])
        begun[0] = k + 1
        if newcomers:
            calls.admit([n for n in range(newcomers.bit_length()) if newcomers >> n & 1])
    calls.together(replica.finish, replica.finish_as_shared)
    calls.leave()
    return calls.view.members, model.x.detach(), model.seen, int(state)


def come(name: str, num_replicas: int, num_shards: int, seed: int) -> None:
    """A replica is lost; one or two come, of which one may lose a rank, before or after."""
    chance, num_ranks = random.Random(f"come/{name}/{seed}"), num_replicas * num_shards
    groups = [tuple(range(i, i + num_shards)) for i in range(0, num_ranks, num_shards)]
    world = SurvivingWorld(
        num_ranks,
        latency_s=chance.choice([0.001, 0.01, 0.05]),
        detect_s=chance.choice([0.003, 0.1]),
        heartbeat_timeout_s=5.0,
        groups=groups,
        strict=False,
    )
    lost_s = chance.uniform(0.3, 2.0)
    lost = [chance.randrange(num_ranks)]
    world.kill(lost[0], lost_s)
    come_s, num_rows = lost_s + chance.choice([0.0, 0.05, 0.5, 1.0]), chance.choice([1, 1, 2])
    for _ in range(num_rows):
        groups.append(tuple(world.join(come_s) for _ in range(num_shards)))
        come_s += chance.choice([0.0, 0.0, 0.01, 0.3])
    if chance.random() < 0.7:
        lost.append(chance.choice(groups[-1]))
        world.kill(lost[1], come_s + chance.choice([0.0, 0.02, 0.2, 0.5, chance.uniform(0.0, 3.0)]))
    outcomes = world.outcomes(train_and_let_in, name, num_shards, {})
    what = f"{name}, {seed}: {groups[num_replicas:]} come to {num_replicas} x {num_shards}; {lost}"
    whole = [rank for group in groups if not {*group} & {*lost} for rank in group]
    for rank, outcome in enumerate(outcomes):
        if rank in whole:
            assert isinstance(outcome, tuple), f"{what}: rank {rank}: {outcome!r}"
            assert outcome[0] == tuple(whole), f"{what}: rank {rank}: {outcome[0]}"
            same = outcomes[whole[rank % num_shards]]
            assert torch.equal(outcome[1], same[1]), what
            assert torch.equal(outcome[2], same[2]), what
        else:
            assert isinstance(outcome, Killed | PeerLost), f"{what}: rank {rank}: {outcome!r}"
    check_states(outcomes, num_shards, what)


def check_states(outcomes: list[Any], num_shards: int, what: str) -> None:
    """A replica that has come has the state of one other."""
    for begin in range(0, len(outcomes), num_shards):
        row = outcomes[begin : begin + num_shards]
        states = {outcome[3] for outcome in row if isinstance(outcome, tuple)}
        assert len(states) <= 1, f"{what}: ranks from {begin} on have the states of {states}"


def lose_giver(name: str, num_replicas: int, num_shards: int, seed: int) -> None:
    """While a replica comes, another is lost, which may have given state to some of its ranks."""
    chance, num_ranks = random.Random(f"giver/{name}/{seed}"), num_replicas * num_shards
    groups = [tuple(range(i, i + num_shards)) for i in range(0, num_ranks, num_shards)]
    world = SurvivingWorld(
        num_ranks,
        latency_s=chance.choice([0.001, 0.01]),
        detect_s=0.003,
        heartbeat_timeout_s=5.0,
        groups=groups,
        strict=False,
    )
    world.kill(num_ranks - 1, 0.3)
    groups.append(tuple(world.join(0.5) for _ in range(num_shards)))
    lost = chance.randrange(num_shards)
    world.kill(lost, chance.uniform(1.0, 3.0))
    outcomes = world.outcomes(train_and_let_in, name, num_shards, {("gives", lost): 2.0})
    what = f"giver, {name}, {seed}: {num_replicas} x {num_shards}"
    for rank in [rank for group in (*groups[1:-2], groups[-1]) for rank in group]:
        assert isinstance(outcomes[rank], tuple), f"{what}: rank {rank}: {outcomes[rank]!r}"
    check_states(outcomes, num_shards, what)


@pytest.mark.parametrize("name", [ALGORITHMS[0], "sgp", "wagma"])
def test_a_replica_that_has_lost_a_rank_or_doubts_one_is_lost_and_the_others_go_on(
    name: str,
) -> None:
    for seed in range(3):
        lose(name, 2 + seed % 2, 2 + seed % 2, seed, 1)
        doubt(name, 2 + seed % 2, 2 + seed % 2, seed)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_replicas_are_lost_or_doubted_at_any_moment_and_the_others_go_on(name: str) -> None:
    """Sixty moments of each kind with TIMES=5."""
    for seed in times(12):
        doubt(name, 2 + seed % 3, 2 + seed % 2, 100 + seed)
        lose(name, 2 + seed % 3, 2 + seed % 2, 100 + seed, 1)
        lose(name, 5, 2 + seed % 2, 300 + seed, 2)
        lose(name, 4, 1, 400 + seed, 1)


@pytest.mark.parametrize("name", [ALGORITHMS[0], "wagma"])
def test_a_replica_comes_as_a_whole_or_not_at_all(name: str) -> None:
    for seed in range(4):
        come(name, 2 + seed % 2, 2 + seed % 2, seed)


def test_a_replica_takes_the_state_of_one_other_whoever_is_lost_meanwhile() -> None:
    for seed in range(6):
        lose_giver("local_sgd:sync_period=3", 4, 2, seed)


def test_newcomers_take_the_state_together() -> None:
    assert takers([None, None, IN_NONE, IN_NONE]) == [2, 3]
    assert takers([None, None, 1, IN_NONE]) == [2, 3]
    assert takers([None, 1, 2]) == [1, 2]  # in view 2 one of them did not hear that it is to
    assert takers([None, 1, 1]) == []
    assert takers([None, None]) == []
    assert takers([1, IN_NONE]) == [0, 1]  # nobody is left that has trained


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_replicas_come_at_any_moment_and_are_lost_before_or_after(name: str) -> None:
    for seed in times(40):
        come(name, 2 + seed % 3, 2 + seed % 2, 1000 + seed)
        lose_giver(name, 4, 2 + seed % 2, 1000 + seed)
