"""The contract for tensors on a real accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.fake_device import OnDevice
from tests.support.worlds import ON_ACCELERATORS, ProcessWorld
from tests.transport.contract.test_in_order import run_in_order


def contract(net: Any, device: torch.device) -> None:
    run_in_order(OnDevice(net, device))  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("world", ON_ACCELERATORS)
def test_the_contract_holds_on_an_accelerator(world: ProcessWorld) -> None:
    world.run(3, contract)
