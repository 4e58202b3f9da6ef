"""`strategy="balanced"` beside Lightning's `ddp`: the same weights, whoever was late."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import lightning_dsgd as dsgd
import lightning_dsgd.pytorch_lightning as twins
from lightning_dsgd.trainer import step_sizes
from lightning_dsgd.trainer.named import strategy_of
from tests.support.fits import LATER, Plain, errors, fit, fp16, run, strategy
from tests.support.models import loader, trainer, weights
from tests.support.thorough import cases

VAL = {"num_samples": 32}


class Watched(Plain):
    """Logs what all ranks are asked for in each step, and notes what its callbacks see.

    Rank 1 computes its micro-batches after a pause.
    """

    pause_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.num_units = 0
        self.seen: list[dict[str, float]] = []
        self.num_hooks = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 1 and self.pause_s:
            threading.Event().wait(self.pause_s)
        self.num_units += 1
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.num_hooks += 1

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.seen.append({"val": float(self.trainer.callback_metrics["val_loss"])})

    def on_train_epoch_end(self) -> None:
        self.seen.append({"train": float(self.trainer.callback_metrics["train_loss_epoch"])})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Late(Watched):
    pause_s = 0.1


def outcome(name: str, make: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    chosen: dict[str, Any] = {"max_epochs": 2, "val": VAL, **kwargs}
    model, ran = fit(name, make, **chosen)
    return {
        "weights": weights(model).double(),
        "seen": getattr(model, "seen", []),
        "units": getattr(model, "num_units", 0),
        "hooks": getattr(model, "num_hooks", 0),
        "step": ran.global_step,
        "lr": ran.optimizers[0].param_groups[0]["lr"],
    }


def fit_both(make: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return outcome("balanced", make, dict(kwargs)), outcome("ddp", make, dict(kwargs))


def assert_equal_to_ddp(ranks: list[Any], *, num_slots: int) -> None:
    for ours, theirs in ranks:
        torch.testing.assert_close(ours["weights"], theirs["weights"], rtol=2e-5, atol=2e-6)
        assert (ours["step"], ours["hooks"]) == (theirs["step"], theirs["hooks"])
        assert ours["lr"] == pytest.approx(theirs["lr"])
        assert len(ours["seen"]) == len(theirs["seen"])
        for mine, ddp in zip(ours["seen"], theirs["seen"], strict=True):
            assert mine == pytest.approx(ddp, rel=1e-4)
        assert torch.equal(ours["weights"], ranks[0][0]["weights"])
    assert sum(ours["hooks"] for ours, _ in ranks) == num_slots


ACCUMULATED: dict[str, Any] = {
    "accumulate_grad_batches": 4,
    "val_check_interval": 3,  # within a step
    "gradient_clip_val": 0.5,
    "train": {"num_samples": 176, "shuffle": True},  # 11 batches of 2 ranks: the last step has 3
}


def test_weights_and_logs_are_ddps_with_a_late_rank() -> None:
    ranks = run(2, fit_both, Late, ACCUMULATED)
    assert_equal_to_ddp(ranks, num_slots=2 * 2 * 11)
    units = [ours["units"] for ours, _ in ranks]
    assert units[0] > units[1]
    assert sum(units) >= 2 * 2 * 11


def test_a_batch_is_split_where_nothing_is_accumulated() -> None:
    ranks = run(3, fit_both, Watched, {"train": {"num_samples": 120, "batch_size": 8}})
    assert_equal_to_ddp(ranks, num_slots=2 * 3 * 5)
    assert sum(ours["units"] for ours, _ in ranks) >= 2 * 15 * 4


OPTIONS: dict[str, dict[str, Any]] = {
    # Where a worker starts late the other rank computes, and logs, all of the first epoch.
    "workers": {"train": {"num_samples": 128, "num_workers": 1, "persistent_workers": True}},
    "fp16": {"plugins": "fp16"},
    "bf16": {"precision": "bf16-mixed"},
    "limits": {"limit_train_batches": 5, "max_steps": 3},
    "time": {"max_time": {"hours": 1}, "overfit_batches": 4},
    "split": {"options": {"micro_batches": 3, "backups": False}},
}


@cases("name", now=["split"], later=[name for name in OPTIONS if name != "split"])
def test_options_mean_what_they_mean_with_ddp(name: str) -> None:
    for ours, theirs in run(2, fit_with, OPTIONS[name]):
        torch.testing.assert_close(ours["weights"], theirs["weights"], rtol=1e-3, atol=1e-4)
        assert ours["step"] == theirs["step"]


def fit_with(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    found = []
    for name in ("balanced", "ddp"):
        chosen = {"accumulate_grad_batches": 2, **kwargs}
        if name == "ddp":
            chosen.pop("options", None)
        if chosen.get("plugins") == "fp16":
            chosen["plugins"] = fp16()
        found.append(outcome(name, Plain, chosen))
    return found[0], found[1]


def losses_with(wire_dtype: str) -> list[float]:
    chosen: dict[str, Any] = {"max_epochs": 4, "accumulate_grad_batches": 2, "val": VAL}
    options = [{}, {"wire_dtype": wire_dtype}]
    fits = [fit("balanced", Plain, **chosen, options=each)[1] for each in options]
    return [float(ran.callback_metrics["val_loss"]) for ran in fits]


@pytest.mark.parametrize("wire_dtype", ["int8", pytest.param("bfloat16", marks=LATER)])
def test_rounded_sums_end_at_the_loss_of_exact_ones(wire_dtype: str) -> None:
    for exact, rounded in run(2, losses_with, wire_dtype):
        assert rounded == pytest.approx(exact, rel=0.02)
        assert rounded != exact


def fit_and_resume(folder: str) -> tuple[Tensor, Tensor]:
    def go(path: str | None) -> Tensor:
        saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
        chosen = strategy("balanced")
        ran = trainer(
            chosen,
            int(os.environ["WORLD_SIZE"]),
            max_epochs=2,
            accumulate_grad_batches=2,
            callbacks=[saver],
            enable_checkpointing=True,
        )
        model = Plain()
        ran.fit(model, loader(128, shuffle=True), ckpt_path=path)
        return weights(model)

    straight = go(None)
    return straight, go(str(Path(folder) / "step=3.ckpt"))


def test_a_resume_within_an_epoch_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    for straight, resumed in run(2, fit_and_resume, str(tmp_path)):
        torch.testing.assert_close(straight, resumed, rtol=1e-5, atol=1e-6)


def fit_to_resume(folder: str, path: str | None, name: str = "balanced") -> tuple[Tensor, int, int]:
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    ran = trainer(
        name if name == "ddp" else strategy(name),
        int(os.environ["WORLD_SIZE"]),
        max_epochs=2,
        accumulate_grad_batches=2,
        callbacks=[saver] if path is None else [],
        enable_checkpointing=path is None,
    )
    model = Plain()
    ran.fit(model, loader(128, shuffle=True), ckpt_path=path)
    return weights(model), ran.global_step, ran.accumulate_grad_batches


@pytest.mark.parametrize(
    ("before", "now"), [(3, 2), pytest.param(2, 3, marks=LATER), pytest.param(2, 1, marks=LATER)]
)
def test_a_resume_on_other_ranks_keeps_the_batch_of_a_step(
    before: int, now: int, tmp_path: Path
) -> None:
    [(straight, num_steps, _), *_] = run(before, fit_to_resume, str(tmp_path), None)
    path = str(tmp_path / "step=1.ckpt")  # within the first epoch
    for resumed, same_steps, accumulate in run(now, fit_to_resume, str(tmp_path), path):
        assert (same_steps, accumulate) == (num_steps, 2)
        torch.testing.assert_close(straight, resumed, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_from_before_there_were_homes_keeps_the_batch_of_a_step() -> None:
    ran = trainer("auto", 1)
    saved = {"lightning_dsgd_step": {"ranks": 3, "batches": 2}}
    assert (step_sizes.kept(ran, saved, 3), ran.accumulate_grad_batches) == (3, 1)
    assert (step_sizes.kept(ran, saved, 2), ran.accumulate_grad_batches) == (3, 2)


def test_lightnings_own_strategies_resume_from_its_checkpoints(tmp_path: Path) -> None:
    [(_, num_steps, _)] = run(1, fit_to_resume, str(tmp_path), None)
    path = str(tmp_path / "step=3.ckpt")
    [(_, same_steps, _)] = run(1, fit_to_resume, str(tmp_path), path, "ddp")
    assert same_steps == num_steps


def stop_early() -> tuple[int, Tensor]:
    class Stops(L.Callback):
        def on_train_batch_end(self, ran: Any, *args: Any) -> None:
            ran.should_stop = ran.should_stop or args[-1] == 2  # in the midst of a step

    early = EarlyStopping("val_loss", patience=1)
    model, ran = fit(
        "balanced",
        max_epochs=3,
        accumulate_grad_batches=4,
        callbacks=[Stops(), early],
        val=VAL,
        min_epochs=2,
    )
    return ran.global_step, weights(model)


def test_a_training_may_stop_in_the_midst_of_a_step() -> None:
    ranks = run(2, stop_early)
    assert len({step for step, _ in ranks}) == 1
    assert torch.equal(ranks[0][1], ranks[1][1])


# ---- refused, with the way out ----


def fit_stream() -> None:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Any:
            return iter(torch.randn(32, 10))

    model = Plain()
    trainer(strategy("balanced"), 2).fit(model, DataLoader(Stream(), 4))


def fit_other_data() -> None:
    own = loader(64 + 8 * int(os.environ["RANK"]))
    trainer(strategy("balanced"), 2, use_distributed_sampler=False).fit(Plain(), own)


def fit_manually() -> None:
    class Manual(Plain):
        automatic_optimization = False

    fit("balanced", Manual)


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (fit_stream, 'got DataLoader of Stream with strategy="balanced"; use strategy="allreduce"'),
        (fit_other_data, "must have the same data set, got sets of [64, 72] samples, by rank"),
        (fit_manually, "automatic_optimization=False"),
    ],
)
def test_what_cannot_be_shared_is_refused(fn: Any, text: str) -> None:
    for error in errors(2, fn):
        assert text in error


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"data": "claimed"}, "shares the batches of each step by itself"),
        ({"micro_batches": 0}, "micro_batches"),
    ],
)
def test_options_that_it_cannot_honour_are_refused(option: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        strategy_of("balanced", **option)


def test_its_name_is_known() -> None:
    chosen = L.Trainer(strategy="balanced", accelerator="cpu", devices=1, logger=False).strategy
    assert isinstance(chosen, dsgd.BalancedStrategy)


@pytest.mark.parametrize("home", [dsgd, twins])
def test_its_algorithm_need_not_be_named(home: Any) -> None:
    strategy = home.BalancedStrategy(on_loss="continue")
    assert strategy.algorithm == dsgd.Balanced()
    assert strategy.in_force["on_loss"] == "continue"


@pytest.mark.parametrize(
    ("strategy", "algorithm", "write"),
    [
        (
            dsgd.DecentralizedStrategy,
            dsgd.Balanced(backups=False),
            "BalancedStrategy(lightning_dsgd.Balanced(backups=False))",
        ),
        (
            dsgd.BalancedStrategy,
            dsgd.WAGMA(group_size=2),
            "DecentralizedStrategy(lightning_dsgd.WAGMA(group_size=2))",
        ),
    ],
    ids=["units", "steps"],
)
def test_a_strategy_that_cannot_drive_an_algorithm_names_the_one_that_can(
    strategy: Any, algorithm: dsgd.Algorithm, write: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"write lightning_dsgd.{write}")):
        strategy(algorithm)
