"""What stands in the wrong place in a script is refused, and the error says what to write."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning as L
import lightning_fabric
import pytest
import pytorch_lightning
import torch
from torch import nn

import lightning_dsgd as dsgd
from tests.plain.test_training import loader_of, make, replica_of, steps
from tests.support.fits import Plain, run


def train_plainly(algorithm: Any) -> None:
    model, optimizer = make(Plain)
    dsgd.decentralized(model, optimizer, algorithm)


def train_with(face: Any) -> Any:
    return functools.partial(face, accelerator="cpu", devices=2)


GROUPS = dsgd.WAGMA(group_size=4)
WRITTEN_GROUPS = "lightning_dsgd.DecentralizedStrategy(lightning_dsgd.WAGMA(group_size=4))"
WRITTEN: list[tuple[Any, Any, str]] = [
    (train_plainly, "wagma", "(model, optimizer, lightning_dsgd.WAGMA())"),
    (
        train_plainly,
        "wagma:group_size=4",
        "(model, optimizer, lightning_dsgd.WAGMA(group_size=4)",
    ),
    (train_plainly, dsgd.WAGMA, "(model, optimizer, lightning_dsgd.WAGMA())"),
    (train_plainly, 3, "got 3; write decentralized(model, optimizer, lightning_dsgd.LocalSGD("),
    (
        train_plainly,
        dsgd.DecentralizedStrategy(GROUPS),
        "got a DecentralizedStrategy; write decentralized(model, optimizer, lightning_dsgd.WAGMA(",
    ),
    (
        dsgd.FabricStrategy,
        dsgd.DecentralizedStrategy("wagma"),
        "write FabricStrategy(lightning_dsgd.WAGMA())",
    ),
    (train_with(L.Trainer), GROUPS, f"Write strategy={WRITTEN_GROUPS}."),
    (train_with(L.Trainer), dsgd.WAGMA, "DecentralizedStrategy(lightning_dsgd.WAGMA())."),
    (train_with(L.Trainer), dsgd.FabricStrategy(GROUPS), f"Write strategy={WRITTEN_GROUPS}."),
    (train_with(L.Trainer), 3, "Find a complete list of options in our documentation"),
    (
        train_with(pytorch_lightning.Trainer),
        dsgd.DecentralizedStrategy("wagma"),
        "Write strategy=lightning_dsgd.pytorch_lightning.DecentralizedStrategy(lightning_dsgd.WAG",
    ),
    (train_with(L.Trainer), dsgd.Balanced(), "BalancedStrategy(lightning_dsgd.Balanced())."),
    (
        train_with(L.Fabric),
        dsgd.DecentralizedStrategy(GROUPS),
        "Write strategy=lightning_dsgd.FabricStrategy(lightning_dsgd.WAGMA(group_size=4)).",
    ),
    (
        train_with(lightning_fabric.Fabric),
        GROUPS,
        "Write strategy=lightning_dsgd.fabric.twin.FabricStrategy(lightning_dsgd.WAGMA(group",
    ),
]
"""Who is given what, and a part of the error."""


@pytest.mark.parametrize("number", range(len(WRITTEN)))
def test_what_belongs_to_another_face_is_refused_with_what_to_write(number: int) -> None:
    face, given, text = WRITTEN[number]
    takes_strategy = isinstance(face, functools.partial)
    with pytest.raises((TypeError, ValueError)) as caught:
        face(**{"strategy" if takes_strategy else "algorithm": given})
    assert text in str(caught.value)


def test_a_mistyped_name_is_told_which_may_be_meant() -> None:
    text = "no attribute 'OktopK'; did you mean OkTopk?"
    with pytest.raises(AttributeError, match=text):
        _ = dsgd.OktopK
    with pytest.raises(ImportError, match=text):
        exec("from lightning_dsgd import OktopK")
    with pytest.raises(ImportError, match="cannot import name 'NothingLikeIt'"):
        exec("from lightning_dsgd import NothingLikeIt")
    assert not hasattr(dsgd, "OktopK")
    exec("from lightning_dsgd import plain, trainer")


def test_a_trace_needs_a_folder() -> None:
    with pytest.raises(TypeError, match=r'folder must be a path, got 3; write StepTrace\("run/"\)'):
        dsgd.StepTrace(3)  # type: ignore[arg-type]


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = Plain(), Plain()
    wrong = other.configure_optimizers()
    with pytest.raises(ValueError, match="got SGD with 4 parameters, none of which is one of"):
        dsgd.decentralized(model, wrong, dsgd.WAGMA())
    right = torch.optim.SGD([model.net[0].weight, nn.Parameter(torch.zeros(1))], 0.1)
    dsgd.decentralized(model, [right, wrong], dsgd.WAGMA())


CALLS: dict[str, Any] = {
    "batches": lambda replica: replica.batches([]),
    "nominal_batches": lambda replica: replica.nominal_batches,
    "reduce_gradients": lambda replica: replica.reduce_gradients(),
    "count": lambda replica: replica.count(3),
    "consensus": lambda replica: replica.consensus().__enter__(),
    "mean": lambda replica: replica.mean(1.0),
    "barrier": lambda replica: replica.barrier(),
    "save": lambda replica: replica.save("nowhere.pt"),
    "load": lambda replica: replica.load("nowhere.pt"),
    "rank": lambda replica: replica.rank,
    "world_size": lambda replica: replica.world_size,
    "members": lambda replica: replica.members,
    "is_first": lambda replica: replica.is_first,
}
KNOWN_AFTERWARDS = ("rank", "world_size", "members", "is_first")


@pytest.mark.parametrize("what", CALLS)
def test_calls_outside_of_the_with_name_it(what: str) -> None:
    replica = replica_of(*make(Plain), dsgd.LocalSGD())
    text = f"replica.{what} must be called inside of `with decentralized"
    with pytest.raises(RuntimeError, match=rf"^{text}\(\.\.\.\) as replica:`, got it outside$"):
        CALLS[what](replica)


def test_steps_outside_of_the_with_are_refused() -> None:
    """The training is kept by nobody, as where a script forgets the `with`."""
    model, optimizer = make(Plain)
    for _ in range(2):
        dsgd.decentralized(model, optimizer, dsgd.WAGMA())
    model.loss(next(iter(loader_of(0)))).backward()
    with pytest.raises(RuntimeError, match="one outside, which would train this rank alone; write"):
        optimizer.step()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(RuntimeError, match="one outside, which would train this rank alone; write"):
        scaler.step(optimizer)


def train_twice(folder: str) -> list[list[int]]:
    """The nominal counts in and behind each epoch; the second training goes on from the first."""
    counts: list[list[int]] = []
    path = f"{folder}/saved.pt"
    for resumes in (False, True):
        model, optimizer = make(Plain)
        replica_of(model, optimizer, dsgd.LocalSGD())  # another, which is never entered
        with replica_of(model, optimizer, dsgd.LocalSGD()) as replica:
            if resumes:
                replica.load(path)
            for _ in range(2):
                counts.append([])
                for batch in replica.batches(loader_of(replica.rank, 2 + replica.rank)):
                    counts[-1].append(replica.nominal_batches)
                    steps(model, optimizer, [batch])
                counts[-1].append(replica.nominal_batches)
            replica.save(path)
        steps(model, optimizer, loader_of(0))  # of this rank alone, once training has ended
        for name in KNOWN_AFTERWARDS:
            CALLS[name](replica)
        with pytest.raises(RuntimeError, match=r"replica.batches must be called inside of `with"):
            replica.batches([])
    return counts


def test_batches_that_are_dealt_equally_count_nominally_too(tmp_path: Path) -> None:
    first, second = run(2, train_twice, str(tmp_path))
    assert first == [[0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8]]
    assert second == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9], [9, 10, 11, 12]]
