"""`balanced` where ranks are lost and come at any moment, beside one process on the whole batches.

In the simulated world, and with real processes that are killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_dsgd as dsgd
from lightning_dsgd.agreement import everyones
from lightning_dsgd.algorithms.balanced import Balanced
from lightning_dsgd.data.units.balancing import Balancing
from lightning_dsgd.data.units.loaders import UnitLoader
from lightning_dsgd.elastic.calls import Calls
from lightning_dsgd.elastic.simulated import SurvivingWorld
from lightning_dsgd.elastic.surviving import SurvivingReplica
from lightning_dsgd.replica.consensus import give
from lightning_dsgd.transport.view import View
from tests.support.killed import kill_after
from tests.support.models import trainer
from tests.support.thorough import cases, times
from tests.support.worlds import FitWorld

DRAW = torch.Generator().manual_seed(0)
X = torch.randn(240, 5, generator=DRAW, dtype=torch.float64)
DATA = TensorDataset(X, X.sin().sum(1, keepdim=True))
LR, NUM_EPOCHS = 0.1, 3
NUM_SLOTS, NUM_PARTS = 2, 2

Time = Callable[[int, int], float]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return module, torch.optim.SGD(module.parameters(), LR, momentum=0.9)


def loader_of(world_size: int, rank: int) -> DataLoader[Any]:
    return DataLoader(DATA, 6, sampler=DistributedSampler(DATA, world_size, rank, seed=7))


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


class RanksOfCalls:
    """What `Members` makes of calls."""

    def __init__(self, calls: Calls) -> None:
        self.together, self.step = calls.together, calls.step


def survive(net: Any, time: Time, backups: bool, world_size: int) -> dict[str, Any]:
    """Trains, whoever is lost or comes meanwhile; returns the weights after each step."""
    module, optimizer = make()
    at = [-1, -1] if net.is_newcomer else [0, 0]  # the epoch, and the step of it

    def begin(view: View) -> None:
        told = [json.loads(text) for text in everyones(view.sub("begun"), json.dumps(at))]
        old = [rank for rank, (epoch, _) in enumerate(told) if epoch >= 0]
        is_member, is_grown = at[0] >= 0, len(old) < len(told)
        among = View(view.sub("old"), old, view.number) if is_grown and is_member else None
        balancing.stand_still()
        replica.change_view(view.sub("replica"), among, old[0] if is_grown else -1)
        balancing.change_view(view.sub("balancing"), view.members, replica)
        if is_grown:
            give(view.sub("state"), momenta(optimizer), old[0])
        if not is_member:
            at[:] = max(told)  # some may still be in the call that lets it in

    calls = Calls(net, begin, is_newcomer=net.is_newcomer)
    ranks: Any = RanksOfCalls(calls)
    algorithm = Balanced(backups=backups)
    inside = calls.view.sub("replica")
    replica = SurvivingReplica(inside, module, [optimizer], algorithm, is_newcomer=net.is_newcomer)
    balancing = Balancing(calls.view.sub("balancing"), replica, ranks, backups=backups)
    loader = loader_of(world_size, net.rank % world_size)
    units = UnitLoader(loader, net.rank)
    seen: dict[int, Tensor] = {}
    if net.is_newcomer:
        net.join(within_s=60.0)
        calls.join()
    has_begun = not net.is_newcomer
    while at[0] < NUM_EPOCHS:
        loader.sampler.set_epoch(at[0])  # type: ignore[attr-defined]
        balancing.begin_epoch(
            units, limit=len(loader), num_slots_of_step=NUM_SLOTS, num_parts=NUM_PARTS
        )
        while at[1] < balancing.plan.num_steps:
            if at[1] % 2 and has_begun:
                mine = torch.tensor([sum(1 << n for n in calls.view.views.newcomers())])
                first = int(calls.together(lambda mine=mine: calls.view.all_gather(mine).wait())[0])
                calls.admit([n for n in range(first.bit_length()) if first >> n & 1])
            has_begun = True
            balancing.begin_step(at[1])
            while balancing.next_unit() >= 0:
                x, y = balancing.batch()
                net.compute(time(net.rank, len(seen)))
                replica.drop_gradients()
                (module(x) - y).square().mean().backward()
                balancing.finish(balancing.weight / NUM_SLOTS)
            calls.step(lambda: replica.before_update(optimizer), again=True)
            optimizer.step()
            calls.step(lambda: replica.after_update(optimizer), again=False)
            at[1] += 1
            seen[at[0] * balancing.plan.num_steps + at[1] - 1] = weights(module).clone()
        at[:] = at[0] + 1, 0
    calls.together(replica.finish, replica.finish_as_shared)
    calls.leave()
    balancing.stand_still()  # which a loss after the last step has begun anew
    return {"seen": seen, "members": calls.view.members}


def momenta(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The optimizer's state, zeros where it has made no step, as the Trainer hands it over."""
    return [
        optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        for p in optimizer.param_groups[0]["params"]
    ]


def in_one_process(world_size: int) -> list[Tensor]:
    module, optimizer = make()
    loaders, seen = [loader_of(world_size, rank) for rank in range(world_size)], []
    for epoch in range(NUM_EPOCHS):
        for loader in loaders:
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        slots = [*zip(*loaders, strict=True)]
        for first in range(0, len(slots), NUM_SLOTS):
            optimizer.zero_grad()
            here = slots[first : first + NUM_SLOTS]
            for slot in here:
                for x, y in slot:
                    loss = (module(x) - y).square().mean()
                    (loss / world_size / NUM_SLOTS).backward()
            optimizer.step()
            seen.append(weights(module).clone())
    return seen


def play(seed: int, num_came: int = 0) -> tuple[int, int]:
    """Some ranks are killed at any time, some come; returns how many of each."""
    chance = random.Random(seed)
    world_size = chance.choice([2, 3, 4, 5, 8])
    slow = [chance.choice([0.1, 0.1, 0.2, 0.5]) for _ in range(world_size + num_came)]

    def time(rank: int, step: int) -> float:
        return slow[rank] * (1 + chance.random()) + 2.0 * (chance.random() < 0.03)

    world = SurvivingWorld(
        world_size, min_ranks=1, latency_s=chance.choice([1e-3, 0.05]), detect_s=0.003, strict=False
    )
    num_lost = chance.randint(1, max(1, (world_size - 1) // 2))
    lost = chance.sample(range(world_size), num_lost)
    for rank in lost:
        world.kill(rank, chance.uniform(1.0, 20.0))  # once all have begun
    for _ in range(num_came):
        world.join(chance.uniform(0.0, 2.0))
    outcomes = world.outcomes(survive, time, seed % 3 > 0, world_size)
    expected = in_one_process(world_size)
    what = f"{seed}: {lost} of {world_size} are lost, {num_came} come"
    num_joined = 0
    for rank, outcome in enumerate(outcomes):
        if rank in lost:
            continue
        assert not isinstance(outcome, BaseException), f"{what}: {outcome!r}"
        seen = outcome["seen"]
        assert seen.keys() == {*range(min(seen), len(expected))}
        assert min(seen) == 0 or rank >= world_size
        num_joined += rank >= world_size
        for step, x in seen.items():
            name = f"{what}; step {step} of rank {rank}: {{}}"
            torch.testing.assert_close(x, expected[step], rtol=1e-12, atol=1e-12, msg=name.format)
            others = [o["seen"] for r, o in enumerate(outcomes) if r not in lost]
            assert all(torch.equal(x, other[step]) for other in others if step in other), name
    return sum(isinstance(outcomes[rank], BaseException) for rank in lost), num_joined


def test_weights_equal_one_process_in_every_step_whoever_is_lost() -> None:
    assert sum(play(seed)[0] for seed in range(3)) > 1


def test_newcomers_make_the_same_steps_from_their_first_one_on() -> None:
    played = [play(seed, 2) for seed in range(3)]
    assert sum(lost for lost, _ in played) > 1
    assert sum(came for _, came in played) > 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("block", times(4))
def test_ranks_are_lost_at_any_moment(block: int) -> None:
    for seed in range(20):
        play(1000 + 100 * block + seed)
        play(5000 + 100 * block + seed, 2)


# ---- real processes ----

WORLD = FitWorld(timeout_s=120.0)
SURVIVES: Any = {"timeout_s": 60.0, "heartbeat_timeout_s": 30.0, "on_loss": "continue"}


def train(doomed: dict[int, int], pause_s: float, after_s: dict[int, float]) -> dict[str, Any]:
    """Trains in plain PyTorch.

    Args:
        doomed: the ranks that are killed, and in the midst of which of their units
        pause_s: how long a unit takes besides
        after_s: the ranks that are killed, and how long after their first unit
    """
    torch.set_num_threads(1)
    module, optimizer = make()
    seen, num_units = [], 0
    balanced = Balanced(micro_batches=NUM_PARTS)
    with dsgd.decentralized(module, optimizer, balanced, min_ranks=2, **SURVIVES) as replica:
        rank = replica.rank
        loader = loader_of(replica.world_size, rank)
        for epoch in range(NUM_EPOCHS):
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            for batches in replica.steps(loader, NUM_SLOTS):
                optimizer.zero_grad()
                for x, y in batches:
                    num_units += 1
                    if num_units == 1 and rank in after_s:
                        kill_after(after_s[rank])
                    if num_units == doomed.get(rank):
                        os.kill(os.getpid(), signal.SIGKILL)
                    threading.Event().wait(pause_s)
                    (module(x) - y).square().mean().backward()
                optimizer.step()
                seen.append(weights(module).tolist())
        return {"seen": seen, "members": replica.members}


def check_left(outcomes: list[Any], lost: set[int]) -> None:
    """The ranks that are left have made the same steps as one process on all batches."""
    expected = torch.stack(in_one_process(len(outcomes)))
    left = [outcome for rank, outcome in enumerate(outcomes) if rank not in lost]
    assert [outcome.error for outcome in left] == [""] * len(left)
    for outcome in left:
        seen = torch.tensor(outcome.result["seen"], dtype=torch.float64)
        torch.testing.assert_close(seen, expected, rtol=1e-12, atol=1e-12)
        assert outcome.result["seen"] == left[0].result["seen"]


@cases(
    "num_ranks, doomed",
    now=[(4, {0: 5})],  # the dealer
    later=[(4, {2: 1}), (8, {0: 3, 5: 4, 7: 9})],
)
def test_ranks_are_killed_and_the_others_make_the_same_steps(num_ranks, doomed):
    outcomes = WORLD.outcomes(num_ranks, train, doomed, 0.005, {})
    check_left(outcomes, set(doomed))
    members = [rank for rank in range(num_ranks) if rank not in doomed]
    assert outcomes[members[0]].result["members"] == tuple(members)


class Fitted(L.LightningModule):
    """Notes its weights after each step; the rank is killed in the midst of a unit."""

    def __init__(self, doomed: dict[int, int]) -> None:
        super().__init__()
        self.doomed, self.num_units = doomed, 0
        self.module, _ = make()
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_units += 1
        if self.num_units == self.doomed.get(self.global_rank):
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait(0.005)
        x, y = batch
        loss = (self.module(x) - y).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("one", torch.ones(()), sync_dist=True, reduce_fx="sum")

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step > len(self.seen):
            self.seen.append(weights(self.module).tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), LR, momentum=0.9)


def fit(folder: str, doomed: dict[int, int], devices: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    balanced = dsgd.BalancedStrategy(micro_batches=NUM_PARTS, min_ranks=2, **SURVIVES)
    saver = ModelCheckpoint(folder, "saved", every_n_train_steps=2, save_top_k=-1)
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [saver]}
    options |= {"max_epochs": NUM_EPOCHS, "accumulate_grad_batches": NUM_SLOTS}
    train = trainer(balanced, devices, **options)
    module, ranks = Fitted(doomed), dist.get_world_size()
    train.fit(module, loader_of(ranks, dist.get_rank()), DataLoader(DATA, 24))
    return {
        "seen": module.seen,
        "members": train.strategy.session.ranks.members,
        "global_step": train.global_step,
    }


@cases(
    "num_ranks, doomed",
    now=[(4, {0: 5})],
    later=[(4, {3: 1}), (8, {0: 3, 5: 4, 7: 9})],
)
def test_ranks_are_killed_in_fit_and_the_others_make_the_same_steps(num_ranks, doomed, tmp_path):
    outcomes = WORLD.outcomes(num_ranks, fit, str(tmp_path), doomed, num_ranks)
    check_left(outcomes, set(doomed))
    members = [rank for rank in range(num_ranks) if rank not in doomed]
    assert outcomes[members[0]].result["members"] == tuple(members)
    assert outcomes[members[0]].result["global_step"] == len(in_one_process(num_ranks))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", times(4))
def test_three_of_eight_ranks_are_killed_at_any_time(seed: int) -> None:
    chance = random.Random(seed)
    lost = {rank: chance.uniform(0.0, 1.5) for rank in chance.sample(range(8), 3)}
    outcomes = WORLD.outcomes(8, train, {}, 0.01, lost)
    check_left(outcomes, {rank for rank in lost if outcomes[rank].error})
