"""The contract for tensors on a real accelerator; the command that tests and measures on one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import fake_device
from tests.support.fake_device import FakeDevice, OnDevice
from tests.support.worlds import ON_ACCELERATORS, FakeWorld, ProcessWorld
from tests.transport.contract.test_in_order import run_in_order

ROOT = Path(__file__).parents[2]


def contract(net: Any, device: torch.device) -> None:
    run_in_order(OnDevice(net, device))  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("world", ON_ACCELERATORS)
def test_the_contract_holds_on_an_accelerator(world: ProcessWorld) -> None:
    world.run(3, contract)


def gpu_command() -> Any:
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "benchmarks" / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(net: Any, fake: FakeDevice) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    written: list[None] = []
    command, alone = gpu_command(), ("selection", "staging", "stream")
    parts = command.parts_of(fake.device, "fake", Path(), small=True)
    command.add(found, lambda: written.append(None), {name: parts[name] for name in alone})
    return found, len(written)


def test_the_command_for_a_gpu_measures() -> None:
    [(found, num_written)] = FakeWorld(finds_races=False).run(1, measure)
    assert found["selection"][0]["elements"] == 10_000
    assert found["selection"][0]["torch_gb_s"] > 0
    assert [row["bytes"] for row in found["staging"]] == [4096, 20 * 4096]
    assert all(rate > 0 for row in found["staging"] for rate in row.values())
    assert found["stream"][0]["moves_per_step"] > 0
    assert num_written == 4


@pytest.mark.exhaustive
@pytest.mark.skipif(bool(fake_device.WHY_NOT), reason=fake_device.WHY_NOT)
def test_the_command_trains_on_a_device_that_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found: dict[str, Any] = {}
    command, together = gpu_command(), ("fits", "throughput", "slow_kernel")
    parts = command.parts_of(torch.device("cpu"), "fake", Path(), small=True)
    command.add(found, lambda: None, {name: parts[name] for name in together})
    assert found["fits"][0]["loss"] < 10  # the variance of the target
    assert 0 < found["throughput"][1]["steps_per_s"] < 50  # each computes for 0.02 s
    assert found["slow_kernel"][0]["median_s"] > 0


BARE = """
import os, sys
for name in ("wandb", "jsonargparse", "hatchling", "sklearn", "psutil"):
    sys.modules[name] = None
sys.path = [p for p in sys.path if not os.path.isdir(os.path.join(p, "lightning_dsgd"))]
"""
"""What every Python does first: it has neither the package nor more than the command needs."""


def rehearse(folder: Path) -> subprocess.Popen[str]:
    (folder / "sitecustomize.py").write_text(BARE)
    bare = {
        "PYTHONPATH": str(folder),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # the entry point is of what is installed
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu.py"),
        "--rehearse",
        "--output",
        "r.json",
    ]
    return subprocess.Popen(
        command, cwd=folder, env=os.environ | bare, stdout=subprocess.PIPE, text=True
    )


def test_the_command_loses_nothing_where_it_is_killed(tmp_path: Path) -> None:
    """It runs from a checkout that is not installed."""
    with rehearse(tmp_path) as process:
        assert process.stdout is not None
        said = next((line for line in process.stdout if line.startswith("staging: ")), "")
        process.kill()
    result = json.loads((tmp_path / "r.json").read_text())
    assert said, "it has ended before anything was measured"
    assert result["measured"]["selection"][0]["elements"] == 10_000
    assert result["measured"]["staging"][0]["bytes"] == 4096
    assert not result["is_whole"]
