"""Batches of different sizes on the ranks, against one process on all of them."""

from __future__ import annotations

import os
import signal
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dsgd import FabricStrategy
from lightning_dsgd.algorithm import Conditions
from lightning_dsgd.algorithms import ALGORITHMS, make_algorithm
from lightning_dsgd.algorithms.eager_sgd import EagerSGD
from lightning_dsgd.data.unequal import BatchSizesSampler, Samples
from lightning_dsgd.simulated import SimulatedWorld
from tests.support.faces import FACES, Loop
from tests.support.fits import Plain
from tests.support.fits import strategy as make_strategy
from tests.support.models import trainer, weights
from tests.support.rank import Rank
from tests.support.worlds import FitWorld

N, P = 260, 3


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def size_of(rank: int, step: int) -> int:
    """Another one on each rank, and in each step."""
    return 2 + 3 * rank + (step * (rank + 1)) % 4


# ---- in the simulated world ----
def apply_all(net: Any, spec: str, slow: bool) -> tuple[Tensor, Tensor]:
    """What a rank's optimizer applies, and what it has not sent.

    The last rank makes half as many steps; or, if some are slow, all make as many.
    """
    samples = torch.zeros(1, dtype=torch.int64)
    algorithm, counts = make_algorithm(spec), torch.ones(1, dtype=torch.int64)
    given = counts if algorithm.traits.counts_gradients else None
    conditions = Conditions(samples=samples, gradient_counts=given)
    rank = Rank(net, algorithm, torch.zeros(N).double(), conditions)
    for step in range(4 if net.rank == P - 1 and not slow else 8):
        if step == 3 and not slow:
            rank.settle()
            rank.resume(make_algorithm(spec))
        samples.fill_(size_of(net.rank, 0 if slow else step))
        counts.fill_(1)
        seconds = 1.0 + 2.0 * (slow and step > 0 and (step + net.rank) % 3 == 0)
        rank.descend(draw(10 * step + net.rank, N), seconds=seconds)
    rank.settle()
    held_back = rank.algorithm.held_back()
    if isinstance(rank.algorithm, EagerSGD):
        held_back = rank.algorithm.unapplied / P
    pending = getattr(rank.algorithm, "pending", torch.zeros(N)).clone()
    rank.finish()
    return -rank.x if held_back is None else held_back - rank.x, pending


GRADIENTS = (
    *("", "wire_dtype=bfloat16", "overlap=true", "overlap=true:wire_dtype=int8", "delay=1"),
    *("oktopk:density=0.1", "topk_allgather", "gtopk:density=0.2", "oktopk:warmup_steps=3"),
    *("eager_sgd", "eager_sgd:quorum=solo:grace_s=0.1"),
)


@pytest.mark.parametrize("spec", GRADIENTS)
def test_each_sample_counts_alike_in_the_mean_of_gradients(spec: str) -> None:
    slow, goal = spec.startswith("eager"), torch.zeros(N).double()
    for step in range(8):
        ranks = range(P if slow or step < 4 else P - 1)
        sizes = [size_of(rank, 0 if slow else step) for rank in ranks]
        for rank, size in zip(ranks, sizes, strict=True):
            goal += size / sum(sizes) * draw(10 * step + rank, N)
    whole = spec if spec.partition(":")[0] in ALGORITHMS else f"allreduce:{spec}".rstrip(":")
    applied, pending = zip(*SimulatedWorld(P).run(apply_all, whole, slow), strict=True)
    rest = sum(pending) / sum(size_of(rank, 0) for rank in range(P))
    for each in applied:
        torch.testing.assert_close(each + rest, goal, rtol=0, atol=1e-6)


def learn_apart(net: Any, spec: str, claims: bool) -> Tensor:
    """The weights at the end of 10 steps; training goes on from a checkpoint after 5."""
    samples = torch.zeros(1, dtype=torch.int64)
    conditions = Conditions(samples=samples, claims_batches=claims)
    rank = Rank(net, make_algorithm(spec), torch.zeros(N).double(), conditions)
    for step in range(10):
        if step == 5:
            rank.settle()
            rank.resume(make_algorithm(spec))
        samples.fill_(size_of(net.rank, step))
        rank.step(draw(10 * step + net.rank, N), seconds=1.0)
    consensus = rank.algorithm.consensus(rank.settle())
    is_whole = "oktopk" in spec or torch.equal(consensus, rank.finish())  # else without residuals
    assert is_whole
    return rank.x if "oktopk" not in spec else rank.finish()


def mean_since(begin: int, end: int) -> Tensor:
    """The mean of what the ranks learn in these steps, by their samples in them."""
    sizes = [sum(size_of(rank, step) for step in range(begin, end)) for rank in range(P)]
    learnt = [[draw(10 * step + r, N) for step in range(begin, end)] for r in range(P)]
    each = [
        size / sum(sizes) * torch.stack(own).sum(0) for size, own in zip(sizes, learnt, strict=True)
    ]
    return torch.stack(each).sum(0)


@pytest.mark.parametrize("claims", [False, True])
@pytest.mark.parametrize(
    "spec",
    [
        "local_sgd:sync_period=4",
        "local_sgd:sync_period=4:num_fragments=2",
        "local_sgd:sync_period=4:overlap_steps=2:wire_dtype=bfloat16",
        "diloco:sync_period=4:outer_lr=1.0:outer_momentum=0.0:wire_dtype=int8",
        "oktopk:local_steps=4:density=0.2",
        "hpsgd:max_local_steps=1",
        "hpsgd:max_local_steps=1:wire_dtype=int8",
    ],
)
def test_a_mean_of_weights_is_by_the_samples_since_the_last_one(spec: str, claims: bool) -> None:
    goal = torch.zeros(N).double()
    fragments, period = 2 if "fragments" in spec else 1, 1 if "hpsgd" in spec else 4
    for fragment in range(fragments):
        first = period * (fragment + 1) // fragments
        bounds = sorted({0, *range(first, 11, period), 10})
        span = slice(N * fragment // fragments, N * (fragment + 1) // fragments)
        for begin, end in pairwise(bounds):
            goal[span] += mean_since(begin, end)[span]
    for x in SimulatedWorld(P).run(learn_apart, spec, claims):
        torch.testing.assert_close(x, goal, rtol=0, atol=1e-6)


# ---- in real processes ----
def batches_of(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Sizes differ between the ranks, and between a rank's batches."""
    x = [draw(100 * rank + step, size_of(rank, step), 10).float() for step in range(8)]
    return [(each, each.sum(1, keepdim=True)) for each in x]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("allreduce", {}),
    "overlap": ("allreduce:overlap=true", {}),
    "accumulates and clips": ("allreduce", {"accumulate": 2, "clip": 0.3}),
    "scaled": ("allreduce", {"accumulate": 2}),
    "sparse": ("topk_allgather:density=1.0", {"clip": 0.3}),
    "periodic": ("local_sgd:sync_period=1", {}),
}


def train_in_cases() -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {case: [] for case in CASES}
    for case, (spec, options) in CASES.items():
        for train in FACES.values():
            model = Plain(momentum=0.0)
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if case == "scaled" else None
            given = {"scaler": scaler, "options": {"weigh_by": "samples"}, "epochs": 2, **options}
            train(Loop(model, make_algorithm(spec), batches_of(dist.get_rank()), **given))
            found[case].append(weights(model))
    return found


def on_one_process(accumulate: int = 1, clip: float | None = None) -> Tensor:
    model = Plain(momentum=0.0)
    optimizer = model.configure_optimizers()
    ranks = [batches_of(rank) for rank in range(2)]
    for step in [*range(0, 8, accumulate)] * 2:
        parts = [own[k] for own in ranks for k in range(step, step + accumulate)]
        optimizer.zero_grad()
        model.loss(tuple(map(torch.cat, zip(*parts, strict=True)))).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return weights(model)


def test_ranks_learn_what_one_process_learns_from_all_their_batches_on_every_face() -> None:
    first, second = FitWorld().run(2, train_in_cases)
    for case, (_, options) in CASES.items():
        goal = on_one_process(**options)
        for found in first[case] + second[case]:
            atol = 2e-3 if case == "scaled" else 1e-5  # in half precision
            assert (found - goal).abs().max() < atol, case


def test_a_sampler_deals_every_sample_once_by_batch_sizes() -> None:
    sizes, numbers = (5, 1, 3), range(100)
    ranks = [BatchSizesSampler(numbers, sizes, rank, drop_last=True) for rank in range(3)]
    for epoch in range(2):
        for sampler in ranks:
            sampler.set_epoch(epoch)
        dealt = [[*sampler] for sampler in ranks]
        assert [*map(len, dealt)] == [*map(len, ranks)] == [55, 11, 33]
        assert len({*chain(*dealt)}) == 99
    whole = [[*BatchSizesSampler(numbers, sizes, rank)] for rank in range(3)]
    assert dealt != whole
    assert sorted(chain(*whole)) == [*numbers]
    with pytest.raises(ValueError, match=r"batch size of at least 1 for each rank, got sizes=\[5"):
        BatchSizesSampler(numbers, sizes, 3)


# ---- what is refused ----
def test_a_step_must_have_a_known_number_of_samples() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    samples = Samples(lambda: [optimizer])
    for batch, found in (
        ({"a": torch.ones(3), "b": [torch.ones(4)]}, r"tensors have \[3, 4\] samples"),
        ("text", "tensors have no samples"),
        (torch.ones(0), r"tensors have \[0\] samples"),
    ):
        samples.begin(batch)
        with pytest.raises(ValueError, match=rf"how many samples a step has, got a batch.*{found}"):
            samples.before_update(optimizer)
    samples.count(7)
    samples.before_update(optimizer)
    assert int(samples.newest) == 7
    with pytest.raises(ValueError, match=r"whole number of at least 1, got count\(0\)"):
        samples.count(0)


def test_where_ranks_never_average_at_one_point_the_option_is_refused() -> None:
    for name in ("adpsgd", "dpsgd", "no_sync", "popsgd", "sgp", "wagma"):
        for face in (make_strategy, lambda name, **o: FabricStrategy(make_algorithm(name), **o)):
            with pytest.raises(ValueError, match=f'weigh_by="samples" with strategy="{name}"; use'):
                face(name, weigh_by="samples")


# ---- where ranks come and go ----
SAMPLES = draw(0, 70, 10).float()
"""Of an epoch: a step of all ranks has 10 of them."""


class Constant(Plain):
    """A batch says nothing of its size; rank 1 dies in its second step of epoch 1."""

    def __init__(self) -> None:
        super().__init__(momentum=0.0)
        self.read: list[list[int]] = []
        self.after_an_epoch = torch.zeros(0)

    def train_dataloader(self) -> DataLoader[Any]:
        share = self.trainer.strategy.distributed_sampler_kwargs  # among the ranks that are there
        data = TensorDataset(torch.arange(70), SAMPLES)
        sampler = BatchSizesSampler.of_step(data, 10, share["num_replicas"], share["rank"])
        return DataLoader(data, sampler.batch_size, sampler=sampler, collate_fn=iter)

    def on_train_epoch_start(self) -> None:
        self.read.append([])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if (self.global_rank, self.current_epoch, batch_idx) == (1, 1, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        numbers, x = map(torch.stack, zip(*batch, strict=True))
        self.trainer.strategy.count(len(x))
        self.read[-1] += numbers.tolist()
        return self.loss((x, x.sum(1, keepdim=True)))

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.after_an_epoch = weights(self)


def fit_constant() -> tuple[list[list[int]], Tensor]:
    survives = {"weigh_by": "samples", "on_loss": "continue", "heartbeat_timeout_s": 20.0}
    fit = trainer(make_strategy("allreduce", **survives), 3, max_epochs=4)
    fit.fit(model := Constant())
    assert fit.global_step == 7 * 4  # as many as before
    return model.read, model.after_an_epoch


def on_steps_of_all_ranks() -> Tensor:
    """An epoch of one process: in each step 3 samples of rank 0, 3 of rank 1 and 4 of rank 2."""
    dealt = [[*BatchSizesSampler.of_step(range(70), 10, 3, rank)] for rank in range(3)]
    model = Plain(momentum=0.0)
    optimizer = model.configure_optimizers()
    for step in range(7):
        numbers = [n for own in dealt for n in own[step * len(own) // 7 :][: len(own) // 7]]
        x = SAMPLES[numbers]
        optimizer.zero_grad()
        model.loss((x, x.sum(1, keepdim=True))).backward()
        optimizer.step()
    return weights(model)


def test_a_step_of_all_ranks_is_one_of_one_process_and_as_large_after_a_loss() -> None:
    first, _, last = (outcome.result for outcome in FitWorld().outcomes(3, fit_constant))
    assert [*map(len, first[0])] == [21, 21, 35, 35]
    assert [*map(len, last[0])] == [28, 28, 35, 35]
    for mine, theirs in zip(first[0][2:], last[0][2:], strict=True):
        assert sorted(mine + theirs) == [*range(70)]
    for _, x in (first, last):
        torch.testing.assert_close(x, on_steps_of_all_ranks(), rtol=0, atol=1e-5)
