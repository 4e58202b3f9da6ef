"""A user's script under every launcher: four ranks."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.mpi import ROOT, ended, every_mpi, mpiexec
from tests.support.torchrun import run_forked_by_torchrun
from tests.support.worlds import ParentWorld


def script(folder: Path) -> list[str]:
    return [str(ROOT / "tests/support/scripts/fit.py"), str(folder)]


def check(folder: Path, kind: str, transport: str) -> None:
    """All four ranks have trained together, as that environment, over that transport."""
    ranks: list[Any] = [torch.load(folder / f"rank_{rank}.pt") for rank in range(4)]
    assert {rank["environment"] for rank in ranks} == {kind}
    assert {rank["transport"] for rank in ranks} == {transport}
    assert [rank["local_rank"] for rank in ranks] == [0, 1, 2, 3]
    assert {rank["steps"] for rank in ranks} == {4}
    assert all(torch.equal(rank["weights"], ranks[0]["weights"]) for rank in ranks)


def run_script(*arguments: str) -> None:
    sys.argv = list(arguments)
    runpy.run_path(arguments[0], run_name="__main__")


def test_the_agent_of_torchrun(tmp_path: Path) -> None:
    """It forks the ranks, which need not import torch and Lightning then."""
    ParentWorld().run(1, run_forked_by_torchrun, 4, run_script, *script(tmp_path))
    check(tmp_path, "TorchElasticEnvironment", "ProcessGroupTransport")


@pytest.mark.exhaustive
@every_mpi
def test_mpiexec(python: str, tmp_path: Path) -> None:
    done = ended([mpiexec(python), "-n", "4", python, *script(tmp_path)])
    assert done.returncode == 0, done.stderr
    check(tmp_path, "MPIEnvironment", "MPITransport")
