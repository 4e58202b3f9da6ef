"""What holds of a loop in plain PyTorch: real processes, set up as torchrun sets them up."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dsgd as dsgd
from lightning_dsgd import decentralized
from lightning_dsgd.plain import launch
from lightning_dsgd.transport.memory import Memory
from tests.support.fits import Plain, Seeded, errors, run, same
from tests.support.models import Regression, weights

exhaustive = pytest.mark.exhaustive


def make(kind: type[Regression] = Seeded) -> tuple[Any, Any]:
    model = kind()
    return model, model.configure_optimizers()


def loader_of(rank: int, num_batches: int = 12) -> DataLoader[Any]:
    x = torch.randn(num_batches * 8, 10, generator=torch.Generator().manual_seed(rank))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8)


def replica_of(model: nn.Module, optimizers: Any, algorithm: Any, **options: Any) -> decentralized:
    """What hangs fails soon, saying who waits for whom."""
    return decentralized(model, optimizers, algorithm, **{"timeout_s": 20.0, **options})


def steps(model: Regression, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    for batch in batches:
        optimizer.zero_grad()
        model.loss(batch).backward()
        optimizer.step()


# ---- batches, evaluation, figures ----
def train_unevenly() -> tuple[Tensor, Tensor, float, dict[str, float], int]:
    model, optimizer = make()
    noted = mock.patch.object(
        Memory, "expect_at_most", autospec=True, side_effect=Memory.expect_at_most
    )
    with noted as expect, replica_of(model, optimizer, dsgd.WAGMA(group_size=2)) as replica:
        # At first, and once there is a model, whose longest message has 6 times its bytes.
        first, then = (limit for (_, limit), _ in expect.call_args_list)
        assert first == 0
        assert then > 6 * weights(model).nbytes
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


def test_ranks_with_uneven_batches_evaluate_the_consensus() -> None:
    ranks = run(4, train_unevenly)
    assert same([consensus for _, consensus, *_ in ranks])
    for rank, (_, consensus, mean, metrics, num_batches) in enumerate(ranks):
        assert mean == 1.5
        assert num_batches == 6 + 5 * rank
        assert metrics["bytes_sent"] > 0
        apart = (torch.stack([own for own, *_ in ranks]) - consensus).norm() / 4**0.5
        assert metrics["consensus_distance"] == pytest.approx(float(apart / consensus.norm()))


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
def mean_batch(index: int) -> tuple[Tensor, Tensor]:
    all_x, all_y = zip(*(list(loader_of(rank))[index] for rank in range(2)), strict=True)
    return torch.cat(all_x), torch.cat(all_y)


class Twice(torch.optim.SGD):
    """Fires both of torch's hooks twice in a step."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


def step_in_many_ways(kind: str) -> tuple[Tensor, dict[str, float]]:
    model, optimizer = make(Plain)
    make_optimizer = Twice if kind == "twice" else torch.optim.SGD
    optimizer = make_optimizer(model.parameters(), 0.05, momentum=0.9)
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
    ("closure", "closure by name", "twice"),
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


class Drifting(torch.optim.SGD):
    """Changes its weights after the step of its base, each rank its own way."""

    drift = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        output = super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter += self.drift
        return output


def step_and_drift() -> Tensor:
    model, _ = make(Plain)
    optimizer = Drifting(model.parameters(), 0.05)
    with replica_of(model, optimizer, dsgd.LocalSGD(sync_period=1)) as replica:
        optimizer.drift = replica.rank
        steps(model, optimizer, [mean_batch(0)])
        return weights(model)


def test_what_a_subclass_does_after_its_bases_step_belongs_to_the_step() -> None:
    assert same(run(2, step_and_drift))


def step_by_a_disabled_scaler() -> list[Tensor]:
    """The weights with a scaler that is not enabled, and without one."""
    trained = []
    for scaler in (torch.amp.GradScaler("cpu", enabled=False), None):
        torch.manual_seed(0)
        model, optimizer = make(Plain)
        with replica_of(model, optimizer, dsgd.AllReduce()) as replica:
            model.loss(mean_batch(replica.rank)).backward()
            optimizer.step() if scaler is None else scaler.step(optimizer)
        trained.append(weights(model))
    return trained


def test_a_scaler_that_is_not_enabled_need_not_be_given() -> None:
    for disabled, without in run(2, step_by_a_disabled_scaler):
        assert torch.equal(disabled, without)


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
    (step_scaled, dsgd.AllReduce(), sgd, False, "use decentralized(..., scaler=scaler)"),
    (step_in_evaluation, dsgd.LocalSGD(), sgd, False, "train outside of it"),
    (load_late, dsgd.LocalSGD(), sgd, False, "before the first step, got 1 steps"),
    (reduce_before_a_closure, dsgd.LocalSGD(), sgd, False, "must be reduced once a step"),
]


def refuse_all() -> list[str]:
    said = []
    for act, algorithm, make_optimizer, has_scaler, _ in REFUSED:
        model, _ = make(Plain)
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


ARGUMENTS: list[tuple[Any, dict[str, Any], str]] = [
    (dsgd.LocalSGD(), {"transport": "udp"}, 'transport must be "auto", "process_group" or "mpi"'),
    (dsgd.LocalSGD(), {"optimizers": []}, "got no optimizer"),
    (dsgd.LocalSGD(), {"optimizers": Wrapper()}, "got Wrapper; give the optimizer in it"),
    ("wagma", {}, "must be one of lightning_dsgd, got 'wagma'"),
]


def test_arguments_are_refused_before_anything_begins() -> None:
    model, optimizer = make(Plain)
    for algorithm, options, text in ARGUMENTS:
        given = {"optimizers": optimizer, "algorithm": algorithm, **options}
        with pytest.raises((TypeError, ValueError), match=re.escape(text)):
            decentralized(model, **given)


def lbfgs() -> Tensor:
    model, _ = make(Plain)
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


# ---- checkpoints ----
OWN = {"a": None}


def save(folder: str) -> None:
    model, optimizer = make()
    with replica_of(model, optimizer, dsgd.LocalSGD(4)) as replica:
        steps(model, optimizer, loader_of(replica.rank, 7))
        replica.save(f"{folder}/epoch_1.pt", epoch=1, own=[replica.rank, OWN])


def load(folder: str) -> dict[str, Any]:
    model, optimizer = make()
    with replica_of(model, optimizer, dsgd.LocalSGD(4)) as replica:
        extras: dict[str, Any] = replica.load(f"{folder}/epoch_1.pt")
    return extras


def load_with_two_optimizers(folder: str) -> None:
    model, _ = make()
    parts = list(model.net.parameters())
    two = [torch.optim.SGD(parts[:2], 0.1), torch.optim.SGD(parts[2:], 0.1)]
    with replica_of(model, two, dsgd.LocalSGD(4)) as replica:
        replica.load(f"{folder}/epoch_1.pt")


def test_what_is_saved_beside_a_model_is_loaded_again(tmp_path: Path) -> None:
    """With another number of ranks what rank 0 has saved."""
    run(2, save, str(tmp_path))
    for error in errors(2, load_with_two_optimizers, str(tmp_path)):
        assert "must be of the same optimizers, got 1 in" in error
    for world_size, owners in ((2, [0, 1]), (3, [0, 0, 0])):
        found = run(world_size, load, str(tmp_path))
        assert found == [{"epoch": 1, "own": [rank, OWN]} for rank in owners]


def resume_a_scaler(path: str) -> float:
    for resumes in (False, True):
        model, optimizer = make()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 if resumes else 1024.0)
        with replica_of(model, optimizer, dsgd.LocalSGD(4), scaler=scaler) as replica:
            (replica.load if resumes else replica.save)(path)
    return scaler.get_scale()


def test_a_scaler_that_is_saved_beside_a_model_is_loaded_again(tmp_path: Path) -> None:
    assert run(2, resume_a_scaler, str(tmp_path / "scaled.pt")) == [1024.0, 1024.0]


def save_what_cannot_be_read(folder: str) -> None:
    model, optimizer = make()
    with replica_of(model, optimizer, dsgd.LocalSGD()) as replica:
        replica.save(f"{folder}/x.pt", config=Path("."))


def test_what_a_checkpoint_cannot_hold_is_refused(tmp_path: Path) -> None:
    for error in errors(2, save_what_cannot_be_read, str(tmp_path)):
        assert "got config with a PosixPath; save its state_dict()" in error


# ---- starting ----
HOSTS = {"localhost": "localhost", "a[001-003,007],b5": "a001", "b5,a[1-2]": "b5"}


def test_the_variables_of_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    step = {
        "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2", "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    }  # fmt: skip
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    for nodes, first in HOSTS.items():
        monkeypatch.setenv("SLURM_STEP_NODELIST", nodes)
        assert launch.find_launch() == launch.Launch(3, 8, 4, (first, 15772))
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "5,3")
    monkeypatch.setenv("MASTER_PORT", "123")
    assert launch.find_launch() == launch.Launch(3, 8, None, ("b5", 123))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="got no MASTER_ADDR; start the script with torchrun"):
        launch.find_launch()
