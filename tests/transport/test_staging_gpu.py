"""The contract, and what it costs the stream that trains, for tensors on a real accelerator."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fake_device import FakeDevice, OnDevice
from tests.support.worlds import AcceleratorWorld, FakeWorld
from tests.transport.contract.test_in_order import run_in_order

ROOT = Path(__file__).parents[2]


def contract(net: Any, device: torch.device) -> None:
    run_in_order(OnDevice(net, device))  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_contract_holds_on_an_accelerator(world_size: int) -> None:
    """All ranks share one device."""
    AcceleratorWorld().run(world_size, contract)


def gpu_command() -> Any:
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "benchmarks" / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(net: Any, fake: FakeDevice) -> dict[str, Any]:
    found: dict[str, Any] = gpu_command().measure(fake.device, small=True)
    return found


def test_the_command_for_a_gpu_measures() -> None:
    [found] = FakeWorld(finds_races=False).run(1, measure)
    assert found["selection"][0]["elements"] == 10_000
    assert found["selection"][0]["torch_gb_s"] > 0
    assert [row["bytes"] for row in found["staging"]] == [4096, 20 * 4096]
    assert all(rate > 0 for row in found["staging"] for rate in row.values())
    assert found["stream"]["moves_per_step"] > 0


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_the_command_says_why_it_does_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu.py"])
    gpu_command().main()
    assert "nothing was done: needs a GPU, got none: torch" in capsys.readouterr().out
