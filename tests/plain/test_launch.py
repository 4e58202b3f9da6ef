"""The script of docs/plain_pytorch.md, word for word, under every launcher."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

import pytest
import torch

from tests.support.models import weights
from tests.support.mpi import ROOT, ended, every_mpi, mpiexec
from tests.support.torchrun import run_forked_by_torchrun
from tests.support.worlds import ParentWorld

PAGE = ROOT / "docs" / "plain_pytorch.md"
RUN = """
import runpy, sys, torch
names = runpy.run_path("train.py", run_name="__main__")
out = {"weights": torch.cat([p.detach().reshape(-1) for p in names["model"].parameters()]),
       "loss": names["valid_loss"], "world": names["replica"].world_size,
       "lightning": "lightning" in sys.modules}
torch.save(out, f"rank_{names['replica'].rank}.pt")
"""


def script(folder: Path) -> str:
    """Puts the page's script into a folder, and one that runs it and notes what came of it."""
    found = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (text,) = (block for block in found if block.startswith("# train.py"))
    folder.joinpath("train.py").write_text(text)
    folder.joinpath("run.py").write_text(RUN)
    return "run.py"


def check(folder: Path, num_ranks: int) -> None:
    ranks = [torch.load(folder / f"rank_{rank}.pt") for rank in range(num_ranks)]
    assert [rank["world"] for rank in ranks] == [num_ranks] * num_ranks
    assert all(torch.equal(rank["weights"], ranks[0]["weights"]) for rank in ranks)
    assert len({rank["loss"] for rank in ranks}) == 1
    assert ranks[0]["loss"] < 0.5  # 8 is the variance of the target
    saved = torch.load(folder / "last.pt", weights_only=True)
    assert saved["extras"] == {"epoch": 9}
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model.load_state_dict(saved["state_dict"])
    assert torch.equal(weights(model), ranks[0]["weights"])


def run_script(folder: str) -> None:
    os.chdir(folder)
    runpy.run_path("run.py", run_name="__main__")


def test_the_agent_of_torchrun(tmp_path: Path) -> None:
    """It forks the ranks, which need not import torch then."""
    script(tmp_path)
    ParentWorld().run(1, run_forked_by_torchrun, 3, run_script, str(tmp_path))
    check(tmp_path, 3)


@pytest.mark.exhaustive
@every_mpi
def test_mpiexec(python: str, tmp_path: Path) -> None:
    command = [mpiexec(python), "-n", "4", python, "-m", "mpi4py", script(tmp_path)]
    done = ended(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert not any(torch.load(file)["lightning"] for file in tmp_path.glob("rank_*.pt"))
    check(tmp_path, 4)
