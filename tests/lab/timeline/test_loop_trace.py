"""`LoopTrace` in loops of plain PyTorch and of Fabric: the same record as the Trainer's."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lightning_dsgd import LoopTrace
from lightning_dsgd.lab.diagnose.times import read
from lightning_dsgd.lab.diagnose.verdict import judge
from lightning_dsgd.lab.timeline.trace import read_folder
from tests.support.worlds import FitWorld

LATE_S = 0.2
STEPS = 26


def loop(folder: Path, face: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(10, 1)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if face == "fabric":
        fabric = Fabric(strategy="ddp", accelerator="cpu", devices=2)
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        backward = fabric.backward
    else:
        model, backward = DistributedDataParallel(model), torch.Tensor.backward
    if face == "hooked before":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    with LoopTrace(folder, model, optimizer) as trace:
        if face == "plain":
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        for x in trace.batches(torch.ones(STEPS, 4, 10).unbind()):
            if dist.get_rank() == 1:
                time.sleep(LATE_S)
            # A meeting of the user's own: without it, both ranks would seem to be late.
            dist.all_reduce(torch.zeros(1))
            optimizer.zero_grad()
            backward(model(x).square().mean())
            optimizer.step()
        with trace.evaluating():
            model(x)


@pytest.mark.parametrize("face", ["plain", "fabric", "hooked before"])
def test_a_loop_is_recorded_and_judged(face: str, tmp_path: Path) -> None:
    FitWorld().run(2, loop, tmp_path, face)
    for trace in read_folder(tmp_path):
        assert [step.number for step in trace.steps] == list(range(1, STEPS + 1))
        assert trace.about["sums"] == ("the last" if face == "hooked before" else "seen")
        for step in trace.steps:
            assert len(step.sum) == (face != "hooked before")
            assert [len(s) for s in (step.load, step.forward, step.backward, step.optimizer)] == [
                *(1, 1, 1, 1)
            ]
            assert step.items == 40
            assert len(step.exchange) == 2
    found = judge(read(tmp_path))
    assert (found.cause, found.ranks) == ("callbacks", (1,))
    assert found.last_share > 0.7
    assert found.late_s > 0.9 * LATE_S


def test_what_is_no_ddp_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a model in torch's DistributedDataParallel"):
        LoopTrace(tmp_path, nn.Linear(2, 2))
    with pytest.raises(ValueError, match="max_mb must be positive, got max_mb=0; try 8"):
        LoopTrace(tmp_path, nn.Linear(2, 2), max_mb=0)
