"""A model on simulated ranks: what is trained changes, and not every rank has every gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dsgd.algorithm import Conditions
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.algorithms.allreduce import AllReduce
from lightning_dsgd.algorithms.hpsgd import HPSGD
from lightning_dsgd.algorithms.local_sgd import LocalSGD
from lightning_dsgd.algorithms.no_sync import NoSync
from lightning_dsgd.algorithms.oktopk import OkTopk
from lightning_dsgd.algorithms.wagma import WAGMA
from lightning_dsgd.replica import alike
from lightning_dsgd.replica.replica import Replica
from lightning_dsgd.simulated import RankFailed, SimulatedWorld
from tests.support.worlds import ProcessWorld


def make(
    net: Any, algorithm: Any, turned: int = 0, **options: Any
) -> tuple[nn.Module, Any, Replica]:
    """Two layers; the optimizer gets the parameters from that one on, and "lr" and the like."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 20), nn.Linear(20, 4))
    order = [*model.parameters()]
    optimizer = torch.optim.SGD(order[turned:] + order[:turned], **{"lr": 0.1, **options})
    replica = Replica(net, model, [optimizer], algorithm())
    replica.synchronize()
    return model, optimizer, replica


def step(
    net: Any, number: int, optimizer: Any, replica: Replica, loss: Callable[..., Tensor]
) -> None:
    generator = torch.Generator().manual_seed(100 * number + net.rank)
    optimizer.zero_grad()
    loss(torch.randn(8, 4, generator=generator)).pow(2).mean().backward()
    replica.before_update(optimizer)
    optimizer.step()
    replica.after_update(optimizer)


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_same(ranks: list[list[Tensor]]) -> None:
    for others in ranks[1:]:
        for first, other in zip(ranks[0], others, strict=True):
            assert torch.equal(first, other)


def swap_what_is_trained(net: Any, algorithm: Any) -> list[Tensor]:
    model, optimizer, replica = make(net, algorithm)
    model[1].requires_grad_(False)
    for number in range(6):
        if number == 3:
            model[0].requires_grad_(False)
            model[1].requires_grad_(True)
        step(net, number, optimizer, replica, model)
    replica.finish()
    return values(model)


@pytest.mark.parametrize("algorithm", [AllReduce, WAGMA, NoSync])
def test_what_is_frozen_while_it_trains_ends_alike_on_all_ranks(algorithm: Any) -> None:
    ranks = SimulatedWorld(4, latency_s=1e-3).run(swap_what_is_trained, algorithm)
    assert_same(ranks)
    [start] = SimulatedWorld(1).run(lambda net: values(make(net, NoSync)[0]))
    assert not any(torch.equal(x, y) for x, y in zip(ranks[0], start, strict=True))


def use_seldom(net: Any, algorithm: Any) -> list[Tensor]:
    """The last layer has a gradient on rank 1 alone, once it has momentum."""
    model, optimizer, replica = make(net, algorithm, momentum=0.9, weight_decay=0.1)

    def loss(x: Tensor, number: int) -> Tensor:
        hidden = model[0](x)
        return model[1](hidden) if net.rank == 1 or number < 2 else hidden

    for number in range(12):
        step(net, number, optimizer, replica, lambda x, number=number: loss(x, number))
    replica.stop()
    return values(model)  # as they are, without a consensus


@pytest.mark.parametrize(
    "algorithm", [AllReduce, lambda: AllReduce(overlap=True), lambda: OkTopk(density=0.02)]
)
def test_ranks_in_lockstep_agree_on_who_has_a_gradient(algorithm: Any) -> None:
    assert_same(SimulatedWorld(3).run(use_seldom, algorithm))


def train_with(net: Any, algorithm: Any, turned: int = 0) -> list[Tensor]:
    model, optimizer, replica = make(net, algorithm, turned, momentum=0.9)
    for number in range(4):
        step(net, number, optimizer, replica, model)
    replica.finish()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    return values(model)


@pytest.mark.parametrize("algorithm", [AllReduce, LocalSGD])
def test_an_optimizer_may_have_its_parameters_in_another_order_on_each_rank(algorithm: Any) -> None:
    """They meet their own, not those that happen to stand in the same place."""
    ordered = SimulatedWorld(3).run(train_with, algorithm)
    shuffled = SimulatedWorld(3).run(lambda net: train_with(net, algorithm, net.rank))
    assert_same([*ordered, *shuffled])


def freeze_with(net: Any, algorithm: Any) -> list[Tensor]:
    model, optimizer, replica = make(net, algorithm)
    for number in range(6):
        if number == 3:
            model[0].requires_grad_(False)
        step(net, number, optimizer, replica, model)
    replica.finish()
    return values(model)


def meet_before_the_step(net: Any, algorithm: Any) -> list[Tensor]:
    """Between the backward pass and the step; a layer in the midst is not used."""
    model = nn.Sequential(nn.Linear(4, 20), nn.Linear(9, 9), nn.Linear(20, 4))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    replica = Replica(net, model, [optimizer], algorithm())
    replica.synchronize()
    for number in range(4):
        draw = torch.Generator().manual_seed(100 * number + net.rank)
        optimizer.zero_grad()
        model[2](model[0](torch.randn(8, 4, generator=draw))).pow(2).mean().backward()
        replica.settle()
        replica.before_update(optimizer)
        optimizer.step()
        replica.after_update(optimizer)
    replica.finish()
    return values(model)


def train_in_each_way(net: Any, spec: str) -> list[Tensor]:
    algorithm, found = partial(make_algorithm, spec), []
    for train in (train_with, freeze_with, meet_before_the_step):
        found += train(net.sub(train.__name__), algorithm)
    return found


@pytest.mark.parametrize(
    ("spec", "in_pieces"),
    [
        ("allreduce", "allreduce:overlap=true:num_buckets=3"),
        ("sgp:node_size=2", "sgp:node_size=2:num_buckets=3"),
        ("wagma:node_size=2", "wagma:node_size=2:num_buckets=3"),
    ],
)
def test_gradients_that_leave_during_the_backward_pass_are_the_same(
    spec: str, in_pieces: str
) -> None:
    """Also where a layer is frozen later, or all ranks meet before a step."""
    plain = SimulatedWorld(2).run(train_in_each_way, spec)
    for run in (SimulatedWorld(2, latency_s=1e-3).run, partial(ProcessWorld().run, 2)):
        assert_same([*plain, *run(train_in_each_way, in_pieces)])


def change_early(net: Any, what: str, spec: str) -> None:
    algorithm = partial(make_algorithm, spec)
    model, optimizer, replica = make(net, algorithm)
    if what == "check_finite":
        Replica(net.sub("checked"), model, [optimizer], algorithm(), check_finite=True)
    model(torch.ones(8, 4)).sum().backward()
    if what == "a second backward pass":
        model(torch.ones(8, 4)).sum().backward()
    if what == "a gradient that is kept":
        replica.before_update(optimizer)
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(8, 4)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    replica.before_update(optimizer)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("check_finite", "got it with overlap=True"),
        ("a second backward pass", r"got a second one for parameter '1\.(weight|bias)'"),
        ("a gradient that is kept", r"call optimizer.zero_grad\(set_to_none=True\)"),
        ("clipping", "a gradient of parameter '1.(weight|bias)' that was changed since"),
    ],
)
def test_gradients_that_have_left_must_not_change(what: str, message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        SimulatedWorld(2).run(change_early, what, "allreduce:overlap=true")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("check_finite", "got it with num_buckets"),
        ("a second backward pass", "num_buckets needs one.*; set num_buckets=None"),
        ("a gradient that is kept", "num_buckets needs.*, or set num_buckets=None"),
        ("clipping", "num_buckets sends a gradient.*, or set num_buckets=None"),
    ],
)
def test_what_must_not_change_is_told_by_the_option_that_is_set(what: str, message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        SimulatedWorld(2).run(change_early, what, "sgp:node_size=2:num_buckets=2")


Saved = tuple[list[dict[str, Any]], list[list[str]], list[Tensor], list[Tensor]]


def save_and_go_on(net: Any) -> Saved:
    """What is saved, with its names and the weights, and what another step makes of these."""
    model, optimizer, replica = make(net, OkTopk)
    for number in range(4):
        step(net, number, optimizer, replica, model)
    replica.settle()
    saved = copy.deepcopy(replica.state_dict()), replica.names(), values(model)
    step(net, 4, optimizer, replica, model)
    return *saved, values(model)


def resume(net: Any, saved: list[Saved], *, unfreeze: bool) -> list[Tensor]:
    """What was unfrozen when it was saved is frozen until the first step, as finetuning does."""
    states, names, weights, _ = saved[net.rank]
    model, optimizer, replica = make(net, OkTopk)
    model[0].requires_grad_(False)
    replica = Replica(net.sub("resumed"), model, [optimizer], OkTopk())
    with torch.no_grad():
        for p, value in zip(model.parameters(), weights, strict=True):
            p.copy_(value)
    replica.load_state_dict(states, names)
    if unfreeze:
        model[0].requires_grad_(True)
    step(net, 4, optimizer, replica, model)
    return values(model)


def test_a_resume_waits_until_what_was_trained_is_unfrozen_or_is_refused() -> None:
    saved = SimulatedWorld(2).run(save_and_go_on)
    resumed = SimulatedWorld(2).run(lambda net: resume(net, saved, unfreeze=True))
    for ours, (*_, uninterrupted) in zip(resumed, saved, strict=True):
        assert_same([ours, uninterrupted])
    text = r"must be those of the checkpoint, got none not in it, and not 0\.bias, 0\.weight, "
    with pytest.raises(RankFailed, match=text):
        SimulatedWorld(2).run(lambda net: resume(net, saved, unfreeze=False))


def overflow(net: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaled = Conditions(skips_overflow=True)
    replica = Replica(net, model, [optimizer], AllReduce(), scaled, check_finite=True)
    model(torch.full((1, 2), torch.inf)).sum().backward()
    replica.before_update(optimizer)  # the loss scaler skips the step
    replica.after_update(optimizer)


def test_check_finite_lets_a_scaled_loss_overflow() -> None:
    SimulatedWorld(2).run(overflow)


def begin_apart(net: Any) -> dict[str, Tensor]:
    """Every rank has made weights, buffers and frozen parameters of its own."""
    torch.manual_seed(net.rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3).requires_grad_(False))
    model[1].running_mean.normal_()
    model[1].num_batches_tracked.fill_(net.rank + 5)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    replica = Replica(net, model, [optimizer], LocalSGD())
    replica.synchronize()
    replica.stop()
    begun = {name: value.clone() for name, value in model.state_dict().items()}
    return own if net.rank == 0 else begun


def test_training_begins_with_all_that_rank_0_has() -> None:
    first, *others = SimulatedWorld(3).run(begin_apart)
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(other[name], value) for name, value in first.items())


class Halves(nn.Module):
    """All in bfloat16, or one layer of two."""

    def __init__(self, first: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(4, 40, dtype=first)
        self.last = nn.Linear(40, 4, dtype=torch.bfloat16)
        self.unused = nn.Parameter(torch.ones(40, dtype=first))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.to(self.first.weight.dtype)).bfloat16()).float()


def build_halves(net: Any, first: torch.dtype = torch.bfloat16) -> tuple[nn.Module, Any, Replica]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Halves(first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    algorithm = LocalSGD(sync_period=4, num_fragments=2, scale_steps=True)
    return model, optimizer, Replica(net, model, [optimizer], algorithm)


def save_while_evaluated(net: Any, is_resumed: bool) -> tuple[list[Tensor], dict[str, float]]:
    """All meet within a period; the state is saved while the consensus is shown."""
    model, optimizer, replica = build_halves(net.sub("first"))
    replica.synchronize()
    for number in range(12):
        if number == 6:
            replica.show_consensus()
            saved = copy.deepcopy(
                (
                    replica.own({"state_dict": model.state_dict()})["state_dict"],
                    optimizer.state_dict(),
                    (replica.state_dict(), replica.names(), replica.updates()),
                )
            )
            if is_resumed:
                replica.stop()
                model, optimizer, replica = build_halves(net.sub("again"))
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                replica.load_state_dict(*saved[2])
            else:
                replica.show_own()
        net.compute(1.0)
        step(net, number, optimizer, replica, model)
    replica.show_consensus()
    replica.show_own()
    figures = replica.metrics()
    found = values(model)
    replica.finish()
    return [*found, *values(model)], figures


def test_a_replica_goes_on_as_it_was_saved_while_it_was_evaluated() -> None:
    """With steps that are scaled, weights in half precision, and local steps in between."""
    straight, resumed = (
        SimulatedWorld(2).run(save_while_evaluated, is_resumed) for is_resumed in (False, True)
    )
    for (xs, figures), (ys, others) in zip(straight, resumed, strict=True):
        assert all(map(torch.equal, xs, ys))
        assert figures == others
        assert figures["step_scale"] > 1.0


def look_at_parts(net: Any) -> None:
    model, _, replica = build_halves(net, torch.float32)
    model(torch.ones(2, 4)).sum().backward()
    stepped = [p for p in model.parameters() if p.grad is not None]
    for part in replica.parts:
        [(spans, share)] = part.decays()
        assert share == pytest.approx(0.001)
        assert spans == part.weights.spans(stepped)
    states, names = replica.state_dict(), replica.names()
    for number, state in enumerate(states):
        state["steps_since_sync"] = number + 1
    replica.load_state_dict(states, names)
    assert [state["steps_since_sync"] for state in replica.state_dict()] == [1, 2]
    assert replica.carry_over(states, names, 2)
    assert not replica.carry_over(states, [["another"], ["one"]], 2)
    by_samples = [state | {"is_by_samples": True} for state in states]
    with pytest.raises(ValueError, match=r'got weigh_by="ranks" for "samples"'):
        replica.load_state_dict(by_samples, names)
    replica.stop()


def test_what_a_part_knows_of_its_optimizer_and_of_what_was_saved() -> None:
    SimulatedWorld(1).run(look_at_parts)


def make_unlike(net: Any, what: str) -> None:
    model: nn.Module = nn.Linear(3, 4 if what == "shape" and net.rank == 2 else 3)
    kind = torch.optim.Adam if what == "optimizer" and net.rank == 2 else torch.optim.AdamW
    Replica(net, model, [kind(model.parameters())], LocalSGD())


@pytest.mark.parametrize("what", ["shape", "optimizer"])
def test_a_model_that_differs_on_the_last_rank_is_refused(what: str) -> None:
    with pytest.raises(RankFailed, match=r"the model must be the same on all ranks"):
        SimulatedWorld(3).run(make_unlike, what)


def compare_tensors(net: Any) -> tuple[list[int], float]:
    turned = [1, 2, 3] if net.rank else [2, 1, 3]  # the same words, in another order
    tensors = [torch.tensor(turned), torch.arange(5), torch.full((7,), 1.0 + (net.rank == 2))]
    found = [id(each) for each in alike.differing(net, tensors)]
    mine, mean = torch.tensor([3.0 * net.rank, 4.0]), torch.tensor([3.0, 4.0])
    far = alike.distance(net, [(mine, mine)], [(mine, mean)])
    return [place for place, each in enumerate(tensors) if id(each) in found], far


def test_what_differs_is_found_and_a_distance_is_relative() -> None:
    for places, far in SimulatedWorld(3).run(compare_tensors):
        assert places == [0, 2]
        assert far == pytest.approx((2 / 3 * 9) ** 0.5 / 5)


def test_only_what_lies_within_a_flat_tensor_has_a_counterpart() -> None:
    storage = torch.arange(10.0)
    live, other = storage[2:6], torch.full((4,), 7.0)
    within = alike.counterpart(storage[3:5], [(live, other)])
    assert within is not None
    assert within.tolist() == [7.0, 7.0]
    assert alike.counterpart(storage[5:7], [(live, other)]) is None
    assert alike.counterpart(storage[1:3], [(live, other)]) is None


KINDS = {
    "mean": [torch.float64, torch.float32, torch.bfloat16, torch.complex64],
    "rank 0's": [torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool],
}


def average_kinds(net: Any, floats: bool) -> dict[torch.dtype, Tensor]:
    tensors = {
        dtype: torch.tensor([[net.rank, 1]]).to(dtype) * (1j if dtype.is_complex else 1)
        if dtype.itemsize > 1
        else torch.tensor([[net.rank, 1]]).to(dtype)
        for dtypes in KINDS.values()
        for dtype in dtypes
    }
    means = alike.average(net, [*tensors.values()], floats=floats)
    return dict(zip(tensors, means, strict=True))


@pytest.mark.parametrize("floats", [True, False])
def test_buffers_of_every_dtype_are_averaged_or_taken_from_rank_0(floats: bool) -> None:
    for found in SimulatedWorld(3).run(average_kinds, floats):
        for kind, dtypes in KINDS.items():
            first = 1 if floats and kind == "mean" else 0
            for dtype in dtypes:
                value = torch.tensor([[first, 1]]).to(dtype)
                expected = value * 1j if dtype.is_complex else value
                assert torch.equal(found[dtype].view(torch.uint8), expected.view(torch.uint8))


class Holder(nn.Module):
    """Trains one layer; holds others that no optimizer does, of all kinds."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        halves = torch.zeros(16, dtype=torch.bfloat16)
        self.sliced = nn.Parameter(halves[1:9], requires_grad=False)  # begins between two words
        query, key = torch.zeros(12).chunk(2)
        self.query = nn.Parameter(query, requires_grad=False)
        self.key = nn.Parameter(key + 0, requires_grad=False)
        self.key.data = key  # both in one storage
        table = torch.arange(12.0).view(3, 4)
        cos, sin = table.chunk(2, 1)  # views that are not contiguous
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        self.complex = nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False)


def hold(net: Any, algorithm: Any) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Holder(net.rank)
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    replica = Replica(net, model, [optimizer], algorithm())
    replica.synchronize()
    model.key.data += net.rank  # as a step might
    model.complex.data += 1j * net.rank
    step(net, 0, optimizer, replica, model.layer)
    saved = replica.consensus({"state_dict": model.state_dict()})["state_dict"]
    saved = {name: value.clone() for name, value in saved.items()}
    replica.finish()
    replica.stop()
    assert torch.equal(saved["key"], model.key)
    return saved


@pytest.mark.parametrize("algorithm", [WAGMA, AllReduce])
def test_untrained_parameters_of_all_kinds_are_saved_as_what_they_are(algorithm: Any) -> None:
    for saved in SimulatedWorld(3).run(hold, algorithm):
        assert torch.equal(saved["sliced"], torch.zeros(8, dtype=torch.bfloat16))
        assert torch.equal(saved["query"], torch.zeros(6))
        assert torch.equal(saved["key"], torch.ones(6))
        assert torch.equal(saved["complex"], torch.full((3,), 1 + 1j))
        table = torch.arange(12.0).view(3, 4)
        assert torch.equal(saved["cos"], table[:, :2])
        assert torch.equal(saved["sin"], table[:, 2:])


def unfreeze_what_differs(net: Any, algorithm: Any) -> list[Tensor]:
    model, optimizer, replica = make(net, algorithm)
    model[1].requires_grad_(False)
    step(net, 0, optimizer, replica, model)
    with torch.no_grad():
        model[1].weight += net.rank  # as a step might, while no optimizer trains it
    model[1].requires_grad_(True)
    for number in range(1, 3):
        step(net, number, optimizer, replica, model)
    replica.finish()
    replica.stop()
    return values(model)


@pytest.mark.parametrize(
    "algorithm", [AllReduce, OkTopk, lambda: HPSGD(outer_lr=0.7, outer_momentum=0.9)]
)
def test_what_differed_begins_alike_where_it_is_trained_from_then_on(algorithm: Any) -> None:
    ranks = SimulatedWorld(3).run(unfreeze_what_differs, algorithm)
    assert_same(ranks)
    assert 0.5 < float(ranks[0][2].mean()) < 1.5  # the mean of what was added, and not rank 0's
