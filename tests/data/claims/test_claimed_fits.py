"""Batches are claimed through `Trainer.fit`, on real processes."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from lightning_dsgd.trainer.named import strategy_of
from tests.support.fits import Plain, run
from tests.support.models import trainer
from tests.support.thorough import cases

SLOW_S, FAST_S = 0.15, 0.005
"""The seconds that a batch takes on the last rank, and on the others."""


class Numbered(Dataset[Tensor]):
    """Samples that say which they are."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), *range(9)])


class Writing(Plain):
    """Writes down which samples each epoch has, and what Lightning says of it."""

    def __init__(self, slow_s: float = SLOW_S) -> None:
        super().__init__()
        self.slow_s = slow_s
        self.by_epoch: dict[int, list[int]] = {}
        self.seen: list[int] = []

    def on_train_epoch_start(self) -> None:
        self.by_epoch.setdefault(self.current_epoch, [])

    @property
    def samples(self) -> list[list[int]]:
        """The samples of each epoch."""
        return list(self.by_epoch.values())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first = batch["one"] if isinstance(batch, dict) else batch
        self.by_epoch.setdefault(self.current_epoch, []).extend(first[:, 0].int().tolist())
        time.sleep(self.slow_s if self.global_rank == self.trainer.world_size - 1 else FAST_S)
        return self.net(first / 1000).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(sum(map(len, self.samples[-1:])))
        self.log("val_loss", self.net(batch / 1000).mean(), sync_dist=True)


def claimed(name: str = "popsgd") -> Any:
    return strategy_of(name, timeout_s=60.0, data="claimed")


def fit(
    size: int = 64,
    batch_size: int = 2,
    workers: int = 0,
    model: Any = None,
    train: Any = None,
    ckpt_path: str | None = None,
    data: str = "claimed",
    **kwargs: Any,
) -> tuple[Writing, L.Trainer]:
    torch.set_num_threads(1)
    model = model or Writing()
    strategy = strategy_of("popsgd", timeout_s=60.0, data=data)
    fitted = trainer(strategy, int(os.environ["WORLD_SIZE"]), **kwargs)
    if train is None:
        workers_live = {"num_workers": workers, "persistent_workers": workers > 0}
        train = DataLoader(Numbered(size), batch_size, shuffle=True, **workers_live)
    val = DataLoader(Numbered(4), 4) if kwargs.get("limit_val_batches") != 0 else None
    fitted.fit(model, train, val, ckpt_path=ckpt_path)
    return model, fitted


def all_once(ranks: list[list[list[int]]], size: int) -> bool:
    """Whether each epoch has every sample once, over all ranks."""
    epochs = [
        Counter(i for samples in epoch for i in samples) for epoch in zip(*ranks, strict=True)
    ]
    return epochs == [Counter(range(size))] * len(epochs)


def two_epochs() -> Any:
    model, fitted = fit(workers=1, max_epochs=2)
    return model.samples, fitted.num_training_batches, fitted.global_step, len(model.seen)


def test_a_slow_rank_makes_its_share_of_an_epoch_and_no_more() -> None:
    """Though its worker has loaded more: what it has not begun goes to ranks that have none."""
    ranks = run(2, two_epochs)
    samples = [samples for samples, *_ in ranks]
    assert all_once(samples, 64)
    numbers = [sum(map(len, each)) // 2 for each in samples]
    assert numbers == [steps for _, _, steps, _ in ranks]
    assert numbers[1] <= 16, numbers  # of 64
    assert [length for _, length, *_ in ranks] == [16] * 2
    assert [validations for *_, validations in ranks] == [1 + 2] * 2  # one before training


class OneCycle(Writing):
    """A schedule that may not have one step more than was planned."""

    num_more = 1
    """How many steps the schedule has more than planned: it is made one step in."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        planned = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=planned + self.num_more
        )
        self.planned, self.schedule = planned, schedule
        epochs = torch.optim.lr_scheduler.StepLR(optimizer, 1, 1.0)
        steps = {"scheduler": schedule, "interval": "step"}
        return [optimizer], [steps, {"scheduler": epochs, "interval": "epoch"}]


def scheduled(**kwargs: Any) -> Any:
    """How far the schedules of steps and of epochs have come, of how many steps planned."""
    model, fitted = fit(48, model=OneCycle(0.03), max_epochs=2, **kwargs)
    epochs = fitted.lr_scheduler_configs[1].scheduler.last_epoch
    return model.samples, model.planned, model.schedule.last_epoch, epochs, model.seen


def combined(mode: str) -> Any:
    """Two loaders of different lengths, which are read together."""
    loaders = {
        "one": DataLoader(Numbered(24), 2, shuffle=True),
        "other": DataLoader(Numbered(12), 3, shuffle=True),
    }
    train = CombinedLoader(loaders, mode)

    class Pairs(Writing):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch["one"] is None:
                batch["one"] = torch.full((1, 10), -1.0)
            if batch["other"] is not None:
                self.others += batch["other"][:, 0].int().tolist()
            return super().training_step(batch, batch_idx)

    model = Pairs(0.02)
    model.others = []
    fit(model=model, train=train, limit_val_batches=0)
    return model.samples, model.others


def again() -> Any:
    """Two trainings that read the same loaders, which Lightning has prepared in the first."""
    train = CombinedLoader([DataLoader(Numbered(24), 2, shuffle=True)], "min_size")

    class Firsts(Writing):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch[0], batch_idx)

    return [fit(model=Firsts(0.02), train=train, limit_val_batches=0)[0].samples for _ in range(2)]


class Reversed(BatchSampler):
    """A batch sampler of the user's own, which Lightning makes again with another sampler."""

    def __iter__(self) -> Any:
        return (batch[::-1] for batch in super().__iter__())


def with_own_samplers() -> Any:
    """Samplers of the user's own: one that draws from torch, one of batches, one split by rank."""
    data = Numbered(24)
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * 24, 24, replacement=False)
    torch.rand(1 + int(os.environ["RANK"]))  # as ranks that have drawn different numbers
    drawn = DataLoader(data, 2, sampler=weighted)
    batched = DataLoader(data, batch_sampler=Reversed(RandomSampler(data), 2, drop_last=False))
    found = [fit(train=each, limit_val_batches=0)[0].samples for each in (drawn, batched)]
    saver = ModelCheckpoint(every_n_train_steps=2)
    with pytest.raises(ValueError, match='got every_n_train_steps with data="claimed" and strat'):
        fit(callbacks=[saver], enable_checkpointing=True)
    split = torch.utils.data.DistributedSampler(data)
    with pytest.raises(ValueError, match="must have all batches of an epoch, got one with a Distr"):
        fit(train=DataLoader(data, 2, sampler=split))
    return found


def series() -> dict[str, Any]:
    """Several trainings one after the other."""
    return {
        "half epochs": scheduled(val_check_interval=0.5),
        "accumulated": scheduled(accumulate_grad_batches=5),
        "by steps": scheduled(max_steps=15),
        "max_size_cycle": combined("max_size_cycle"),
        "min_size": combined("min_size"),
        "samplers": with_own_samplers(),
        "again": again(),
    }


@pytest.fixture(scope="module")
def made() -> dict[str, list[Any]]:
    """What each training of the series has come to, by rank."""
    ranks = run(2, series)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def test_lengths_and_schedules_are_nominal_on_every_rank(made: dict[str, list[Any]]) -> None:
    rows = ("half epochs", 24, 4), ("accumulated", 6, 2), ("by steps", 15, 1)
    for name, planned, validations in rows:
        ranks = made[name]
        assert [(of, at) for _, of, at, *_ in ranks] == [(planned, planned)] * 2, name
        assert [epochs for *_, epochs, _ in ranks] == [2] * 2, name
        assert [len(seen) - 1 for *_, seen in ranks] == [validations] * 2, name
        assert Counter(i for epochs, *_ in ranks for i in epochs[0]) == Counter(range(48)), name
    for samples, *_ in made["accumulated"]:
        for epoch in samples:  # 24 batches in steps of 5, of which one has 4
            assert len(epoch) // 2 % 5 in (0, 4)


def test_loaders_that_are_read_together_are_claimed_together(made: dict[str, list[Any]]) -> None:
    for mode, num_ones, times in (("max_size_cycle", 24, 3), ("min_size", 8, 1)):
        ones = Counter(i for samples, _ in made[mode] for i in samples[0])
        seconds = Counter(i for _, others in made[mode] for i in others)
        assert seconds == Counter(dict.fromkeys(range(12), times)), mode
        assert sum(ones.values()) == len(ones) == num_ones, mode


def test_samplers_of_the_users_own_are_claimed_from(made: dict[str, list[Any]]) -> None:
    for ranks in zip(*made["samplers"], strict=True):
        assert all_once(list(ranks), 24)


def test_a_second_training_claims_from_the_same_loaders(made: dict[str, list[Any]]) -> None:
    for ranks in zip(*made["again"], strict=True):
        assert all_once(list(ranks), 24)


class LongCycle(OneCycle):
    num_more = 20


def save(folder: str, data: str = "claimed", **limits: int) -> Any:
    """Trains an epoch with a validation and a checkpoint in its middle and at its end."""
    saver = ModelCheckpoint(folder, "{step}", save_top_k=-1, save_on_train_epoch_end=False)
    model, _ = fit(
        48, model=LongCycle(0.03), callbacks=[saver], enable_checkpointing=True,
        val_check_interval=0.5, data=data, **limits,
    )  # fmt: skip
    return model.samples[0], model.seen[1]


def resume(path: str, max_epochs: int, data: str = "claimed", **limits: int) -> Any:
    model, fitted = fit(
        48, model=LongCycle(), ckpt_path=path, max_epochs=max_epochs, data=data, **limits
    )
    return model.samples, model.schedule.last_epoch, fitted.current_epoch


def resume_alone(folder: str, limits: dict[str, int]) -> Any:
    return resume(str(oldest(folder)), 1, **limits)


def save_limited(folder: str, limits: dict[str, int]) -> Any:
    return save(folder, **limits)


def oldest(folder: str) -> Path:
    return min(Path(folder).glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)


@cases("limits", now=[{"limit_train_batches": 10}], later=[{"max_steps": 10}])
def test_a_limited_epoch_goes_on_with_another_number_of_ranks(
    limits: dict[str, int], tmp_path: Path
) -> None:
    """It has as many batches as it had: 20, as of two ranks with 10 each."""
    ranks = run(2, save_limited, str(tmp_path), limits)
    before = [i for samples, at in ranks for i in samples[:at]]
    ((samples, *_),) = run(1, resume_alone, str(tmp_path), limits)
    assert len(before) < 40
    assert len({*before, *samples[-1]}) == len(before + samples[-1]) == 40


def resume_with_other_data(folder: str) -> str:
    """Both ways, from a checkpoint within an epoch."""
    texts = []
    for saved, other in (("claimed", "equal"), ("equal", "claimed")):
        own = f"{folder}/{saved}"
        save(own, saved)
        with pytest.raises(ValueError, match="data= that it began with") as caught:
            resume(str(oldest(own)), 1, other)
        texts.append(str(caught.value))
    return " ".join(texts)


def test_an_epoch_does_not_go_on_with_data_dealt_otherwise(tmp_path: Path) -> None:
    for text in run(2, resume_with_other_data, str(tmp_path)):
        assert 'epoch of data="claimed" with data="equal"' in text
        assert 'epoch of data="equal" with data="claimed"' in text


class Skipping(LongCycle):
    """Rank 0 skips the rest of the epoch at its second batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.global_rank == 0 and batch_idx == 1 else None


def skip() -> int:
    _, fitted = fit(16, model=Skipping(0.01), limit_val_batches=0)
    return int(fitted.lr_scheduler_configs[1].scheduler.last_epoch)


def test_a_rank_that_skips_the_rest_of_an_epoch_steps_its_schedules_once() -> None:
    assert run(2, skip) == [1] * 2


@cases("world_size", now=[2], later=[3])
def test_an_epoch_goes_on_with_what_was_left(world_size: int, tmp_path: Path) -> None:
    ranks = run(2, save, str(tmp_path))
    saved = sorted(tmp_path.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    before = [i for samples, at in ranks for i in samples[:at]]
    after = run(world_size, resume, str(saved[0]), 1)
    rest = [i for samples, *_ in after for i in samples[-1]]
    assert sorted(before + rest) == list(range(48))
    if world_size == 2:
        assert {at for _, at, _ in after} == {12}
        after = run(2, resume, str(saved[-1]), 2)  # of the whole epoch: it leads to the next
        assert sorted(i for samples, *_ in after for i in samples[-1]) == list(range(48))
        assert [rest for *rest, _ in after] == [[samples, 12 + 12] for samples, *_ in after]


class SaveOnce(ModelCheckpoint):
    """Rank 0 asks for a checkpoint after its batch 4, and saves after its batch 5; rank 1 after 2.

    Rank 1 has its first batch in hand until rank 0 begins its batch 5.

    Args:
        folder: where it saves
        num_batches: until so many have begun, of both ranks, rank 1 waits after it has saved
        **kwargs: other options
    """

    def __init__(self, folder: str, num_batches: int, **kwargs: Any) -> None:
        super().__init__(
            folder, "{step}", save_top_k=-1, train_time_interval=timedelta(hours=1), **kwargs
        )
        self.num_batches, self.num_seen, self.num_saved = num_batches, 0, 0
        self.is_fifth, self.have_begun = Path(folder, "fifth"), Path(folder, "begun")

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.num_seen += 1
        if trainer.global_rank == 1:
            await_file(self.is_fifth)
        elif self.num_seen == 5:
            self.is_fifth.touch()
        elif self.num_seen + 2 == self.num_batches:
            self.have_begun.touch()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_rank == 0 and self.num_seen == 3:
            self._last_time_checked = -1e9
        super().on_train_batch_end(trainer, *args)
        if trainer.global_rank == 0 and self.num_seen == 4:
            while trainer.strategy.session.training.agreed._unanswered:
                time.sleep(0.001)  # between two looks
        if trainer.global_rank == 1 and self.num_seen == 2 and self.num_batches:
            await_file(self.have_begun)

    def _save_checkpoint(self, *args: Any) -> None:
        super()._save_checkpoint(*args)
        self.num_saved += 1


def await_file(file: Path) -> None:
    while not file.exists():
        time.sleep(0.001)  # between two looks


def save_by_time(folder: str) -> list[Any]:
    found = []
    for interval, num_batches in ((1.0, 16), (0.5, 0)):
        own = Path(folder, str(interval))
        own.mkdir(exist_ok=True)
        saver = SaveOnce(str(own), num_batches)
        model, _ = fit(
            32, callbacks=[saver], enable_checkpointing=True, val_check_interval=interval
        )
        found.append((model.samples, model.seen[1], saver.num_saved))
    return found


def test_a_checkpoint_by_time_is_saved_where_ranks_have_made_other_steps(tmp_path: Path) -> None:
    """One rank has saved at its step when all validate, and the other has not."""
    at_end, at_half = zip(*run(2, save_by_time, str(tmp_path)), strict=True)
    for ranks, seen in ((at_end, [28, 4]), (at_half, [12, 4])):
        assert all_once([samples for samples, *_ in ranks], 32)
        assert [at for _, at, _ in ranks] == seen  # samples, before the first validation
        assert [num_saved for *_, num_saved in ranks] == [1] * 2


class Stopped(Writing):
    """Rank 1 gets SIGTERM in its first batch of epoch 1, before rank 0 has begun one."""

    def __init__(self, folder: str) -> None:
        super().__init__(0.01)
        self.is_agreed = Path(folder, "agreed")

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 1 and self.global_rank == 0:
            await_file(self.is_agreed)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.current_epoch == 1 and self.global_rank == 1 and not self.is_agreed.exists():
            os.kill(os.getpid(), signal.SIGTERM)
            while self.trainer.strategy.session.training.agreed._unanswered:
                time.sleep(0.001)  # between two looks
            self.is_agreed.touch()
        return super().training_step(batch, batch_idx)


def stop_within_a_step(folder: str) -> list[int]:
    """Rank 0 stops after one batch of two, at the step at which it has saved; rank 1 after two."""
    saver = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_exception=True)
    model = Stopped(folder)
    with pytest.raises(SIGTERMException):
        fit(
            32, model=model, callbacks=[saver], enable_checkpointing=True, limit_val_batches=0,
            accumulate_grad_batches=2, max_epochs=2,
        )  # fmt: skip
    return [len(samples) for samples in model.samples]


def test_stopped_ranks_save_together_whatever_their_steps(tmp_path: Path) -> None:
    first, second = run(2, stop_within_a_step, str(tmp_path))
    assert first[0] + second[0] == 32
    assert (first[1], second[1]) == (2, 4)
    assert sorted(file.name for file in tmp_path.glob("*.ckpt")) == ["epoch=0.ckpt", "epoch=1.ckpt"]
    assert len(list((tmp_path / "epoch=1.ckpt.replicas").iterdir())) == 2


def test_ranks_that_wait_in_every_step_claim_nothing() -> None:
    with pytest.raises(ValueError, match='got data="claimed" with strategy="allreduce"; use dat'):
        claimed("allreduce")
