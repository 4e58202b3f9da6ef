"""`balanced` where ranks are lost and come at any moment, beside one process on the whole batches.

In the simulated world, and with real processes that are killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable, Collection
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_dsgd as dsgd
from lightning_dsgd.agreement import everyones
from lightning_dsgd.algorithm import Conditions
from lightning_dsgd.algorithms.balanced import Balanced
from lightning_dsgd.data.units.balancing import Balancing
from lightning_dsgd.data.units.loaders import UnitLoader
from lightning_dsgd.elastic.calls import Calls
from lightning_dsgd.elastic.simulated import SurvivingWorld
from lightning_dsgd.elastic.surviving import Circle, SurvivingReplica
from lightning_dsgd.replica.alike import give
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


def parts_of(num_samples: int, most: int = NUM_PARTS) -> int:
    """Into how many units a batch is split: none of a short one has one sample alone."""
    return max(1, min(most, num_samples // 2))


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


class RanksOfCalls:
    """What `Members` makes of calls."""

    def __init__(self, calls: Calls) -> None:
        self.together, self.step = calls.together, calls.step


def survive(net: Any, time: Time, num_homes: int, options: dict[str, bool]) -> dict[str, Any]:
    """Trains, whoever is lost or comes meanwhile; returns the weights after each step."""
    module, optimizer = make()
    at = [-1, -1] if net.is_newcomer else [0, 0]  # the epoch, and the step of it

    def begin(view: View) -> None:
        told = [json.loads(text) for text in everyones(view.sub("begun"), json.dumps(at))]
        old = [rank for rank, (epoch, _) in enumerate(told) if epoch >= 0]
        is_member, is_grown = at[0] >= 0, len(old) < len(told)
        balancing.stand_still()
        replica.change_view(Circle(view.sub("replica"), {*range(len(told))}.difference(old)))
        balancing.change_view(view.sub("balancing"), view.members, replica)
        if is_grown:
            give(view.sub("state"), momenta(optimizer), old[0])
        if not is_member:
            at[:] = max(told)  # some may still be in the call that lets it in

    calls = Calls(net, begin, is_newcomer=net.is_newcomer)
    ranks: Any = RanksOfCalls(calls)
    algorithm = Balanced(**options)
    inside = calls.view.sub("replica")
    known = None if net.is_newcomer else num_homes
    replica = SurvivingReplica(
        inside,
        module,
        [optimizer],
        algorithm,
        conditions=Conditions(num_homes=known),
        is_newcomer=net.is_newcomer,
    )
    balancing = Balancing(
        calls.view.sub("balancing"),
        replica,
        ranks,
        backups=algorithm.backups,
        num_homes=known,
    )
    loader = loader_of(num_homes, net.rank % num_homes)
    units = UnitLoader(loader, net.rank)
    seen: dict[int, Tensor] = {}
    if net.is_newcomer:
        net.join(within_s=60.0)
        calls.join()
    has_begun = not net.is_newcomer
    while at[0] < NUM_EPOCHS:
        loader.sampler.set_epoch(at[0])  # type: ignore[attr-defined]
        balancing.begin_epoch(
            units, limit=len(loader), num_slots_of_step=NUM_SLOTS, micro_batches=NUM_PARTS
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


def in_one_process(
    num_homes: int, num_epochs: int = NUM_EPOCHS, num_parts: int = 1
) -> list[Tensor]:
    """The weights after each step, each of them on all batches of all homes.

    With `num_parts=NUM_PARTS` it adds up the micro-batches, in their order.
    """
    module, optimizer = make()
    loaders, seen = [loader_of(num_homes, home) for home in range(num_homes)], []
    for epoch in range(num_epochs):
        for loader in loaders:
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        slots = [*zip(*loaders, strict=True)]
        for first in range(0, len(slots), NUM_SLOTS):
            optimizer.zero_grad()
            here = slots[first : first + NUM_SLOTS]
            for slot in here:
                for batch in slot:
                    parts = parts_of(len(batch[0]), num_parts)
                    for x, y in zip(*(each.chunk(parts) for each in batch), strict=True):
                        # A part that begins elsewhere in memory is multiplied otherwise.
                        loss = (module(x.clone()) - y).square().mean()
                        (loss * (len(x) / len(batch[0]) / NUM_SLOTS)).backward()
            for parameter in module.parameters():
                parameter.grad /= num_homes  # type: ignore[operator]
            optimizer.step()
            seen.append(weights(module).clone())
    return seen


def play(seed: int, num_came: int = 0, num_homes: int | None = None) -> tuple[int, int]:
    """Some ranks are killed at any time, some come; returns how many of each.

    Args:
        seed: of all that is random
        num_came: how many ranks come
        num_homes: of a training that began with another number of ranks
    """
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
    options = {"backups": seed % 3 > 0, "deterministic": seed % 2 > 0}
    homes = num_homes or world_size
    outcomes = world.outcomes(survive, time, homes, options)
    expected = in_one_process(homes, num_parts=NUM_PARTS)
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
            assert torch.equal(x, expected[step]) or not options["deterministic"], name
            others = [o["seen"] for r, o in enumerate(outcomes) if r not in lost]
            assert all(torch.equal(x, other[step]) for other in others if step in other), name
    return sum(isinstance(outcomes[rank], BaseException) for rank in lost), num_joined


def test_weights_equal_one_process_in_every_step_whoever_is_lost() -> None:
    assert sum(play(seed)[0] for seed in range(3)) > 1


def test_newcomers_make_the_same_steps_from_their_first_one_on() -> None:
    played = [play(seed, 2) for seed in range(3)]
    assert sum(lost for lost, _ in played) > 1
    assert sum(came for _, came in played) > 4


@pytest.mark.parametrize("num_homes", [2, 5])
def test_a_step_has_the_batches_of_as_many_ranks_as_training_began_with(num_homes: int) -> None:
    assert sum(play(seed, 1, num_homes)[0] for seed in range(7, 9)) > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("block", times(4))
def test_ranks_are_lost_at_any_moment(block: int) -> None:
    for seed in range(20):
        play(1000 + 100 * block + seed)
        play(3000 + 100 * block + seed, 1, (2, 3, 4, 5, 8)[seed % 5])
        play(5000 + 100 * block + seed, 2)


# ---- real processes ----

WORLD = FitWorld(timeout_s=120.0)
SURVIVES: Any = {"timeout_s": 60.0, "heartbeat_timeout_s": 30.0, "on_loss": "continue"}


Moment = tuple[int, int]
"""A step, counted over all epochs, and a place in it."""
# 2 u is the midst of this rank's unit number u in the step, 2 u + 1 the end of its backward pass.
BEFORE_SUM, IN_SUM, AFTER_SUM, BEFORE_UPDATE, AFTER_UPDATE, IN_CHANGE = range(100, 106)
"""In the order in which a rank comes to them; the last where others are lost in that step."""


class Doomed(Balanced):
    """Kills its process once the rank has come to a moment, or past it; notes each unit's number.

    Attributes:
        moment: when; None: never
        entered: for each step that this rank has taken, which units are in its sum, see `add`
    """

    moment: Moment | None = None
    entered: list[int]
    _summing = 0

    def come_to(self, step: int, place: int) -> None:
        if self.moment is not None and (step, place) >= self.moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def add(self, step: int, unit: int, *args: Any) -> None:
        """Two bits of a note say how often a unit has entered, up to three times."""
        self.note = 1 << 2 * unit
        super().add(step, unit, *args)

    def take_sum(self, step: int) -> tuple[Tensor, Tensor]:
        taken = super().take_sum(step)
        self.entered.append(self.notes)
        return taken

    def _finished(self, step: int) -> Any:
        self.come_to(step, BEFORE_SUM)
        self._summing = step
        return super()._finished(step)

    def _mean(self, *args: Any) -> Tensor:
        mean = super()._mean(*args)
        self.come_to(self._summing, IN_SUM)  # the gradients are summed, and their flags are not
        return mean

    def _keep(self, step: int, *args: Any) -> None:
        super()._keep(step, *args)
        self.come_to(step, AFTER_SUM)

    def go_on(self, net: Any, num_homes: int, summed: int, kept: int) -> None:
        self.come_to(kept, IN_CHANGE)
        super().go_on(net, num_homes, summed, kept)


def algorithm_until(moment: Moment | None, **options: Any) -> Doomed:
    algorithm = Doomed(micro_batches=NUM_PARTS, **options)
    algorithm.moment, algorithm.entered = moment, []
    return algorithm


def make_steps(
    face: Any,
    algorithm: Doomed,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    num_epochs: int = NUM_EPOCHS,
    computes: Callable[[], None] = lambda: None,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> dict[str, Any]:
    """The loop of a rank in plain PyTorch or Fabric."""
    seen: list[list[float]] = []
    loader = loader_of(dist.get_world_size(), dist.get_rank())
    for epoch in range(num_epochs):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for batches in face.steps(loader, NUM_SLOTS):
            optimizer.zero_grad()
            for number, (x, y) in enumerate(batches):
                computes()
                loss = (module(x) - y).square().mean()
                algorithm.come_to(len(seen), 2 * number)
                backward(loss)
                algorithm.come_to(len(seen), 2 * number + 1)
            algorithm.come_to(len(seen), BEFORE_UPDATE)
            optimizer.step()
            algorithm.come_to(len(seen), AFTER_UPDATE)
            seen.append(weights(module).tolist())
    return {"seen": seen, "members": face.members, "entered": algorithm.entered}


def train(
    moments: dict[int, Moment], num_epochs: int = NUM_EPOCHS, deterministic: bool = False
) -> dict[str, Any]:
    """Trains in plain PyTorch; some ranks are killed, each at a moment of its own."""
    torch.set_num_threads(1)
    module, optimizer = make()
    algorithm = algorithm_until(moments.get(dist.get_rank()), deterministic=deterministic)
    with dsgd.decentralized(module, optimizer, algorithm, min_ranks=2, **SURVIVES) as replica:
        return make_steps(replica, algorithm, module, optimizer, num_epochs)


def train_for(after_s: dict[int, float]) -> dict[str, Any]:
    """Trains in plain PyTorch; some ranks are killed so long after their first unit."""
    torch.set_num_threads(1)
    module, optimizer = make()
    algorithm, has_begun = algorithm_until(None), threading.Event()

    def computes() -> None:
        if not has_begun.is_set() and dist.get_rank() in after_s:
            kill_after(after_s[dist.get_rank()])
        has_begun.set()
        threading.Event().wait(0.01)

    with dsgd.decentralized(module, optimizer, algorithm, min_ranks=2, **SURVIVES) as replica:
        return make_steps(replica, algorithm, module, optimizer, computes=computes)


def train_in_fabric(moments: dict[int, Moment], devices: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    module, optimizer = make()
    algorithm = algorithm_until(moments.get(dist.get_rank()))
    strategy = dsgd.FabricStrategy(algorithm, min_ranks=2, **SURVIVES)
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    module, optimizer = fabric.setup(module, optimizer)
    with strategy:
        return make_steps(strategy, algorithm, module, optimizer, backward=fabric.backward)


def check_left(
    outcomes: list[Any],
    lost: Collection[int],
    num_epochs: int = NUM_EPOCHS,
    deterministic: bool = False,
) -> None:
    """The ranks that are left have made the same steps as one process on all batches."""
    world_size = len(outcomes)
    expected = torch.stack(in_one_process(world_size, num_epochs))
    left = [outcome for rank, outcome in enumerate(outcomes) if rank not in lost]
    assert [outcome.error for outcome in left] == [""] * len(left)
    slots = [world_size * parts_of(len(x)) for x, _ in loader_of(world_size, 0)]
    steps = [sum(slots[first : first + NUM_SLOTS]) for first in range(0, len(slots), NUM_SLOTS)]
    in_order = torch.stack(in_one_process(world_size, num_epochs, NUM_PARTS))
    once = [sum(1 << 2 * unit for unit in range(n)) for n in steps]
    for outcome in left:
        seen = torch.tensor(outcome.result["seen"], dtype=torch.float64)
        torch.testing.assert_close(seen, expected, rtol=1e-12, atol=1e-12)
        assert outcome.result["seen"] == left[0].result["seen"]
        assert torch.equal(seen, in_order) or not deterministic
        assert outcome.result.get("entered", once * num_epochs) == once * num_epochs


def check_killed(outcomes: list[Any], moments: dict[int, Moment], **given: Any) -> None:
    """All of these ranks were killed, and the others know it."""
    members = tuple(rank for rank in range(len(outcomes)) if rank not in moments)
    for rank, outcome in enumerate(outcomes):
        if rank in moments:
            assert outcome.exitcode == -signal.SIGKILL, outcome.error
        else:
            assert not outcome.error
            assert outcome.result["members"] == members
    check_left(outcomes, moments, **given)


def test_the_dealer_is_killed_and_the_others_make_the_same_steps() -> None:
    moments = {0: (1, 2)}
    check_killed(WORLD.outcomes(4, train, moments), moments)


def test_a_rank_is_killed_in_fabric_and_the_others_make_the_same_steps() -> None:
    moments = {0: (3, 1)}
    check_killed(WORLD.outcomes(3, train_in_fabric, moments, 3), moments)


LONG = 8
"""Epochs, of three steps each."""
LATER = 6
"""More steps than one rank may be behind another."""


def drawn(chance: random.Random) -> dict[int, Moment]:
    """Who of eight ranks is killed, and when: three of all, then two of the five that are left.

    Both times the dealer is among them.
    """
    ranks = range(1, 8)
    first = [0, *chance.sample(ranks, 2)]
    dealer, *left = [rank for rank in ranks if rank not in first]
    moments: dict[int, Moment] = {}
    begins = 0
    for lost in (first, [dealer, chance.choice(left)]):
        for rank in lost:
            place = chance.choice([*range(6), *range(BEFORE_SUM, IN_CHANGE + 1)])
            moments[rank] = chance.randint(begins, begins + 3), place
        begins = max(moments.values())[0] + LATER
    return moments


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", times(4))
@pytest.mark.parametrize("deterministic", [False, True])
def test_five_of_eight_ranks_are_killed_and_leave_no_trace(seed: int, deterministic: bool) -> None:
    moments = drawn(random.Random(seed))
    outcomes = WORLD.outcomes(8, train, moments, LONG, deterministic)
    check_killed(outcomes, moments, num_epochs=LONG, deterministic=deterministic)


class Fitted(L.LightningModule):
    """Comes to all places of a step, and notes its weights after each."""

    def __init__(self, algorithm: Doomed) -> None:
        super().__init__()
        self.algorithm, self.num_units = algorithm, 0
        self.module, _ = make()
        self.seen: dict[int, list[float]] = {}

    def come_to(self, place: int) -> None:
        self.algorithm.come_to(self.global_step, place)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        threading.Event().wait(0.005)
        x, y = batch
        loss = (self.module(x) - y).square().mean()
        self.come_to(2 * self.num_units)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_after_backward(self) -> None:
        self.come_to(2 * self.num_units + 1)
        self.num_units += 1

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.come_to(BEFORE_UPDATE)
        self.num_units = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("one", torch.ones(()), sync_dist=True, reduce_fx="sum")

    def on_train_batch_end(self, *args: Any) -> None:
        step = self.global_step - 1  # made last
        if step >= 0 and step not in self.seen:
            self.algorithm.come_to(step, AFTER_UPDATE)
            self.seen[step] = weights(self.module).tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), LR, momentum=0.9)


def fit(folder: str, moments: dict[int, Moment], devices: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    algorithm = algorithm_until(moments.get(dist.get_rank()))
    balanced = dsgd.BalancedStrategy(algorithm, min_ranks=2, **SURVIVES)
    saver = ModelCheckpoint(folder, "saved", every_n_train_steps=2, save_top_k=-1)
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [saver]}
    options |= {"max_epochs": NUM_EPOCHS, "accumulate_grad_batches": NUM_SLOTS}
    train = trainer(balanced, devices, **options)
    module, ranks = Fitted(algorithm), dist.get_world_size()
    train.fit(module, loader_of(ranks, dist.get_rank()), DataLoader(DATA, 24))
    return {
        "seen": [*module.seen.values()],
        "members": train.strategy.session.ranks.members,
        "global_step": train.global_step,
    }


@cases(
    "num_ranks, moments",
    now=[(4, {0: (1, 0)})],
    later=[(4, {3: (0, 0)}), (8, {0: (1, 1), 5: (1, 2), 7: (2, AFTER_UPDATE)})],
)
def test_ranks_are_killed_in_fit_and_the_others_make_the_same_steps(num_ranks, moments, tmp_path):
    outcomes = WORLD.outcomes(num_ranks, fit, str(tmp_path), moments, num_ranks)
    check_left(outcomes, set(moments))
    members = [rank for rank in range(num_ranks) if rank not in moments]
    assert outcomes[members[0]].result["members"] == tuple(members)
    assert outcomes[members[0]].result["global_step"] == len(in_one_process(num_ranks))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", times(4))
def test_three_of_eight_ranks_are_killed_at_any_time(seed: int) -> None:
    chance = random.Random(seed)
    lost = {rank: chance.uniform(0.0, 1.5) for rank in chance.sample(range(8), 3)}
    outcomes = WORLD.outcomes(8, train_for, lost)
    check_left(outcomes, {rank for rank in lost if outcomes[rank].error})
