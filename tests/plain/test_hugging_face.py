"""Hugging Face's Trainer: the subclass in docs/plain_pytorch.md, word for word; and recorded."""

from __future__ import annotations

import re
import sys
import time
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_dsgd as dsgd
from lightning_dsgd.lab.diagnose.times import read
from lightning_dsgd.lab.diagnose.verdict import judge
from lightning_dsgd.lab.timeline.trace import read_folder
from tests.support.models import weights
from tests.support.mpi import ROOT
from tests.support.worlds import FitWorld
from tests.why.jobs import SCRIPTS, watched

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None,
    reason="transformers is not installed: make test-peft installs it apart",
)


def block_with(text: str) -> str:
    page = (ROOT / "docs" / "plain_pytorch.md").read_text()
    found = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return str(next(block for block in found if text in block))


def make_trainer_class() -> Any:
    names: dict[str, Any] = {}
    exec(block_with("class DecentralizedTrainer"), names)
    return names["DecentralizedTrainer"]


def train_with_accelerate() -> tuple[Tensor, float, float]:
    import accelerate

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    x = torch.randn(64, 4)
    y = x.sum(1, keepdim=True)
    names: dict[str, Any] = {
        "accelerate": accelerate,
        "dsgd": dsgd,
        "model": model,
        "loader": DataLoader(TensorDataset(x, y), 4),
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "loss_of": torch.nn.MSELoss(),
    }
    before = names["loss_of"](model(x), y).item()
    exec(block_with("accelerate.Accelerator"), names)
    return weights(model), before, names["loss_of"](model(x), y).item()


def test_a_loop_with_accelerate_learns() -> None:
    (x, before, after), (their_x, *_) = FitWorld().run(2, train_with_accelerate)
    assert torch.equal(x, their_x)
    assert after < before / 2


def train(folder: str, name: str) -> tuple[Tensor, Tensor, list[float], float, float]:
    """A tiny model with random weights that learns to count."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    rows = [torch.arange(first, first + 8) % 16 for first in range(16)] * 4
    data = [{"input_ids": row, "labels": row} for row in rows]
    args = transformers.TrainingArguments(
        folder, use_cpu=True, num_train_epochs=6, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, learning_rate=3e-2, eval_strategy="epoch",
        save_strategy="epoch", save_total_limit=1, logging_steps=4, report_to=[],
        disable_tqdm=True, max_grad_norm=0.5,
    )  # fmt: skip
    algorithm: Any = {"wagma": dsgd.WAGMA(), "allreduce": dsgd.AllReduce()}[name]
    trainer = make_trainer_class()(
        model, args, train_dataset=data, eval_dataset=data[:16], algorithm=algorithm
    )
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    after = trainer.evaluate()["eval_loss"]
    saved = transformers.GPT2LMHeadModel.from_pretrained(
        f"{folder}/checkpoint-{trainer.state.global_step}"
    )
    return weights(model), weights(saved), losses, after, trainer.state.global_step


@pytest.mark.parametrize("name", ["wagma", "allreduce"])
def test_hugging_faces_trainer_learns_and_saves_the_consensus(name: str, tmp_path: Any) -> None:
    first, second = FitWorld().outcomes(2, train, str(tmp_path), name)
    assert (first.error, second.error) == ("", "")
    (x, saved, losses, after, num_steps), (their_x, _, theirs, _, _) = first.result, second.result
    assert num_steps == 24
    assert torch.equal(x, their_x)
    assert torch.equal(x, saved)
    assert losses == theirs
    assert losses[-1] == pytest.approx(after)
    assert losses[-1] < losses[0] / 2


LATE_S = 0.1


def traced(folder: str) -> None:
    """A rank that is late in reading its batches, in Hugging Face's own DDP."""
    import transformers

    class Data:
        def __init__(self, slow_rank: int) -> None:
            self.slow_rank = slow_rank

        def __len__(self) -> int:
            return 52

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            time.sleep(LATE_S if dist.get_rank() == self.slow_rank else 0.0)
            return {"x": torch.ones(10), "labels": torch.ones(1)}

    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(10, 1)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": (self.layer(x) - labels).square().mean()}

    model = Small()
    args = transformers.TrainingArguments(
        folder, use_cpu=True, num_train_epochs=1, per_device_train_batch_size=1, report_to=[],
        gradient_accumulation_steps=1, logging_steps=8, eval_strategy="steps", eval_steps=13,
        save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    data: Any = Data(slow_rank=1)
    validation: Any = Data(slow_rank=-1)
    trace: Any = dsgd.LoopTrace(folder)
    transformers.Trainer(
        model, args, train_dataset=data, eval_dataset=validation, callbacks=[trace]
    ).train()


def test_hugging_faces_trainer_is_recorded_and_judged(tmp_path: Any) -> None:
    FitWorld().run(2, traced, str(tmp_path))
    for trace in read_folder(tmp_path):
        assert trace.about["strategy"] == "ddp"
        assert [step.number for step in trace.steps] == list(range(1, 27))
        assert [step.number for step in trace.steps if step.evaluate] == [14]
        for step in trace.steps:
            assert len(step.sum) == len(step.forward) == len(step.optimizer) == 1
            assert step.items == (11 if step.number > 1 else 0)  # found in the first step
    found = judge(read(tmp_path))
    assert (found.cause, found.ranks) == ("loader", (1,))
    assert found.late_s == pytest.approx(LATE_S, rel=0.5)


@pytest.mark.timeout(300)
def test_hugging_faces_trainer_is_judged_without_an_edit(tmp_path: Any) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    script = str(SCRIPTS / "slow_trainer.py")
    job = watched(tmp_path / "run", *torchrun, "--nproc-per-node=2", script)
    assert job.status == 0, job.said
    assert "why: Verdict: rank 1 waits for the data loader" in job.said, job.said
    assert "TrainingArguments(dataloader_num_workers=" in job.said
    for trace in read_folder(tmp_path / "run" / "steps"):
        assert trace.about["face"] == "hugging_face"
        assert [step.number for step in trace.steps] == list(range(1, 41))
        assert {step.items for step in trace.steps} == {11}
