"""`StepTrace` in real fits: who waited for whom, with our strategies and with DDP."""

from __future__ import annotations

import contextlib
import io
import statistics
import time
import warnings
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_dsgd import LoopTrace, StepTrace, StragglerInjector
from lightning_dsgd.lab.diagnose.remedies import remedies
from lightning_dsgd.lab.diagnose.times import read
from lightning_dsgd.lab.diagnose.verdict import judge
from lightning_dsgd.lab.drawing.spans import tracks
from lightning_dsgd.lab.timeline.trace import Trace, read_folder
from tests.support.models import Regression, loader, trainer, weights
from tests.support.trackers import wandb_logger
from tests.support.worlds import FitWorld

DELAY_S = 0.4
SEED = 10  # each of two ranks is late in four of eight steps


def fit(strategy: str, folder: Path) -> None:
    callbacks = [StragglerInjector(DELAY_S, seed=SEED), StepTrace(folder)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(strategy, 2, callbacks=callbacks).fit(Regression(), loader())


def late_rank(step: int) -> int:
    (rank,) = StragglerInjector(DELAY_S, seed=SEED).delayed_ranks(step - 1, 2)
    return rank


def check_waits(traces: list[Trace], src_of: Any) -> None:
    """Whoever was not delayed has waited for the one that was; a busy machine may add a pause."""
    for track, trace in zip(tracks(traces, 1, 100), traces, strict=True):
        by_lateness: dict[bool, list[float]] = {True: [], False: []}
        for step in trace.steps:
            late = late_rank(step.number)
            longest = max(step.wait, key=lambda wait: wait[1] - wait[0], default=(0.0, 0.0, -2))
            by_lateness[trace.rank == late].append(longest[1] - longest[0])
            if trace.rank != late and longest[1] - longest[0] > 0.5 * DELAY_S:
                assert longest[2] == src_of(late)
                # A rank that the machine has stopped, once the other's message was there, waits for
                # nobody meanwhile.
                waits = [s for s in track.spans if s.step == step.number and s.kind == "wait"]
                blamed = [span for span in waits if span.who >= 0]
                assert max(blamed, key=lambda span: span.end_s - span.begin_s).who == late
        assert median(by_lateness[False]) > 0.5 * DELAY_S > median(by_lateness[True])


def test_a_wait_is_recorded_with_the_rank_it_was_for(tmp_path: Path) -> None:
    FitWorld().run(2, fit, "allreduce", tmp_path)
    traces = read_folder(tmp_path)
    assert [trace.rank for trace in traces] == [0, 1]
    for trace in traces:
        assert [step.number for step in trace.steps] == list(range(1, 9))
        assert (trace.about["strategy"], trace.about["waits"]) == ("allreduce", "by rank")
        assert trace.about["parameters"] == 10 * 16 + 16 + 32 + 16 + 1
        assert trace.about["epoch_steps"] == 8
        assert trace.end == "training has ended"
    check_waits(traces, lambda late: late)
    own = [[step.own_s for step in trace.steps] for trace in traces]
    for rank, times in enumerate(own):
        late = [s for i, s in enumerate(times, 1) if late_rank(i) == rank]
        others = [s for i, s in enumerate(times, 1) if late_rank(i) != rank]
        assert min(late) > DELAY_S > median(others)


class Hooked(DDPStrategy):
    """With its user's own comm hook, registered when the model is wrapped."""

    num_calls = 0

    def hook(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations
        assert state == "mine"
        self.num_calls += 1
        return default_hooks.allreduce_hook(None, bucket)

    def configure_ddp(self) -> None:
        super().configure_ddp()
        self.model.register_comm_hook("mine", self.hook)


def fit_ddp(folder: Path | None, *, hooked: bool = False) -> torch.Tensor:
    torch.manual_seed(0)
    model, strategy = Regression(), Hooked() if hooked else "ddp"
    callbacks: list[L.Callback] = [] if folder is None else [StepTrace(folder)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(strategy, 3, callbacks=callbacks).fit(
            model, loader(num_samples=96), loader(num_samples=24)
        )
    assert torch.distributed.broadcast.__code__.co_name != "timed"
    assert not isinstance(strategy, Hooked) or strategy.num_calls == 4
    return weights(model)


@pytest.mark.parametrize("hooked", [False, True])
def test_the_sums_of_ddp_are_seen_and_no_weight_changes(hooked: bool, tmp_path: Path) -> None:
    """A hook of the user's own goes on as before."""
    train = partial(fit_ddp, hooked=hooked)
    plain, traced = (FitWorld().run(3, train, folder) for folder in (None, tmp_path))
    assert all(torch.equal(theirs, ours) for theirs, ours in zip(plain, traced, strict=True))
    waits_s = []
    for trace in read_folder(tmp_path):
        assert (trace.about["sums"], trace.about["clock"]) == ("seen", "host")
        assert trace.about["cores"] >= 1
        assert trace.about["threads"] == 1
        assert trace.about["processors"] in ("seen", "guessed")
        assert trace.steps[0].running is not None
        for step in trace.steps:
            ((ready_s, over_s, num_bytes),) = step.sum
            assert num_bytes == 4 * trace.about["parameters"]
            (forward,), (backward,), (optimizer,) = step.forward, step.backward, step.optimizer
            assert forward[1] <= backward[0] <= ready_s <= over_s <= backward[1] <= optimizer[0]
            assert step.load[0][1] <= step.fetch[-1][1] <= forward[0] + 1e-3
            assert step.items == 8 * 11
            # It waits for processors before it comes to a meeting.
            assert len(step.short) == len(step.exchange)
            assert min(step.short) >= 0
            assert step.number == 1 or sum(step.short) <= step.end_s - step.begin_s + 1e-3
            # The question for SIGTERM, and the sum; the model has no buffers.
            *_, question, of_sum = step.exchange
            assert question[1] <= of_sum[0] <= ready_s
            waits_s.append(ready_s - of_sum[0])
            assert over_s <= of_sum[1]
    assert statistics.median(waits_s) < 1e-3  # a busy machine may come between in some steps


def test_one_rank_records_its_steps_and_wandb_shows_them_as_a_panel(tmp_path: Path) -> None:
    """Training goes on where nothing can be written."""
    logger, run = wandb_logger(tmp_path)
    taken = tmp_path / "file"
    taken.touch()
    callbacks = [StepTrace(tmp_path / "run"), StepTrace(taken)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer("auto", 1, callbacks=callbacks, logger=logger).fit(Regression(), loader())
    (trace,) = read_folder(tmp_path / "run")
    assert (len(trace.steps), trace.about["waits"]) == (16, "not seen")
    said = " ".join(str(w.message) for w in caught)
    assert "StepTrace records no more on rank 0, and training goes on" in said
    assert "the run gets no timeline" in said
    page = run.logged["dsgd/timeline"]
    assert type(page).__name__ == "Html"
    assert '"name":"singledevice, 1 rank"' in page.html


# ---- `LoopTrace` in loops of plain PyTorch and of Fabric: the same record as the Trainer's ----
LATE_S = 0.2
STEPS = 24


def sharded(model: nn.Module, mesh: Any = None) -> nn.Module:
    for layer in (*model.children(), model):
        fully_shard(layer, mesh=mesh or init_device_mesh("cpu", (2,)))
    return model


def wrapped(face: str) -> tuple[nn.Module, Any, Any]:
    model = nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 1))
    backward: Any = torch.Tensor.backward
    if face == "fabric, shards":
        strategy = ModelParallelStrategy(
            lambda model, mesh: sharded(model, mesh["data_parallel"]), 2, 1
        )
        fabric = Fabric(strategy=strategy, accelerator="cpu", devices=2)
        fabric.launch()
        model = fabric.setup(model)
        optimizer: Any = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.01))
        return model, optimizer, fabric.backward
    model = DistributedDataParallel(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), backward


def loop(folder: Path | None, face: str) -> float:
    torch.manual_seed(0)
    model, optimizer, backward = wrapped(face)
    loss = torch.zeros(())
    saved: dict[int, io.BytesIO] = {}
    with (
        contextlib.nullcontext() if folder is None else LoopTrace(folder, model, optimizer) as trace
    ):
        if face == "plain":
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        batches = torch.ones(STEPS, 4, 10).unbind()
        for x in trace.batches(batches) if trace else batches:
            if dist.get_rank() == 1 and trace:
                time.sleep(LATE_S)
            # A meeting of the user's own: without it, both ranks would seem to be late.
            dist.all_reduce(torch.zeros(1))
            optimizer.zero_grad()
            loss = model(x).square().mean()
            backward(loss)
            optimizer.step()
            if trace and dist.get_rank() == 0 and len(saved) < 4:
                torch.save(torch.ones(1_000_000), saved.setdefault(len(saved), io.BytesIO()))
        with trace.evaluating() if trace else contextlib.nullcontext():
            model(x)
    assert dist.all_reduce.__code__.co_name != "timed"
    assert torch.save.__code__.co_name != "timed"
    return loss.item()


def accumulate(folder: Path) -> None:
    """Steps of three batches, with buffers, which DDP sends once a step."""
    model = DistributedDataParallel(nn.BatchNorm1d(3))
    with LoopTrace(folder, model) as trace:
        for number, x in enumerate(trace.batches(torch.randn(12, 4, 3).unbind())):
            with contextlib.nullcontext() if number % 3 == 2 else model.no_sync():
                model(x).square().mean().backward()


def test_buffers_that_ddp_does_not_send_are_no_meeting(tmp_path: Path) -> None:
    FitWorld().run(2, accumulate, tmp_path)
    for trace in read_folder(tmp_path):
        assert [len(step.forward) for step in trace.steps] == [3] * 4
        assert [len(step.exchange) for step in trace.steps] == [2] * 4  # buffers, and the sum


@pytest.mark.parametrize("face", ["plain", "fabric, shards"])
def test_a_loop_is_recorded_and_judged(face: str, tmp_path: Path) -> None:
    losses = FitWorld().run(2, loop, tmp_path, face)
    is_sharded = face.endswith("shards")
    if is_sharded:  # one loop stands for all
        assert FitWorld().run(2, loop, None, face) == losses
    for trace in read_folder(tmp_path):
        assert [step.number for step in trace.steps] == list(range(1, STEPS + 1))
        assert trace.about["sums"] == "seen"
        assert sum(len(step.save) for step in trace.steps) == (4 if trace.rank == 0 else 0)
        assert trace.about["strategy"] == ("fully_shard" if is_sharded else "ddp")
        for step in trace.steps:
            assert len(step.sum) == (2 if is_sharded else 1)
            assert len(step.gather) == (4 if is_sharded else 0)
            assert [len(s) for s in (step.load, step.forward, step.backward, step.optimizer)] == [
                *(1, 1, 1, 1)
            ]
            assert step.items == 40
            assert len(step.exchange) == (1 + 4 + 2 if is_sharded else 2)
            if is_sharded:
                assert {bytes_ for *_, bytes_ in step.sum} == {4 * 44, 4 * 10}  # padded
                over = max(over for _, over, _ in step.sum)
                assert step.forward[0][1] <= step.sum[0][0] <= over <= step.optimizer[0][0]
    found = judge(read(tmp_path))
    assert (found.cause, found.ranks) == ("callbacks", (1,))
    assert found.last_share > 0.7
    assert found.late_s > 0.9 * LATE_S
    remedies_ = {remedy.name for remedy in remedies(read(tmp_path), found)}
    if is_sharded:
        assert "wagma" not in remedies_
    else:  # where processors are short, no strategy is named
        assert "wagma" in remedies_ or "cores" in remedies_


@pytest.mark.parametrize("end", ["on_evaluate", "on_predict"])
def test_an_evaluation_of_hugging_faces_is_a_part_of_its_device(end: str, tmp_path: Path) -> None:
    trace: Any = LoopTrace(tmp_path)
    with mock.patch.object(trace, "_turn_to") as turn_to:
        for event in ("on_prediction_step", "on_prediction_step", end):
            getattr(trace, event)()
    assert turn_to.mock_calls == [mock.call("evaluate"), mock.call("")]


def test_what_is_no_ddp_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a model in DistributedDataParallel, or sharded by"):
        LoopTrace(tmp_path, nn.Linear(2, 2))
    with pytest.raises(ValueError, match="max_mb must be positive, got max_mb=0; try 8"):
        LoopTrace(tmp_path, nn.Linear(2, 2), max_mb=0)
