"""Training that ends or saves by the clock: after the same batch on all ranks, and nobody waits.

Clocks are the tests' own: it is time when a rank has made so many batches.
"""

from __future__ import annotations

import os
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from torch.utils.data import DataLoader, IterableDataset

from lightning_dsgd.trainer.named import strategy_of
from tests.support.models import Regression, loader, trainer, weights
from tests.support.thorough import cases
from tests.support.worlds import FitWorld


def rank() -> int:
    return int(os.environ["RANK"])


# ---- the end ----
def await_answer(trainer: Any) -> None:
    """Until it is agreed after which batch all do what this rank has asked for."""
    while trainer.strategy.session.training.agreed._unanswered:
        time.sleep(0.001)  # between two looks


class Until(Timer):
    """Whose time is up, on one rank alone, after so many batches of it.

    The others wait for the agreement in these of their batches, as else they may be far ahead.
    """

    def __init__(
        self,
        of_rank: int,
        num_batches: int,
        waits: dict[int, int] | None = None,
        folder: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(duration=timedelta(hours=1), **kwargs)
        self.of_rank, self.num_batches, self.seen = of_rank, num_batches, 0
        self.asker_waits = waits is not None
        self.waits, self.agreed = waits or {}, Path(folder, "agreed")

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.seen += 1
        super().on_train_batch_end(trainer, *args, **kwargs)
        if self.asker_waits and rank() == self.of_rank and self.seen == self.num_batches:
            await_answer(trainer)
            self.agreed.touch()
        while self.seen == self.waits.get(rank()) and not self.agreed.exists():
            time.sleep(0.001)  # between two looks

    def time_elapsed(self, stage: str = "train") -> float:
        return 4000.0 if rank() == self.of_rank and self.seen >= self.num_batches else 0.0


class Seen(L.Callback):
    num_validated = num_ends = 0

    def on_validation_end(self, *args: Any) -> None:
        self.num_validated += 1

    def on_train_end(self, *args: Any) -> None:
        self.num_ends += 1


def fit_by_time(name: str, timer: Timer, num_samples: list[int], **options: Any) -> Any:
    seen = Seen()
    model = Regression(lr=0.001)  # alone and for long, a rank would diverge with more
    fitter = trainer(
        strategy_of(name, timeout_s=20),
        int(os.environ["WORLD_SIZE"]),
        callbacks=[seen, timer],
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        max_epochs=-1,
        **options,
    )
    fitter.fit(model, loader(num_samples[rank() % len(num_samples)]), loader(16))
    assert fitter.state.finished
    assert seen.num_ends == 1
    assert "_check_time_remaining" not in vars(timer)
    return {
        "steps": fitter.global_step,
        "epochs": fitter.current_epoch,
        "validated": seen.num_validated,
        "model": weights(model).tolist(),
    }


def fit_each(names: list[str], folder: str) -> list[Any]:
    results = []
    for name in names:
        os.makedirs(own := f"{folder}/{name}", exist_ok=True)
        results.append(fit_by_time(name, Until(1, 5, {0: 60}, own), [8000]))
    return [*results, fit_by_time("local_sgd", Until(0, 20, interval="epoch"), [128])]


def test_a_timer_ends_training_after_the_same_batch_on_all_ranks(tmp_path: Path) -> None:
    """Where it looks once an epoch, that of rank 0 counts, as in Lightning."""
    first, second = FitWorld().run(2, fit_each, ["local_sgd", "hpsgd"], str(tmp_path))
    assert first == second
    *by_batch, by_epoch = first
    for found in by_batch:
        assert 5 < found["steps"] < 1000
        assert found["validated"] == found["epochs"] == 1
    assert (by_epoch["steps"], by_epoch["epochs"]) == (32, 2)


def fit_unevenly(of_rank: int, at: int, validates: bool, folder: str) -> Any:
    options = {} if validates else {"limit_val_batches": 0}
    # Rank 1 is ahead of all others, in the epoch in which the rank asks.
    waits = {} if of_rank == 1 else {1: 190 if of_rank == 2 else 90}
    return fit_by_time("no_sync", Until(of_rank, at, waits, folder), [80, 800, 240], **options)


@cases("of_rank, at, validates", now=[(2, 35, True)], later=[(2, 35, False), (0, 10, True)])
def test_uneven_ranks_end_after_one_epoch(
    of_rank: int, at: int, validates: bool, tmp_path: Path
) -> None:
    """Rank 0 has 10 batches an epoch, rank 1 100 and rank 2 30: they wait where others go on."""
    results = FitWorld().run(3, fit_unevenly, of_rank, at, validates, str(tmp_path))
    (epochs,) = {result["epochs"] for result in results}
    assert [result["steps"] for result in results] == [10 * epochs, 100 * epochs, 30 * epochs]
    assert {result["validated"] for result in results} == {epochs * validates}
    assert results[0]["model"] == results[1]["model"] == results[2]["model"]
    if validates:
        assert epochs == (2 if of_rank == 2 else 1)


# ---- the checkpoints ----
class Stream(IterableDataset[Any]):
    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.num_batches):
            x = torch.randn(8, 10, generator=generator)
            yield x, x.sum(1, keepdim=True)


class SaveAt(ModelCheckpoint):
    """Its time comes, on one rank alone, after each of these batches."""

    def __init__(self, folder: str, of_rank: int, at: list[int], **kwargs: Any) -> None:
        defaults = {"filename": "{step}", "save_top_k": -1}
        super().__init__(folder, train_time_interval=timedelta(hours=1), **{**defaults, **kwargs})
        self.of_rank, self.at, self.seen = of_rank, at, 0

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.seen += 1
        is_time = rank() == self.of_rank and self.seen in self.at
        if is_time:
            self._last_time_checked = -1e9
        super().on_train_batch_end(trainer, *args, **kwargs)
        if is_time:  # else this rank may be far ahead of the answer
            await_answer(trainer)


class Paced(Regression):
    """In these of its batches each of two ranks waits until the other has begun others."""

    def __init__(self, folder: str, *waits: dict[int, int]) -> None:
        super().__init__()
        self.folder, self.waits, self.begun = Path(folder), waits[rank()], -1

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.begun += 1  # in all epochs
        (self.folder / f"begun_{rank()}_{self.begun}").touch()
        if self.begun in self.waits:
            while not (self.folder / f"begun_{1 - rank()}_{self.waits[self.begun]}").exists():
                time.sleep(0.001)  # between two looks
        return super().training_step(batch, batch_idx)


def fit_and_save(
    saver: ModelCheckpoint,
    num_batches: list[int],
    epochs: int,
    model: L.LightningModule | None = None,
    **options: Any,
) -> int:
    fitter = trainer(
        strategy_of("no_sync", timeout_s=20),
        int(os.environ["WORLD_SIZE"]),
        callbacks=[saver],
        max_epochs=epochs,
        enable_checkpointing=True,
        num_sanity_val_steps=0,
        **options,
    )
    data = Stream(num_batches[rank() % len(num_batches)])
    interval = saver._train_time_interval
    fitter.fit(model or Regression(), DataLoader(data, batch_size=None), loader(16))
    assert saver._train_time_interval == interval
    assert "on_train_batch_end" not in vars(saver)
    return fitter.global_step


def save_by_time(folder: str) -> int:
    model = Paced(folder, {10: 6, 105: 101}, {})
    return fit_and_save(SaveAt(folder, 1, [5, 100]), [200], 1, model, limit_val_batches=0)


def test_a_checkpoint_by_time_is_saved_after_the_same_batch_on_all_ranks(tmp_path: Path) -> None:
    """And the next when it is time again, with the callback's state under its own name.

    Rank 0 hears of it in the midst of many batches: what it hears after its last one is too late.
    """
    assert FitWorld().run(2, save_by_time, str(tmp_path)) == [200] * 2
    steps = sorted(int(file.stem[5:]) for file in tmp_path.glob("*.ckpt"))
    for step in steps:
        file = tmp_path / f"step={step}.ckpt"
        shared = torch.load(file, weights_only=True)
        assert shared["global_step"] == step
        for own in range(2):
            replica = torch.load(f"{file}.replicas/rank_{own:05d}.pt", weights_only=True)
            assert replica["global_step"] == step
        assert any("'train_time_interval': datetime" in key for key in shared["callbacks"])
    assert len(steps) == 2
    assert 5 < steps[0] <= 100 < steps[1] <= 200


def save_a_stream(folder: str) -> tuple[int, int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saver = SaveAt(folder, 1, [45, 46, 60, 80])
        steps = fit_and_save(saver, [20, 50], 2, limit_val_batches=0)
    said = [str(warning.message) for warning in caught]
    return steps, sum("a checkpoint by train_time_interval is left out" in text for text in said)


def test_a_checkpoint_that_a_rank_is_too_short_for_is_left_out(tmp_path: Path) -> None:
    """Streams of unknown, different lengths: rank 0 waits at the end of its training."""
    assert FitWorld().run(2, save_a_stream, str(tmp_path)) == [(40, 1), (100, 0)]
    for file in tmp_path.glob("*.ckpt"):
        assert len(list(Path(f"{file}.replicas").iterdir())) == 2


def save_in_the_last_batch(folder: str) -> list[tuple[int, float]]:
    """Rank 1 asks in its batch 15, when rank 0 is in the last but one of its epoch."""
    found = []
    for number, options in enumerate(({"save_last": "link"}, {"monitor": "val_loss"})):
        os.makedirs(own := f"{folder}/{number}", exist_ok=True)
        saver = SaveAt(own, 1, [14, 15], **options)
        model = Paced(own, {18: 15}, {14: 18})
        steps = fit_and_save(saver, [20, 50], 2, model, val_check_interval=10)
        found.append((steps, float(saver.best_model_score or 0.0)))
    return found


def test_a_checkpoint_in_the_last_batch_of_one_rank_is_saved_on_all(tmp_path: Path) -> None:
    """Then that rank has saved at its step when its epoch ends, and the other has not."""
    first, second = FitWorld().run(2, save_in_the_last_batch, str(tmp_path))
    assert [steps for steps, _ in first] == [40] * 2
    assert [steps for steps, _ in second] == [100] * 2
    assert [score for _, score in first] == [score for _, score in second]
    assert {file.name for file in (tmp_path / "0").glob("*.ckpt")} == {"step=20.ckpt", "last.ckpt"}
    assert {file.name for file in (tmp_path / "1").glob("*.ckpt")} == {"step=20.ckpt"}
