"""`Trainer.fit` on a device, on one that is none: `tests/support/fake_device.py`.

Forward, backward and the optimizer are queued there as well, and backward from another thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dsgd import DecentralizedStrategy
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.devices import port_of
from tests.session.test_faces import TIMELESS, batches_of
from tests.support.faces import FACES, Loop
from tests.support.fake_device import FakeDevice
from tests.support.fits import Seeded, accelerator_of, buffers
from tests.support.models import loader, trainer, weights
from tests.support.ports import free_port
from tests.support.worlds import FakeFitWorld, FakeStartWorld, FitWorld
from tests.test_frozen import ALGORITHMS

DEPEND_ON_TIME = {"adpsgd", "eager_sgd", "hpsgd", "popsgd:blocking=false", "sgp:overlap=1"}
DEPEND_ON_TIME |= {"wagma:sync_period=4", "wagma:sync_period=4:overlap=true"}
CPU = torch.device("cpu")
ALL = {name: ALGORITHMS[name] for name in TIMELESS}
ALL |= {spec: partial(make_algorithm, spec) for spec in sorted(DEPEND_ON_TIME)}
WAGMA = "wagma:sync_period=4"


class OnDevice(Seeded):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.seen |= {x.device.type for x in (*batch, *self.parameters(), *self.buffers())}
        return super().loss(batch)


def train_on(name: str, device: torch.device, num_steps: int) -> tuple[Tensor, float, set[str]]:
    world_size = int(os.environ["WORLD_SIZE"])
    model, data = OnDevice(), loader(4 * world_size * num_steps, 4)
    make = ALL.get(name, partial(make_algorithm, name))
    strategy = DecentralizedStrategy(make(), timeout_s=60.0)
    options = {"accelerator": accelerator_of(device), "val_check_interval": num_steps // 2}
    fit = trainer(strategy, world_size, **options)
    fit.fit(model, data, loader(8, 4))
    found = torch.cat([weights(model).double(), buffers(model)])
    return found, float(fit.callback_metrics["val_loss"]), model.seen


def train_on_both(fake: FakeDevice, names: list[str], num_steps: int) -> dict[str, Any]:
    found = {}
    for name in names:
        fake.syncs.clear()
        on_device = train_on(name, fake.device, num_steps)
        assert not fake.races, f"{name}: {fake.races[0]}"
        found[name] = on_device, train_on(name, CPU, num_steps)
    return found


def check(names: list[str], world_size: int, num_steps: int, seed: int = 0) -> None:
    ranks = FakeFitWorld(seed=seed).run(world_size, train_on_both, names, num_steps)
    for name in names:
        for (trained, loss, where), (expected, cpu_loss, _) in (rank[name] for rank in ranks):
            assert where == {"fake"}, name
            assert trained.equal(ranks[0][name][0][0]), f"{name}: ranks differ"
            assert trained.isfinite().all(), name
            assert trained.abs().max() < 1000, f"{name}: poison"
            if name in TIMELESS:
                assert trained.equal(expected), name
                assert loss == cpu_loss, name


@pytest.mark.parametrize(
    ("world_size", "spec"),
    [
        (2, "sgp:node_size=2"),
        pytest.param(4, "sgp:node_size=2", marks=pytest.mark.exhaustive),
        pytest.param(4, "wagma:node_size=2:grace_s=Infinity", marks=pytest.mark.exhaustive),
    ],
)
def test_pieces_of_gradients_within_a_node_change_no_bit(world_size: int, spec: str) -> None:
    specs = [f"{spec}:num_buckets={num}" for num in (None, 3)]
    for rank in FakeFitWorld().run(world_size, train_on_both, specs, 4):
        [expected, *others] = [row for rows in rank.values() for row in rows]
        assert expected[0].isfinite().all()
        assert all(trained.equal(expected[0]) for trained, _, _ in others)


@pytest.mark.exhaustive
def test_strategies_fit_on_a_device() -> None:
    check(["allreduce", WAGMA, "topk_dsa"], world_size=2, num_steps=4)


def train_on_accelerator(names: list[str]) -> list[tuple[Tensor, Tensor, set[str]]]:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    device, rows = port_of(found).device, []
    for name in names:
        trained, _, where = train_on(name, device, 4)
        rows.append((trained, train_on(name, CPU, 4)[0], where))
    return rows


@pytest.mark.gpu
def test_strategies_fit_on_an_accelerator() -> None:
    """All ranks share one device; what is rounded may be rounded the other way there."""
    for rows in FitWorld().run(2, train_on_accelerator, ["allreduce", "sgp", "oktopk", WAGMA]):
        for (trained, expected, where), is_same in zip(
            rows, (True, True, False, False), strict=True
        ):
            assert "cpu" not in where
            assert trained.isfinite().all()
            if is_same:
                torch.testing.assert_close(trained, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(3))
def test_every_strategy_fits_on_a_device(part: int) -> None:
    check(list(ALL)[part::3], world_size=3, num_steps=8, seed=100 * part)


# ---- the other faces ----
def train_by(
    face: Callable[[Loop], None], name: str, device: torch.device, **options: Any
) -> Tensor:
    model = Seeded().to(device)  # before there is an optimizer: torch keeps no fake parameters
    batches = [(x.to(device), y.to(device)) for x, y in batches_of(int(os.environ["RANK"]), 6)]
    face(Loop(model, ALL[name](), batches, options=options))
    return weights(model).detach().cpu()


def share(fake: FakeDevice | None, ports: list[int], *, shares: bool) -> list[Tensor]:
    found = []
    for face, port in zip(FACES.values(), ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        device = CPU if fake is None else fake.device
        found.append(train_by(face, WAGMA, device, share_device=shares))
        dist.destroy_process_group()
    return found


def test_ranks_share_a_device_where_they_may() -> None:
    ports = [free_port() for _ in FACES]
    ours, theirs = FakeStartWorld().run(2, partial(share, ports=ports, shares=True))
    assert all(map(torch.equal, ours, theirs))
    told = [
        o.error for o in FakeStartWorld().outcomes(2, partial(share, ports=ports, shares=False))
    ]
    assert (
        sum(error.startswith("ValueError: each rank needs a device of its own") for error in told)
        == 1
    )
    assert sum("for ranks " in error and "share_device=True" in error for error in told) == 2


class OfNCCLAlone(FitWorld):
    """As a script makes its process group for NCCL: with nothing for tensors on the CPU."""

    _backend = "cuda:gloo"


def test_ranks_that_share_a_device_need_more_than_nccl() -> None:
    for outcome in OfNCCLAlone().outcomes(2, partial(share, None, [1, 1, 1], shares=True)):
        assert outcome.error.startswith("ValueError: with share_device=True the process group")
        assert 'got cuda:gloo; make it with init_process_group("gloo")' in outcome.error
