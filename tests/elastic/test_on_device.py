"""Training goes on without a lost rank where tensors are on a device: on one that is none."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_dsgd import devices
from lightning_dsgd.session.opening import Opening
from lightning_dsgd.session.options import Options, choose
from lightning_dsgd.trainer.named import strategy_of
from tests.elastic.test_plain import LOSS_UNTRAINED, PERIODS, SURVIVES
from tests.elastic.test_trainer import Logging
from tests.support import fake_device
from tests.support.doomed import Plan
from tests.support.fake_device import FakeDevice
from tests.support.fits import accelerator_of
from tests.support.models import loader, trainer, weights
from tests.support.ports import free_port
from tests.support.thorough import cases
from tests.support.worlds import FakeFitWorld, StartWorld


class OnDevice(Logging):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: set[torch.device] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen |= {x.device for x in (*batch, *self.parameters(), *self.buffers())}
        return super().training_step(batch, batch_idx)


def fit(fake: FakeDevice, name: str, folder: str, plan: Plan) -> dict[str, Any]:
    options = {"accelerator": accelerator_of(fake.device), "max_epochs": 3}
    train = trainer(strategy_of(name, **SURVIVES | PERIODS.get(name, {})), 3, **options)
    model = OnDevice(folder, (plan,))
    train.fit(model, loader(96), loader(16))
    assert model.seen == {fake.device}
    return {
        "weights": weights(model),
        "loss": float(train.callback_metrics["loss"]),
        "num_members": train.strategy.session.world_size,
    }


def open_where_a_rank_may_be_lost(port: int) -> list[str]:
    fake, lines = fake_device.install(index=int(os.environ["RANK"])), list[str]()
    with mock.patch.dict(devices.COLLECTIVES, {"fake": "nccl"}):
        given: Any = {"on_loss": "continue", "transport": "process_group"}
        opening = Opening(choose("a test", Options, given), lines.append)
        at = ("127.0.0.1", port), "nccl", fake.device
        opening.join_process_group(fake.device.index, 2, *at)
        opening.open_network(2, fake.device).close()
    return lines


@pytest.mark.skipif(bool(fake_device.WHY_NOT), reason=fake_device.WHY_NOT)
def test_ranks_meet_over_gloo_where_one_may_be_lost():
    for started, carries in StartWorld().run(2, open_where_a_rank_may_be_lost, free_port()):
        assert started == "All 2 ranks have started (process group: gloo)."
        assert "; sums are made of messages too, as ranks may share a device or be lost." in carries


@cases("name", now=["wagma"], later=["allreduce", "oktopk", "hpsgd"])
def test_a_rank_is_killed_and_the_others_train_on_their_devices(name, tmp_path):
    plan = Plan(1, "SIGKILL", at=6)
    outcomes = FakeFitWorld(timeout_s=60.0).outcomes(3, fit, name, str(tmp_path), plan)
    left = [outcomes[rank] for rank in (0, 2)]
    for outcome in left:
        assert outcome.error == ""
        found = outcome.result
        assert found["num_members"] == 2
        assert torch.equal(found["weights"], left[0].result["weights"])
        assert found["weights"].abs().max() < 1000  # what no wait has ordered is poison
        assert found["loss"] < LOSS_UNTRAINED
    assert outcomes[1].error == "died"
