"""What holds of a loop in plain PyTorch: real processes, set up as torchrun sets them up.

Functions that run on every rank come before the tests that run them, and return what each rank saw.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dsgd as dsgd
from lightning_dsgd import DecentralizedStrategy, PeerLost, decentralized
from lightning_dsgd.plain import launch
from lightning_dsgd.transport.frames import HEADER
from tests.support.models import Regression, trainer, weights
from tests.support.ports import free_port
from tests.support.worlds import FitWorld, StartWorld
from tests.test_frozen import ALGORITHMS

exhaustive = pytest.mark.exhaustive


def run(world_size: int, fn: Any, *args: Any) -> list[Any]:
    return FitWorld().run(world_size, fn, *args)


def errors(world_size: int, fn: Any, *args: Any) -> list[str]:
    return [outcome.error for outcome in FitWorld().outcomes(world_size, fn, *args)]


def make(momentum: float = 0.9) -> tuple[Regression, torch.optim.Optimizer]:
    L.seed_everything(0, verbose=False)
    model = Regression()
    return model, torch.optim.SGD(model.parameters(), 0.05, momentum=momentum)


def loader_of(rank: int, num_batches: int = 12) -> DataLoader[Any]:
    """This rank's own data, in its order."""
    x = torch.randn(num_batches * 8, 10, generator=torch.Generator().manual_seed(rank))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8)


def replica_of(model: nn.Module, optimizers: Any, algorithm: Any, **options: Any) -> decentralized:
    """What hangs fails soon, saying who waits for whom."""
    return decentralized(model, optimizers, algorithm, **{"timeout_s": 20.0, **options})


def train_beside_one_that_announces_much() -> str:
    """Rank 1, which has proved who it is, says that a message of 5 GiB follows."""
    model, optimizer = make()
    try:
        with replica_of(model, optimizer, dsgd.LocalSGD()) as replica:
            if replica.rank == 1:
                connection = replica._session.net.mesh.connections.to(0)
                connection.sock.sendall(HEADER.pack(1, 2, 5 << 30, 0, 0))
            replica.barrier()
    except PeerLost as lost:
        return str(lost)
    return ""


def test_a_message_that_is_longer_than_training_needs_is_not_taken() -> None:
    for reason in run(2, train_beside_one_that_announces_much):
        assert reason.startswith("rank 1 sent what is no message here: ")
        assert f"{5 << 30} bytes (known are" in reason
        assert f"{1 << 30} bytes at most)" in reason


def steps(model: Regression, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    for batch in batches:
        optimizer.zero_grad()
        model.loss(batch).backward()
        optimizer.step()


def same(tensors: list[Tensor]) -> bool:
    return all(torch.equal(tensor, tensors[0]) for tensor in tensors)


def train(
    algorithm: Any, num_batches: int = 12, epochs: int = 1, momentum: float = 0.9
) -> tuple[Regression, dict[str, float]]:
    """On this rank, as the page says."""
    model, optimizer = make(momentum)
    with replica_of(model, optimizer, algorithm) as replica:
        for _ in range(epochs):
            steps(model, optimizer, replica.batches(loader_of(replica.rank, num_batches)))
        metrics = replica.metrics()
    return model, metrics


# ---- the same as the Trainer ----


def train_with_both(name: str) -> tuple[Tensor, Tensor]:
    make_algorithm = ALGORITHMS[name]
    model, _ = make()
    strategy = DecentralizedStrategy(make_algorithm(), timeout_s=20.0)
    fit = trainer(strategy, 3, max_epochs=2, use_distributed_sampler=False)
    fit.fit(model, loader_of(dist.get_rank()))
    return weights(model), weights(train(make_algorithm(), epochs=2)[0])


TIMELESS = [name for name in ALGORITHMS if not name.startswith("hpsgd")]
FAST = ("allreduce", "local_sgd")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else exhaustive) for n in TIMELESS]
)
def test_the_weights_are_those_of_the_trainer_to_the_bit(name: str) -> None:
    ranks = run(3, train_with_both, name)
    assert same([x for both in ranks for x in both])


# ---- no Lightning ----


@pytest.mark.exhaustive
def test_a_process_alone_trains_with_a_warning_and_without_lightning(tmp_path: Path) -> None:
    script = f"""
import sys, torch, lightning_dsgd as dsgd
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with dsgd.decentralized(model, optimizer, dsgd.WAGMA()) as replica:
    for x in replica.batches(torch.randn(20, 8, 4)):
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
        optimizer.step()
    replica.save({str(tmp_path / "saved.pt")!r}, epoch=1)
    with replica.consensus():
        print(replica.rank, replica.world_size, replica.mean(2.0), replica.mean({{"a": 1}}))
print([name for name in sys.modules if "lightning" in name and "lightning_dsgd" not in name])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=True
    )
    assert done.stdout == "0 1 2.0 {'a': 1.0}\n[]\n"
    assert 'got one rank with strategy="wagma": it trains alone' in done.stderr


# ---- batches, evaluation, figures ----


def train_unevenly(name: str) -> tuple[Tensor, Tensor, float, dict[str, float], int]:
    model, optimizer = make()
    algorithm = {"wagma": dsgd.WAGMA(group_size=2), "allreduce": dsgd.AllReduce()}[name]
    with replica_of(model, optimizer, algorithm) as replica:
        loader = loader_of(replica.rank, 6 + 5 * replica.rank)
        batches = replica.batches(loader)
        for _ in range(2):
            steps(model, optimizer, batches)
            replica.barrier()  # until then it serves the others, which changes its weights
            own = weights(model)
            with replica.consensus():
                consensus, mean = weights(model), replica.mean(float(replica.rank))
                assert same([torch.ones(3), replica.mean(torch.ones(3))])
            assert torch.equal(weights(model), own)
        return weights(model), consensus, mean, replica.metrics(), len(batches)


@pytest.mark.parametrize("name", ["wagma", pytest.param("allreduce", marks=exhaustive)])
def test_ranks_with_uneven_batches_evaluate_the_consensus(name: str) -> None:
    ranks = run(4, train_unevenly, name)
    assert same([consensus for _, consensus, *_ in ranks])
    for rank, (_, _, mean, metrics, num_batches) in enumerate(ranks):
        assert mean == 1.5
        assert num_batches == 6 + 5 * rank
        assert metrics["bytes_sent"] > 0
        assert metrics["consensus_distance"] >= 0


@exhaustive
def test_the_consensus_is_in_the_model_at_the_end() -> None:
    ranks = run(3, train_alone, "local_sgd")
    assert same([x for x, _ in ranks])
    assert all(first > 2 * last for _, (first, last) in ranks)


def train_alone(name: str) -> tuple[Tensor, tuple[float, float]]:
    batch = next(iter(loader_of(7)))
    model, _ = make()
    first = model.loss(batch).item()
    model, _ = train(ALGORITHMS[name](), epochs=10)
    return weights(model), (first, model.loss(batch).item())


def meet_differently() -> None:
    model, optimizer = make()
    with replica_of(model, optimizer, dsgd.LocalSGD()) as replica:
        if replica.rank == 0:
            replica.barrier()
        else:
            replica.mean(1.0)


def test_ranks_that_meet_for_different_things_are_told() -> None:
    for error in errors(2, meet_differently):
        assert "must be the same on all ranks, got barrier on rank 0, mean on rank 1" in error


# ---- gradients ----


def mean_batch(index: int, ranks: int = 2) -> tuple[Tensor, Tensor]:
    """What all ranks have in this batch."""
    all_x, all_y = zip(*(list(loader_of(rank))[index] for rank in range(ranks)), strict=True)
    return torch.cat(all_x), torch.cat(all_y)


class Plain(Regression):
    """Without BatchNorm: a mean over ranks is a mean over their samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))


def make_plain() -> tuple[Plain, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Plain()
    return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def accumulate_and_clip(is_clipped: bool) -> Tensor:
    model, optimizer = make_plain()
    with replica_of(model, optimizer, dsgd.AllReduce()) as replica:
        for index, batch in enumerate(loader_of(replica.rank), 1):
            (model.loss(batch) / 2).backward()
            if index % 2 == 0:
                if is_clipped:
                    replica.reduce_gradients(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
    return weights(model)


def on_one_process(is_clipped: bool) -> Tensor:
    model, optimizer = make_plain()
    for index in range(0, 12, 2):
        for i in (index, index + 1):
            (model.loss(mean_batch(i)) / 2).backward()
        if is_clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("is_clipped", [True, pytest.param(False, marks=exhaustive)])
def test_an_optimizer_step_is_a_step_and_clipping_sees_the_reduced_gradient(
    is_clipped: bool,
) -> None:
    ranks = run(2, accumulate_and_clip, is_clipped)
    assert same(ranks)
    torch.testing.assert_close(ranks[0], on_one_process(is_clipped))
    assert not torch.allclose(ranks[0], on_one_process(not is_clipped), atol=1e-3)


class Twice(torch.optim.SGD):
    """Fires both of torch's hooks twice in a step."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


class Unlucky(torch.optim.SGD):
    """Raises in its third step."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.num_steps += 1
        output = super().step(closure)
        if self.num_steps == 3:
            raise ArithmeticError
        return output


def step_in_many_ways(kind: str) -> tuple[Tensor, dict[str, float]]:
    model, optimizer = make_plain()
    optimizer = {"twice": Twice, "unlucky": Unlucky}.get(kind, torch.optim.SGD)(
        model.parameters(), 0.05, momentum=0.9
    )
    run_model = torch.compile(model.net, backend="eager") if kind == "compiled" else model.net
    step = optimizer.step
    if kind == "compiled step":
        step = torch.compile(optimizer.step, backend="eager")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    with replica_of(model, optimizer, dsgd.AllReduce()) as replica:
        for x, y in loader_of(replica.rank):

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = (run_model(x) - y).pow(2).mean()
                loss.backward()
                return loss

            with contextlib.suppress(ArithmeticError):
                if kind == "closure":
                    optimizer.step(closure)
                elif kind == "closure by name":
                    optimizer.step(closure=closure)
                else:
                    closure()
                    step()
            schedule.step()
        return weights(model), replica.metrics()


KINDS = [
    ("closure", "closure by name", "twice", "unlucky"),
    pytest.param(("compiled", "compiled step"), marks=exhaustive),
]


def step_in_ways(kinds: tuple[str, ...]) -> dict[str, tuple[Tensor, dict[str, float]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile's, and the scheduler's of no step
        return {kind: step_in_many_ways(kind) for kind in ("plain", *kinds)}


@pytest.mark.parametrize("kinds", KINDS)
def test_closures_subclasses_and_what_is_compiled_step_as_others_do(kinds: Any) -> None:
    first, second = run(2, step_in_ways, kinds)
    for kind in kinds:
        assert same([first["plain"][0], first[kind][0], second[kind][0]]), kind
        assert first[kind][1]["bytes_sent"] == first["plain"][1]["bytes_sent"], kind


def scale_with_an_overflow(name: str) -> tuple[list[float], Tensor]:
    model, optimizer = make_plain()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    algorithm: Any = {"allreduce": dsgd.AllReduce(), "local_sgd": dsgd.LocalSGD(4)}[name]
    scales = []
    with replica_of(model, optimizer, algorithm, scaler=scaler) as replica:
        for index, batch in enumerate(loader_of(replica.rank)):
            optimizer.zero_grad()
            loss = model.loss(batch)
            bad = replica.rank == 1 and index == 2
            scaler.scale(loss * torch.inf if bad else loss).backward()
            if index % 2:
                replica.reduce_gradients()
                nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    assert scaler.step.__func__ is torch.amp.GradScaler.step  # given back
    return scales, weights(model)


@pytest.mark.parametrize("name", ["allreduce", pytest.param("local_sgd", marks=exhaustive)])
def test_an_overflow_is_skipped_together_where_gradients_are_exchanged(name: str) -> None:
    (mine, x), (theirs, their_x) = run(2, scale_with_an_overflow, name)
    assert theirs == [256.0] * 2 + [128.0] * 10
    assert mine == (theirs if name == "allreduce" else [256.0] * 12)
    assert x.isfinite().all()
    assert torch.equal(x, their_x)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, fused=True)


def step_scaled(replica: decentralized, model: Regression, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model.loss(mean_batch(0))).backward()
    scaler.step(optimizer)


def step_in_evaluation(replica: decentralized, model: Regression, optimizer: Any) -> None:
    with replica.consensus():
        steps(model, optimizer, [mean_batch(0)])


def load_late(replica: decentralized, model: Regression, optimizer: Any) -> None:
    steps(model, optimizer, [mean_batch(0)])
    replica.load("nowhere.pt")


def reduce_before_a_closure(replica: decentralized, model: Regression, optimizer: Any) -> None:
    replica.reduce_gradients()
    optimizer.step(lambda: model.loss(mean_batch(0)))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


REFUSED: list[tuple[Any, Any, Any, bool, str]] = [
    (step_scaled, dsgd.AllReduce(), torch.optim.LBFGS, False, "one gradient a step, got LBFGS"),
    (step_scaled, dsgd.AllReduce(), fused, True, "got a fused SGD; use fused=False"),
    (step_scaled, dsgd.LocalSGD(), fused, False, "got a fused SGD; use fused=False"),
    (step_scaled, dsgd.AllReduce(), sgd, False, "use decentralized(..., scaler=scaler)"),
    (step_in_evaluation, dsgd.LocalSGD(), sgd, False, "train outside of it"),
    (load_late, dsgd.LocalSGD(), sgd, False, "before the first step, got 1 steps"),
    (reduce_before_a_closure, dsgd.LocalSGD(), sgd, False, "must be reduced once a step"),
]


def refuse_all() -> list[str]:
    said = []
    for act, algorithm, make_optimizer, has_scaler, _ in REFUSED:
        model, _ = make_plain()
        optimizer = make_optimizer(model.parameters())
        scaler = torch.amp.GradScaler("cpu") if has_scaler else None
        try:
            with replica_of(model, optimizer, algorithm, scaler=scaler) as replica:
                act(replica, model, optimizer)
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    return said


def test_what_cannot_work_is_refused_with_the_way_out() -> None:
    for said in run(2, refuse_all):
        for text, (*_, expected) in zip(said, REFUSED, strict=True):
            assert expected in text


class Wrapper(torch.optim.Optimizer):
    """As some libraries have them: without what torch's __init__ makes."""

    def __init__(self) -> None:
        pass


def test_arguments_are_refused_before_anything_begins() -> None:
    model, optimizer = make_plain()
    with pytest.raises(ValueError, match='transport must be "auto" or "process_group" or "mpi"'):
        decentralized(model, optimizer, dsgd.LocalSGD(), transport="udp")
    with pytest.raises(ValueError, match=r'"nixl" is not supported; use transport="auto"'):
        decentralized(model, optimizer, dsgd.LocalSGD(), transport="nixl")
    with pytest.raises(ValueError, match="timeout_s must be positive"):
        decentralized(model, optimizer, dsgd.LocalSGD(), timeout_s=0)
    with pytest.raises(ValueError, match="sync_period"):
        decentralized(model, optimizer, dsgd.LocalSGD(sync_period=0))
    with pytest.raises(ValueError, match="got no optimizer"):
        decentralized(model, [], dsgd.LocalSGD())
    with pytest.raises(TypeError, match=r"got Wrapper; give the optimizer in it"):
        decentralized(model, Wrapper(), dsgd.LocalSGD())
    with pytest.raises(TypeError, match="must be one of lightning_dsgd, got 'wagma'"):
        decentralized(model, optimizer, "wagma")  # type: ignore[arg-type]


def lbfgs() -> Tensor:
    model, _ = make_plain()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=4)
    with replica_of(model, optimizer, dsgd.LocalSGD(2)) as replica:
        for batch in list(loader_of(replica.rank))[: 4 + replica.rank]:

            def closure(batch: Any = batch) -> Tensor:
                optimizer.zero_grad()
                loss = model.loss(batch)
                loss.backward()
                return loss

            optimizer.step(closure)
    return weights(model)


@exhaustive
def test_lbfgs_trains_where_weights_are_exchanged() -> None:
    ranks = run(2, lbfgs)
    assert same(ranks)
    assert ranks[0].isfinite().all()


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(10, 1), nn.Linear(10, 1)


def train_two_optimizers() -> tuple[Tensor, dict[str, float]]:
    model = Adversaries()
    first = torch.optim.SGD(model.a.parameters(), 0.05)
    second = torch.optim.Adam(model.b.parameters(), 0.05)
    with replica_of(model, [first, second], dsgd.DPSGD()) as replica:
        for index, (x, y) in enumerate(loader_of(replica.rank, 6 + 3 * replica.rank)):
            for optimizer, part in ((first, model.a), (second, model.b)):
                if optimizer is second and index % 2:
                    continue
                optimizer.zero_grad()
                (part(x) - y).pow(2).mean().backward()
                optimizer.step()
    return weights(model), replica.metrics() if replica.world_size == 1 else {}


@exhaustive
def test_several_optimizers_step_as_often_as_they_do() -> None:
    ranks = run(2, train_two_optimizers)
    assert same([x for x, _ in ranks])


# ---- checkpoints ----


class Noisy(Regression):
    """Draws random numbers in each batch."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * (0.9 + 0.2 * torch.rand(()))


def train_from(
    folder: str, first: int, last: int, algorithm: str, is_first: bool
) -> tuple[Tensor, dict[str, Any]]:
    """These epochs; saves after each."""
    torch.manual_seed(dist.get_rank())
    model = Noisy()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    with replica_of(model, optimizer, ALGORITHMS[algorithm]()) as replica:
        extras = {} if is_first else replica.load(f"{folder}/epoch_{first}.pt")
        for epoch in range(first, last):
            steps(model, optimizer, loader_of(replica.rank, 7))
            replica.save(
                f"{folder}/epoch_{epoch + 1}.pt", epoch=epoch + 1, own=[replica.rank, {"a": None}]
            )
    return weights(model), extras


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n == "diloco" else exhaustive)
        for n in ("local_sgd", "diloco", "sgp", "oktopk", "wagma, synchronous")
    ],
)
def test_a_resumed_training_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    straight = run(3, train_from, str(tmp_path), 0, 3, name, True)
    resumed = run(3, train_from, str(tmp_path), 1, 3, name, False)
    assert same([x for x, _ in straight + resumed])
    assert [extras for _, extras in resumed] == [
        {"epoch": 1, "own": [rank, {"a": None}]} for rank in range(3)
    ]
    saved = torch.load(tmp_path / "epoch_1.pt", weights_only=True)
    Regression().load_state_dict(saved["state_dict"])
    again = run(2, train_from, str(tmp_path), 1, 2, name, False)  # another number of ranks
    assert same([x for x, _ in again])
    assert {extras["own"][0] for _, extras in again} == {0}


def go_on_from_the_trainers(folder: str) -> tuple[Tensor, Tensor]:
    """Two epochs with the Trainer; one with it and one without."""
    path, algorithm = f"{folder}/trainers.ckpt", ALGORITHMS["diloco"]

    class Save(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(path)

    straight, _ = make()
    strategy = DecentralizedStrategy(algorithm(), timeout_s=20.0)
    run = trainer(strategy, 2, max_epochs=2, use_distributed_sampler=False, callbacks=[Save()])
    run.fit(straight, loader_of(dist.get_rank()))
    model, optimizer = make()
    with replica_of(model, optimizer, algorithm()) as replica:
        assert replica.load(path) == {}
        steps(model, optimizer, loader_of(replica.rank))
    return weights(straight), weights(model)


@exhaustive
def test_a_checkpoint_of_the_trainers_goes_on_to_the_bit(tmp_path: Path) -> None:
    assert same([x for both in run(2, go_on_from_the_trainers, str(tmp_path)) for x in both])


def load_with_two_optimizers(folder: str) -> None:
    model, _ = make()
    parts = list(model.net.parameters())
    two = [torch.optim.SGD(parts[:2], 0.1), torch.optim.SGD(parts[2:], 0.1)]
    with replica_of(model, two, dsgd.LocalSGD(4)) as replica:
        replica.load(f"{folder}/epoch_1.pt")


def save_what_cannot_be_read(folder: str) -> None:
    model, optimizer = make()
    with replica_of(model, optimizer, dsgd.LocalSGD()) as replica:
        replica.save(f"{folder}/x.pt", config=Path("."))


def load_with_another(folder: str) -> None:
    model, optimizer = make()
    with replica_of(model, optimizer, dsgd.DPSGD()) as replica:
        replica.load(f"{folder}/epoch_1.pt")


def test_bad_checkpoints_are_refused(tmp_path: Path) -> None:
    for error in errors(2, save_what_cannot_be_read, str(tmp_path)):
        assert "got config with a PosixPath; save its state_dict()" in error
    run(2, train_from, str(tmp_path), 0, 1, "local_sgd", True)
    for error in errors(2, load_with_another, str(tmp_path)):
        assert "got strategy='dpsgd'" in error
        assert "saved from 'local_sgd'" in error
    for error in errors(2, load_with_two_optimizers, str(tmp_path)):
        assert "must be of the same optimizers, got 1 in" in error


# ---- failure ----


def die(how: str) -> float:
    """Rank 1 ends in the midst of training; how long the others took to notice."""
    model, optimizer = make()
    begin = time.monotonic()
    try:
        with replica_of(model, optimizer, dsgd.LocalSGD(4)) as replica:
            for index in range(10**6):
                begin = time.monotonic()
                steps(model, optimizer, [mean_batch(0)])
                if index == 20 and replica.rank == 1:
                    if how == "raise":
                        raise ArithmeticError("no such luck")
                    os.kill(os.getpid(), signal.SIGKILL)
    except PeerLost:
        if time.monotonic() - begin > 15.0:
            raise RuntimeError("noticed too late") from None
        raise
    return 0.0


@pytest.mark.parametrize("how", ["kill", pytest.param("raise", marks=exhaustive)])
def test_a_lost_rank_ends_all_others_which_name_it(how: str) -> None:
    outcomes = FitWorld().outcomes(3, die, how)
    reason = "failed: ArithmeticError: no such luck" if how == "raise" else "died"
    for rank in (0, 2):
        assert outcomes[rank].error.startswith("PeerLost: rank 1 "), outcomes[rank].error
        assert reason in outcomes[rank].error or how == "kill"
        assert outcomes[rank].seconds < 100


def stop(signum: int, folder: str) -> tuple[str, int, Tensor]:
    """Rank 1 gets a signal in the midst of training; all save, and end."""
    if signum == signal.SIGINT:
        signal.signal(signum, signal.default_int_handler)
    model, optimizer = make()
    num_batches = 0
    before = signal.getsignal(signum)

    def endless() -> Iterator[Any]:
        batches = list(loader_of(dist.get_rank()))
        while True:
            yield from batches

    caught: BaseException | None = None
    try:
        with replica_of(model, optimizer, dsgd.LocalSGD(4)) as replica:
            try:
                for batch in replica.batches(endless()):
                    num_batches += 1
                    if num_batches == 10 and replica.rank == 1:
                        os.kill(os.getpid(), signum)
                    steps(model, optimizer, [batch])
            except (KeyboardInterrupt, SystemExit):
                replica.save(f"{folder}/stopped.pt", num_batches=num_batches)
                raise
    except (KeyboardInterrupt, SystemExit) as error:
        caught = error
    assert signal.getsignal(signum) == before
    assert not [t for t in threading.enumerate() if t.name.startswith("dsgd")]
    return f"{type(caught).__name__}: {caught}", num_batches, weights(model)


@pytest.mark.parametrize(
    ("signum", "kind"),
    [
        (signal.SIGTERM, "SystemExit"),
        pytest.param(signal.SIGINT, "KeyboardInterrupt", marks=exhaustive),
    ],
)
def test_a_signal_to_one_rank_stops_all_after_the_same_batch(
    signum: signal.Signals, kind: str, tmp_path: Path
) -> None:
    ranks = run(3, stop, int(signum), str(tmp_path))
    assert len({num_batches for _, num_batches, _ in ranks}) == 1
    for rank, (text, num_batches, _) in enumerate(ranks):
        begin = f"{kind}: rank 1 received {signum.name}; all ranks stopped, "
        assert text == f"{begin}rank {rank} after {num_batches} batches"
    saved = torch.load(tmp_path / "stopped.pt", weights_only=True)
    assert saved["extras"]["num_batches"] == ranks[0][1]


# ---- starting ----


def started() -> tuple[int, int]:
    model, optimizer = make()
    for _ in range(2):  # the second finds the process group there
        with replica_of(model, optimizer, dsgd.LocalSGD()) as replica:
            steps(model, optimizer, loader_of(replica.rank, 2))
    return replica.rank, replica.world_size


def test_ranks_of_torchrun_meet_by_themselves() -> None:
    assert StartWorld(port=free_port()).run(2, started) == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("localhost", "localhost"),
        ("a[001-003,007],b5", "a001"),
        ("gpu-a[7,9]", "gpu-a7"),
        ("b5,a[1-2]", "b5"),
    ],
)
def test_the_first_host_of_slurms_list(nodes: str, first: str) -> None:
    assert launch._first_host(nodes) == first


def test_the_variables_of_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    step = {
        "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2", "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "a[001-002]",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    }  # fmt: skip
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    assert launch.find_launch() == launch.Launch(3, 8, 4, ("a001", 15772))
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "5,3")
    monkeypatch.setenv("MASTER_PORT", "123")
    assert launch.find_launch() == launch.Launch(3, 8, None, ("a001", 123))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="got no MASTER_ADDR; start the script with torchrun"):
        launch.find_launch()
