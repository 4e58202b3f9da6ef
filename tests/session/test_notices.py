"""What is said at the start of a training of what it would lose in silence."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dsgd as dsgd
from lightning_dsgd.algorithm import ORDINARY, Algorithm, Conditions
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.devices import CONNECTIONS
from lightning_dsgd.session.notices import Facts, between_nodes, notices, tell, waits
from tests.support.faces import FACES, Loop
from tests.support.fits import Plain, Seeded, fit, run
from tests.support.heard import Heard
from tests.support.thorough import cases

MODEL = nn.Linear(10, 1)
SPARSE_ADAM = 'first beta to 0.5; better, exchanges="changes" with scale_steps=True and a'


def stepped_by(kind: str) -> torch.optim.Optimizer:
    name, _, option = kind.partition(" ")
    options = {"betas": (0.5, 0.999)} if option == "low" else {}
    if option == "momentum":
        options = {"momentum": 0.9}
    return getattr(torch.optim, name)(MODEL.parameters(), lr=0.1, **options)


@pytest.mark.parametrize(
    ("spec", "kind", "size", "num_steps", "said"),
    [
        # Adam where weights are averaged
        ("wagma", "SGD", 400, math.inf, []),
        ("wagma", "AdamW", 400, math.inf, ["2.0 times smaller than with DDP", "set scale_steps"]),
        ("wagma", "NAdam", 400, math.inf, ['got NAdam with strategy="wagma"']),
        ("wagma:node_size=auto", "AdamW", 400, math.inf, []),
        ("dpsgd", "Adam", 400, math.inf, ['use strategy="sgp" with scale_steps=True']),
        ("diloco", "AdamW", 400, math.inf, []),  # the outer momentum enlarges averages
        ("oktopk:local_steps=2:density=0.4", "AdamW", 40_000, 1e4, ["set scale_steps=True"]),
        # sparse gradients
        ("oktopk", "AdamW", 38_000, math.inf, [SPARSE_ADAM]),
        ("oktopk", "AdamW low", 38_000, math.inf, []),
        ("gtopk", "SGD", 380, math.inf, ["density=0.01 of 380 weights", "4 entries", "=0.264 or"]),
        ("gtopk:density=0.5", "SGD", 50, math.inf, ["25 entries are", "set density=1 or more"]),
        (
            *("oktopk:density=0.001", "SGD momentum", 400_000, math.inf),
            ["momentum=0.9 with density=0.001", "1,000 steps or more", "set density=0.01"],
        ),
        # periods
        ("diloco", "SGD", 400, 120, ["got sync_period=500", "120 steps", "try sync_period=12"]),
        ("popsgd:local_steps=8", "SGD", 400, 7, ["local_steps=8", "try local_steps=1"]),
        ("wagma:group_period=20:sync_period=100", "SGD", 400, 10, ["got group_period=20"]),
        # pieces of a gradient
        ("allreduce:overlap=true", "SGD", 40_000, 10, ["got num_buckets=8", "set num_buckets=1,"]),
    ],
)
def test_each_silent_loss_has_a_line_with_the_way_out(
    spec: str, kind: str, size: int, num_steps: float, said: list[str]
) -> None:
    facts = make_algorithm(spec), [stepped_by(kind)], [size, 10 * size]
    lines = notices(Facts(*facts, num_replicas=4, num_steps=num_steps))
    assert len(lines) == bool(said)
    assert all(words in lines[0] for words in said)
    (alone,) = notices(Facts(*facts, num_replicas=1, num_steps=num_steps))
    assert "got one rank" in alone
    assert "start several" in alone


@pytest.mark.parametrize(
    ("spec", "more_mb", "more_on_a_device"),
    [
        ("wagma", "2", "4"),
        ("wagma:wire_dtype=int8:scale_steps=true", "2", "4"),
        ("wagma:node_size=4", "0.5", "1"),  # of a shard
        *(("wagma:overlap=true", "", ""), ("wagma:grace_s=Infinity", "", "")),
        *(("wagma:paper=true", "", ""), ("allreduce", "", ""), ("sgp", "", "")),
    ],
)
def test_what_ranks_wait_for_is_told_with_what_it_would_cost_not_to(
    spec: str, more_mb: str, more_on_a_device: str
) -> None:
    for on_device, more in ((False, more_mb), (True, more_on_a_device)):
        lines = waits(make_algorithm(spec), 8, 2_000_000, on_device=on_device)
        assert len(lines) == bool(more)
        assert all(
            "until 2 MB of weights are averaged; with overlap=True" in line for line in lines
        )
        assert all(f"for {more} MB more memory" in line for line in lines)
    assert waits(make_algorithm(spec), 1, 2_000_000, on_device=False) == []


@pytest.mark.parametrize(
    ("spec", "given", "meant"),
    [
        ("allreduce", "overlap=False", "overlap=True"),
        ("wagma", "overlap=False and group_period=1", "overlap=True and group_period=2"),
        ("wagma:overlap=true", "group_period=1", "group_period=2"),
        *((f"wagma:{each}", "", "") for each in ("overlap=true:group_period=4", "paper=true")),
        *((f"wagma:{each}", "", "") for each in ("node_size=4", "sync_period=25")),
        *(("allreduce:overlap=true", "", ""), ("allreduce:delay=1", "", ""), ("dpsgd", "", "")),
    ],
)
def test_what_is_meant_for_several_nodes_is_told(spec: str, given: str, meant: str) -> None:
    algorithm = make_algorithm(spec)
    for per_node, num_replicas in ((8, 16), (4, 8)):
        algorithm.conditions = Conditions(ranks_per_node=per_node)
        lines = between_nodes(algorithm, num_replicas, accept)
        assert len(lines) == bool(given)
        assert all(f"With {given} ranks" in line for line in lines)
        assert all(f"between nodes; {meant} is meant to" in line for line in lines)
    for per_node, skips in ((None, False), (16, False), (8, True)):
        algorithm.conditions = Conditions(ranks_per_node=per_node, skips_overflow=skips)
        is_told = bool(given) and skips and spec.startswith("wagma")
        assert len(between_nodes(algorithm, 16, accept)) == is_told


def accept(other: Algorithm) -> None:
    """Is a training that would go on with each algorithm."""


def refuse_overlap(other: Algorithm) -> None:
    if other.hyperparameters()["overlap"]:
        raise ValueError


def test_nothing_is_told_of_a_setting_that_the_training_would_refuse() -> None:
    algorithm = make_algorithm("allreduce")
    algorithm.conditions = Conditions(ranks_per_node=8)
    assert between_nodes(algorithm, 16, refuse_overlap) == []


def ask_what_is_refused(given: dict[str, Any]) -> list[bool]:
    refused = []

    def ask(algorithm: Algorithm, num_replicas: int, check: Callable[[Algorithm], None]) -> Any:
        try:
            check(make_algorithm("allreduce:overlap=true"))
        except ValueError:
            refused.append(True)
        else:
            refused.append(False)
        return []

    with mock.patch("lightning_dsgd.session.notices.between_nodes", ask):
        fit("allreduce", **given)
    return refused


@pytest.mark.parametrize(
    "given", [{"accumulate_grad_batches": 2}, {"options": {"check_finite": True}}, {}]
)
def test_the_trainer_is_asked_what_it_would_refuse(given: dict[str, Any]) -> None:
    assert run(1, ask_what_is_refused, given) == [[bool(given)]]


class WithAdam(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train_with_adam(face: str, path: str) -> list[str]:
    """What this rank warns of, in a training that goes on from a checkpoint too."""
    batches = [(torch.ones(4, 10), torch.ones(4, 1))] * 4
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FACES[face](Loop(WithAdam(), dsgd.LocalSGD(9), batches, saves=path))
        caught.clear()
        FACES[face](Loop(WithAdam(), dsgd.LocalSGD(9), batches, epochs=2, resumes=path))
    return [str(w.message) for w in caught if str(w.message).startswith("got ")]


@cases("face", now=["Trainer"], later=["plain", "Fabric"])
def test_the_lines_stand_once_and_on_rank_0_alone(face: str, tmp_path: Path) -> None:
    first, second = run(2, train_with_adam, face, str(tmp_path / "saved.pt"))
    assert second == []
    adam, *period = first
    assert "got AdamW" in adam
    assert len(period) == (face == "Trainer")  # which alone knows how many steps there are to be
    assert all("got sync_period=9" in line and "training of 8 steps" in line for line in period)


def train_on_parts(face: str, micro_batches: int | None, accumulate: int) -> list[str]:
    """What this rank warns of in two epochs of a model with BatchNorm."""
    algorithm = dsgd.Balanced(micro_batches=micro_batches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if face == "Trainer":
            options = {"micro_batches": micro_batches}
            kwargs: dict[str, Any] = {"accumulate_grad_batches": accumulate, "max_epochs": 2}
            fit("balanced", Seeded, options=options, **kwargs)
        else:
            model: Any = Seeded()
            optimizer = model.configure_optimizers()
            with dsgd.decentralized(model, optimizer, algorithm, timeout_s=30.0) as replica:
                data = DataLoader(TensorDataset(torch.ones(32, 10), torch.ones(32, 1)), 8)
                for _ in range(2):
                    for batches in replica.steps(data, accumulate):
                        for batch in batches:
                            model.loss(batch).backward()
                        optimizer.step()
    return [str(w.message) for w in caught if "BatchNorm" in str(w.message)]


@cases("face", now=["plain"], later=["Trainer"])
@pytest.mark.parametrize(
    ("micro_batches", "accumulate", "is_said"), [(None, 1, True), (None, 2, False), (4, 1, False)]
)
def test_batch_norm_on_parts_of_batches_that_nobody_chose_is_told_once_on_rank_0(
    face: str, micro_batches: int | None, accumulate: int, is_said: bool
) -> None:
    first, second = run(2, train_on_parts, face, micro_batches, accumulate)
    assert second == []
    assert len(first) == is_said
    assert all("into 4 micro-batches" in line and "set micro_batches=1" in line for line in first)


def train_with_norm(accumulates: list[int], is_frozen: bool, has_statistics: bool) -> list[str]:
    """What this rank is told of BatchNorm, in epochs with so many batches a step."""
    norm = nn.BatchNorm1d(10, track_running_stats=has_statistics)
    norm.train(not is_frozen)
    model = nn.Sequential(norm, nn.Linear(10, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(torch.ones(32, 10)), 8)
    with (
        warnings.catch_warnings(record=True) as caught,
        dsgd.decentralized(model, optimizer, dsgd.Balanced(), timeout_s=30.0) as replica,
    ):
        warnings.simplefilter("always")
        for accumulate in accumulates:
            for batches in replica.steps(data, accumulate):
                for (x,) in batches:
                    model(x).mean().backward()
                optimizer.step()
    return [str(w.message) for w in caught if "micro-batches" in str(w.message)]


@pytest.mark.parametrize(
    ("accumulates", "is_frozen", "has_statistics", "is_said"),
    [
        ([2, 1, 1], False, True, True),
        ([1], True, True, False),
        ([1], True, False, True),
    ],
)
def test_batch_norm_is_told_of_once_it_normalises_parts_of_batches(
    accumulates: list[int], is_frozen: bool, has_statistics: bool, is_said: bool
) -> None:
    first, second = run(2, train_with_norm, accumulates, is_frozen, has_statistics)
    assert second == []
    assert len(first) == is_said


def train_on_nodes(face: str) -> list[str]:
    """What this rank logs of nodes, where each rank has a node of its own."""
    names = "lightning_dsgd", "lightning.pytorch.utilities.rank_zero"
    for name in (*names, "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.INFO)
    heard = Heard(*names, "lightning.fabric.utilities.rank_zero")
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1"} if face == "plain" else {}):
        FACES[face](Loop(Plain(), dsgd.WAGMA(2), [(torch.ones(4, 10), torch.ones(4, 1))] * 4))
    return [line for line in heard.lines if "between nodes" in line]


def test_what_is_meant_for_several_nodes_is_logged_once_and_there_alone() -> None:
    (line,), nothing = run(2, train_on_nodes, "plain")
    assert nothing == []
    assert "overlap=True and group_period=2 is meant to hide that" in line
    assert run(2, train_on_nodes, "Trainer") == [[], []]  # on one node


class OnGPU:
    """Weights of which only their place and their size are asked."""

    device = torch.device("cuda", 0)
    nbytes = 40

    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize("given", ["1", None, "8"])
def test_few_hardware_queues_are_told(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    monkeypatch.delenv(CONNECTIONS, raising=False)
    if given is not None:
        monkeypatch.setenv(CONNECTIONS, given)
    net = SimpleNamespace(world_size=2, sum_engine="NCCL")
    algorithm = make_algorithm("allreduce")
    algorithm.conditions = ORDINARY
    optimizer = torch.optim.SGD(MODEL.parameters(), 0.1)
    part = SimpleNamespace(algorithm=algorithm, optimizer=optimizer, x=OnGPU())
    training = SimpleNamespace(replica=SimpleNamespace(net=net, parts=[part]), algorithm=algorithm)
    ranks, announced = SimpleNamespace(is_first=True), list[str]()
    session: Any = SimpleNamespace(training=training, ranks=ranks)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        tell(session, announced.append)
    texts = [str(each.message) for each in warned]
    assert [CONNECTIONS in text and "got 1" in text for text in texts] == [True] * (given == "1")
    assert [f"set {CONNECTIONS}=32" in text for text in announced] == [True] * (given is None)
