"""What holds of a loop in Lightning's Fabric: real processes, set up as torchrun sets them up."""

from __future__ import annotations

import importlib
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn

import lightning_dsgd as dsgd
from lightning_dsgd import FabricStrategy
from lightning_dsgd.algorithms import ALL_ALGORITHMS
from lightning_dsgd.fabric import twin
from tests.plain.test_training import loader_of, make, mean_batch
from tests.session.test_faces import batches_of
from tests.support.faces import FACES, Loop
from tests.support.fits import Plain, errors, run, same
from tests.support.models import weights
from tests.support.mpi import ROOT, ended
from tests.support.worlds import ParentWorld

exhaustive = pytest.mark.exhaustive
PACKAGES = {"lightning.fabric": FabricStrategy, "lightning_fabric": twin.FabricStrategy}


def fabric_of(algorithm: Any) -> Any:
    strategy = FabricStrategy(algorithm, timeout_s=20.0)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    return fabric


def steps(fabric: Any, model: Any, optimizer: Any, batches: Any) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        fabric.backward(((model(x) - y) ** 2).mean())
        optimizer.step()


# ---- names ----
@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_is_known_to_fabric(package: str) -> None:
    fabric = importlib.import_module(package).Fabric
    for name in ALL_ALGORITHMS:
        for each in (name, f"ddp_{name}"):
            strategy = fabric(strategy=each, accelerator="cpu", devices=2).strategy
            assert type(strategy) is PACKAGES[package]
            assert strategy.algorithm.name == name
    with pytest.raises(ValueError, match=r'invalid strategy name.*Did you mean "wagma"'):
        fabric(strategy="wagam", accelerator="cpu", devices=2)
    with pytest.raises(ValueError, match="FabricStrategy cannot honour static_graph"):
        PACKAGES[package](dsgd.WAGMA(), static_graph=True)
    with pytest.raises(ValueError, match="group_size is one of the algorithm"):
        PACKAGES[package]("wagma", group_size=4)
    kept = r"write .*\(lightning_dsgd.WAGMA\(group_size=4, overlap=True\)\)"
    with pytest.raises(ValueError, match=kept):
        PACKAGES[package](dsgd.WAGMA(group_size=4), overlap=True)
    with pytest.raises(ValueError, match="group_size"):
        PACKAGES[package](dsgd.WAGMA(group_size=0))
    assert PACKAGES[package]("wagma:group_size=4").algorithm == dsgd.WAGMA(group_size=4)


# ---- a loop ----
def train_unevenly() -> tuple[Tensor, Tensor, float, bool, dict[str, float], list[str]]:
    model, optimizer = make()
    fabric = fabric_of(dsgd.WAGMA(group_size=2))
    rank = fabric.global_rank
    net, optimizer = fabric.setup(model.net, optimizer)
    with fabric.strategy:
        for _ in range(2):
            batches = fabric.strategy.batches(loader_of(rank, 6 + 5 * rank))
            with fabric.no_backward_sync(net, enabled=True):
                steps(fabric, net, optimizer, batches)
            fabric.barrier()
            own = weights(model)
            with fabric.strategy.consensus():
                consensus = weights(model)
                mean = float(fabric.all_reduce(torch.tensor(float(rank))))
                assert fabric.all_gather(torch.tensor(rank)).tolist() == [0, 1, 2, 3]
                assert fabric.broadcast({"rank": rank}, 2) == {"rank": 2}
            assert torch.equal(weights(model), own)
        decided = fabric.strategy.reduce_boolean_decision(rank > 0, all=False)
        decided = decided and not fabric.strategy.reduce_boolean_decision(rank > 0)
        figures = fabric.strategy.communication()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in list(loader_of(rank, 5)):
                steps(fabric, net, optimizer, [batch])
                fabric.all_reduce(torch.zeros(()))
    fabric.barrier()  # training has ended: what all do now is Fabric's own
    assert fabric.broadcast({"rank": rank}, 2) == {"rank": 2}
    assert fabric.all_gather(torch.tensor(rank)).tolist() == [0, 1, 2, 3]
    assert not fabric.strategy.reduce_boolean_decision(rank > 0)
    return weights(model), consensus, mean, decided, figures, [str(w.message) for w in caught]


def test_ranks_with_uneven_batches_evaluate_the_consensus_and_end_with_it() -> None:
    ranks = run(4, train_unevenly)
    assert same([consensus for _, consensus, *_ in ranks])
    assert same([x for x, *_ in ranks])
    for rank, (_, _, mean, decided, figures, said) in enumerate(ranks):
        assert (mean, decided) == (1.5, True)
        assert figures["bytes_sent"] > 0
        warned = [text for text in said if "was called after each" in text]
        assert len(warned) == (1 if rank == 0 else 0)


def clip_what_is_held_back() -> list[float]:
    moved = []
    for face in ("Trainer", "Fabric"):
        model = Plain()
        before = weights(model)
        data = batches_of(dist.get_rank())
        FACES[face](Loop(model, dsgd.OkTopk(density=0.1), data, clip=1e-9))
        moved.append(float((weights(model) - before).abs().max()))
    return moved


def test_what_was_held_back_is_clipped_too() -> None:
    for moved in run(2, clip_what_is_held_back):
        assert max(moved) < 1e-6


def clip_and_reduce() -> tuple[list[tuple[float, float]], list[str]]:
    """Norms as clipping returns and as torch has them; warnings of reductions that are rare."""
    model, optimizer = make(Plain)
    fabric = fabric_of(dsgd.LocalSGD(4))
    net, optimizer = fabric.setup(model.net, optimizer)
    batches = loader_of(fabric.global_rank, 8)
    norms = []
    with fabric.strategy, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for kind in (1.0, torch.inf):
            optimizer.zero_grad()
            x, y = next(iter(batches))
            fabric.backward(((net(x) - y) ** 2).mean())
            grads = torch.cat([p.grad.flatten() for p in model.parameters()])
            clipped = fabric.clip_gradients(net, optimizer, max_norm=0.1, norm_type=kind)
            norms.append((float(clipped), float(grads.norm(kind))))
            optimizer.step()
        for num_steps in (1, 1, 2, 1, 1, 2, 1):
            for _ in range(num_steps):
                steps(fabric, net, optimizer, [next(iter(batches))])
            fabric.all_reduce(torch.zeros(()))
    return norms, [str(w.message) for w in caught]


def test_clipping_takes_any_norm_and_rare_reductions_are_not_warned_of() -> None:
    for norms, said in run(2, clip_and_reduce):
        for clipped, expected in norms:
            assert clipped == pytest.approx(expected, rel=1e-5)
        assert not [text for text in said if "was called after each" in text]


# ---- checkpoints ----
def save_and_load_models(folder: str) -> None:
    """Of models alone, set up or not, before there is training: as with ddp."""
    fabric = fabric_of(dsgd.WAGMA())
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    before = weights(model)
    fabric.save(f"{folder}/before.ckpt", {"model": model})
    fabric.save(f"{folder}/after.ckpt", {"model": fabric.setup(model)})
    for name in ("before", "after"):
        for set_up in (False, True):
            other = nn.Linear(2, 2)
            state = {"model": fabric.setup(other) if set_up else other}
            assert fabric.load(f"{folder}/{name}.ckpt", state) == {}
            assert torch.equal(weights(other), before)
    assert set(fabric.load(f"{folder}/after.ckpt")["model"]) == {"weight", "bias"}
    fabric.strategy.finish()


def test_models_alone_are_saved_and_loaded_as_with_ddp(tmp_path: Path) -> None:
    run(2, save_and_load_models, str(tmp_path))


# ---- failure, and the end ----
def set_up_late() -> None:
    model, optimizer = make(Plain)
    fabric = fabric_of(dsgd.LocalSGD(4))
    net, optimizer = fabric.setup(model.net, optimizer)
    with fabric.strategy:
        steps(fabric, net, optimizer, [mean_batch(0)])
        fabric.setup(*make(Plain))


def test_what_is_set_up_late_is_refused() -> None:
    for error in errors(2, set_up_late):
        assert "set up before the first step, got one more model" in error


def page_script(folder: Path, printing: str = "fabric.print(") -> None:
    """Puts the page's script into a folder, or one that does something else where it prints."""
    page = (ROOT / "docs" / "fabric.md").read_text()
    found = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (text,) = (block for block in found if block.startswith("# train.py"))
    (folder / "train.py").write_text(text.replace("fabric.print(", printing))


def run_page(folder: str) -> tuple[float, Tensor]:
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(Path("train.py").read_text(), names)
    return names["valid_loss"], weights(names["model"])


def test_the_script_of_the_page_learns_on_every_rank(tmp_path: Path) -> None:
    page_script(tmp_path)
    ranks = run(2, run_page, str(tmp_path))
    assert same([x for _, x in ranks])
    assert ranks[0][0] == ranks[1][0] < 0.5  # 8 is the variance of the target


@exhaustive
def test_the_script_starts_its_own_ranks(tmp_path: Path) -> None:
    page_script(tmp_path, "1 / (1 - fabric.global_rank * epoch)\n        fabric.print(")
    done = ended([sys.executable, "train.py"], tmp_path)
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stderr
    assert "rank 1 failed: ZeroDivisionError" in done.stderr


def launch_forks(folder: str) -> None:
    fabric = L.Fabric(
        accelerator="cpu", devices=2, strategy=FabricStrategy("local_sgd", start_method="fork")
    )
    fabric.launch(train_in_fork, folder)


def train_in_fork(fabric: Any, folder: str) -> None:
    model, optimizer = make(Plain)
    net, optimizer = fabric.setup(model.net, optimizer)
    with fabric.strategy:
        steps(fabric, net, optimizer, loader_of(fabric.global_rank))
    torch.save(weights(model), f"{folder}/rank_{fabric.global_rank}.pt")


def test_ranks_that_are_forked(tmp_path: Path) -> None:
    ParentWorld().run(1, launch_forks, str(tmp_path))
    assert same([torch.load(tmp_path / f"rank_{rank}.pt") for rank in range(2)])
