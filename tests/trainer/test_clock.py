"""Training that ends or saves by the clock: after the same batch on all ranks, and nobody waits.

Clocks are the tests' own: it is time when a rank has made so many batches.
"""

from __future__ import annotations

import os
import time
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from torch.utils.data import DataLoader, IterableDataset

from lightning_dsgd import STRATEGIES
from lightning_dsgd.session.purposes import END_EPOCH
from lightning_dsgd.session.session import Session
from lightning_dsgd.session.stopping import END, MEET, SAVE, STOP, AgreedBatch
from tests.support.fits import some_now
from tests.support.launched import until
from tests.support.models import Regression, loader, trainer, weights
from tests.support.thorough import cases
from tests.support.worlds import FitWorld, ProcessWorld

EMPTY = torch.empty(0)


def rank() -> int:
    return int(os.environ["RANK"])


# ---- the agreement ----
def do_as_agreed(
    net: Any, asks: dict[int, list[tuple[int, int, int]]], apart_until: int = 0
) -> tuple[int, list[Any]]:
    """Steps in a ring; at a batch a rank asks for what it has been told to.

    Until some batch it waits for the answer, as else two wishes may become one.
    """
    agreed = AgreedBatch(net.sub("stop"))
    done = []
    batches = 0
    while agreed.may_begin_batch():
        batches += 1
        for at, what, detail in asks.get(net.rank, []):
            if at == batches:
                agreed.ask(what, detail)
                if at < apart_until:
                    agreed.finish()
        net.send(EMPTY, (net.rank + 1) % net.world_size)
        net.recv(EMPTY, (net.rank - 1) % net.world_size).wait()
        done += [(batches, *due) for due in agreed.due()]
        if any(what == END for _, what, _ in done):
            break
    agreed.finish()
    net.barrier().wait()
    agreed.close()
    return batches, done


def test_all_ranks_save_end_and_stop_after_the_same_batch_whoever_asks() -> None:
    """Again and again, two at once, and one for which another has asked already."""
    asks = {
        0: [(40, SAVE, 0), (80, SAVE, 1)],
        1: [(20, SAVE, 0), (80, SAVE, 1), (120, END, 0)],
        2: [(60, SAVE, 0), (80, SAVE, 0), (120, END, 0)],
    }
    first, *others = ProcessWorld().run(3, do_as_agreed, asks, 80)
    assert others == [first] * 2
    batches, done = first
    assert done[-1] == (batches, END, 0)
    assert batches > 120
    saves = [(at, detail) for at, what, detail in done if what == SAVE]
    assert min(at for at, detail in saves if detail == 0) > 20
    assert len([at for at, detail in saves if detail == 0]) == 4
    assert min(at for at, detail in saves if detail == 1) > 80


def test_a_signal_stops_all_though_one_of_them_has_asked_to_save() -> None:
    asks = {0: [(30, SAVE, 0)], 1: [(30, STOP, 15)], 2: [(30, SAVE, 0), (31, STOP, 15)]}
    first, *others = ProcessWorld().run(3, do_as_agreed, asks)
    assert others == [first] * 2
    assert {what for _, what, _ in first[1]} <= {SAVE}
    ((alone, _),) = ProcessWorld().run(1, do_as_agreed, {0: [(5, STOP, 15)]})
    assert alone > 5


def miss_a_meeting(net: Any) -> list[bool]:
    """Ranks claim batches; the first asks the others to meet it, and has none left to do so."""
    session, is_first = Session(), net.rank == 0
    session.rank, session.world_size = net.rank, net.world_size
    session.open(net)
    agreed = AgreedBatch(net.sub("stop"), is_of_each=True)
    parts = {"replica": SimpleNamespace(parts=(), settle=bool), "claimed": agreed}
    session.training = SimpleNamespace(agreed=agreed, algorithm=None, **parts)
    came = []
    for epoch in range(2):
        assert agreed.may_begin_batch()
        assert not agreed.meets_now()
        net.barrier().wait()
        if is_first:
            agreed.ask_to_meet()
        until(lambda epoch=epoch: agreed.num_told > epoch)
        if epoch or not is_first:
            assert agreed.may_begin_batch()
            assert agreed.meets_now()
            came.append(session.meet(MEET))
        came.append(session.meet(END_EPOCH))
    agreed.finish()
    net.barrier().wait()
    agreed.close()
    return came


ALONE: Any = SimpleNamespace(rank=0, world_size=1, timeout_s=1.0, now=lambda: 0.0)


@pytest.mark.parametrize("heard_after", [0, 2])
def test_all_come_once_for_each_wish_whenever_they_hear_of_it(heard_after: int) -> None:
    """Else one comes once more than the others, and waits for them."""
    agreed, came = AgreedBatch(ALONE, serves=False), []
    agreed._take(MEET, 0, 0, 1)
    for number in range(4):
        if number == heard_after:
            agreed._take(MEET, 0, 1, 2)
        came += [number] * agreed.meets_now()
        assert agreed.may_begin_batch()
    assert came == [1, 2]


def test_who_misses_a_save_forgets_that_one_alone() -> None:
    agreed = AgreedBatch(ALONE, serves=False)
    for number in (0, 1):
        agreed._take(SAVE, number, 0, 1 + number)
    agreed.forget([SAVE], agreed.num_told)
    for _ in range(2):
        assert agreed.may_begin_batch()
    assert agreed.due() == [(SAVE, 1)]


def test_who_has_missed_a_meeting_asks_for_another_and_waits_for_nobody() -> None:
    """Else the first rank stands alone from its next batch on, until the others end their epoch."""
    first, *others = ProcessWorld().run(3, miss_a_meeting)
    assert first == [True, True, True]
    assert others == [[False, True, True, True]] * 2


def ask_and_leave(net: Any) -> None:
    agreed = AgreedBatch(net.sub("stop"))
    assert agreed.may_begin_batch()
    agreed.ask(SAVE, net.rank)
    agreed.finish()
    net.barrier().wait()
    agreed.close()


def test_what_is_asked_at_the_end_does_not_outlive_the_network() -> None:
    ProcessWorld().run(3, ask_and_leave)


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
    num_batches = num_validated = num_ends = 0

    def on_train_batch_start(self, *args: Any) -> None:
        self.num_batches += 1

    def on_validation_end(self, *args: Any) -> None:
        self.num_validated += 1

    def on_train_end(self, *args: Any) -> None:
        self.num_ends += 1


def fit_by_time(name: str, timer: Timer | None, num_samples: list[int], **options: Any) -> Any:
    seen = Seen()
    model = Regression(lr=0.001)  # alone and for long, a rank would diverge with more
    callbacks = [seen] if timer is None else [seen, timer]
    fitter = trainer(
        STRATEGIES[name](timeout_s=20),
        int(os.environ["WORLD_SIZE"]),
        callbacks=callbacks,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        **{"max_epochs": -1, **options},
    )
    fitter.fit(model, loader(num_samples[rank() % len(num_samples)]), loader(16))
    assert fitter.state.finished
    assert seen.num_ends == 1
    assert "_check_time_remaining" not in vars(timer or fitter)
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
        results.append(fit_by_time(name, Until(1, 5, {0: 500}, own), [8000]))
    return results


def test_a_timer_ends_training_after_the_same_batch_on_all_ranks(tmp_path: Path) -> None:
    names = ["allreduce", "local_sgd", "hpsgd"]
    first, second = FitWorld().run(2, fit_each, names, str(tmp_path))
    for name, one, other in zip(names, first, second, strict=True):
        assert one == other, name
        assert 5 < one["steps"] < 1000, name
        assert one["validated"] == one["epochs"] == 1, name


def fit_by_epoch() -> Any:
    return fit_by_time("local_sgd", Until(0, 20, interval="epoch"), [128])


def test_a_timer_that_looks_once_an_epoch_ends_all_after_that_epoch() -> None:
    """That of rank 0 counts, as in Lightning."""
    first, second = FitWorld().run(2, fit_by_epoch)
    assert first == second
    assert (first["steps"], first["epochs"]) == (32, 2)


MEETINGS: dict[str, dict[str, Any]] = {
    "none": {"limit_val_batches": 0},
    "validation": {},
    "two validations an epoch": {"val_check_interval": 0.5},
    "a checkpoint": {"limit_val_batches": 0, "enable_checkpointing": True},
}


def fit_unevenly(of_rank: int, at: int, where: str, folder: str) -> Any:
    options = MEETINGS[where] | {"default_root_dir": folder}
    # Rank 1 is ahead of all others, in the epoch in which the rank asks.
    waits = {} if of_rank == 1 else {1: 190 if of_rank == 2 else 90}
    return fit_by_time("no_sync", Until(of_rank, at, waits, folder), [80, 800, 240], **options)


@cases(
    "of_rank, at, where",
    now=[(2, 35, "validation")],
    later=[
        (2, 35, "two validations an epoch"),
        (2, 35, "none"),
        (1, 50, "validation"),
        (0, 10, "a checkpoint"),
    ],
)
def test_uneven_ranks_end_after_one_epoch(
    of_rank: int, at: int, where: str, tmp_path: Path
) -> None:
    """Rank 0 has 10 batches an epoch, rank 1 100 and rank 2 30: they wait where others go on."""
    results = FitWorld().run(3, fit_unevenly, of_rank, at, where, str(tmp_path))
    (epochs,) = {result["epochs"] for result in results}
    assert [result["steps"] for result in results] == [10 * epochs, 100 * epochs, 30 * epochs]
    per_epoch = {"validation": 1, "two validations an epoch": 2}.get(where, 0)
    assert {result["validated"] for result in results} == {epochs * per_epoch}
    assert results[0]["model"] == results[1]["model"] == results[2]["model"]
    if where != "none":
        assert epochs == (2 if (of_rank, at) == (2, 35) else 1)


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
    """In these of its batches rank 0 waits until rank 1 has begun others."""

    def __init__(self, folder: str, waits: dict[int, int]) -> None:
        super().__init__()
        self.folder, self.waits = Path(folder), waits

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if rank() == 1:
            (self.folder / f"begun_{batch_idx}").touch()
        elif batch_idx in self.waits:
            while not (self.folder / f"begun_{self.waits[batch_idx]}").exists():
                time.sleep(0.001)  # between two looks
        return super().training_step(batch, batch_idx)


def fit_and_save(
    name: str,
    saver: ModelCheckpoint,
    num_batches: list[int],
    epochs: int,
    model: L.LightningModule | None = None,
) -> int:
    fitter = trainer(
        STRATEGIES[name](timeout_s=20),
        int(os.environ["WORLD_SIZE"]),
        callbacks=[saver],
        max_epochs=epochs,
        enable_checkpointing=True,
        limit_val_batches=0,
    )
    data = Stream(num_batches[rank() % len(num_batches)])
    fitter.fit(model or Regression(), DataLoader(data, batch_size=None))
    assert saver._train_time_interval == timedelta(hours=1)
    assert "on_train_batch_end" not in vars(saver)
    return fitter.global_step


def save_by_time(name: str, folder: str) -> int:
    model = Paced(folder, {10: 6, 105: 101})
    return fit_and_save(name, SaveAt(folder, 1, [5, 100]), [200], 1, model)


@some_now("name", ["allreduce", "local_sgd"], now=("local_sgd",))
def test_a_checkpoint_by_time_is_saved_after_the_same_batch_on_all_ranks(
    name: str, tmp_path: Path
) -> None:
    """And the next when it is time again, with the callback's state under its own name.

    Rank 0 hears of it in the midst of many batches: what it hears after its last one is too late.
    """
    assert FitWorld().run(2, save_by_time, name, str(tmp_path)) == [200] * 2
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


def fit_with_clocks(folder: str) -> int:
    callbacks = [
        Timer(duration=timedelta(hours=1)),
        ModelCheckpoint(folder, train_time_interval=timedelta(hours=1)),
    ]
    fitter = trainer(
        STRATEGIES["no_sync"](timeout_s=20), 2, callbacks=callbacks, enable_checkpointing=True
    )
    fitter.fit(Paced(folder, {2: 20}), loader(400))
    return fitter.global_step


def test_nobody_waits_for_the_clock_of_rank_0(tmp_path: Path) -> None:
    """Which is in its third batch when the other begins its twentieth."""
    assert FitWorld().run(2, fit_with_clocks, str(tmp_path)) == [25, 25]


def save_a_stream(folder: str) -> tuple[int, int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = fit_and_save("no_sync", SaveAt(folder, 1, [45, 46, 60, 80]), [20, 50], 2)
    said = [str(warning.message) for warning in caught]
    return steps, sum("a checkpoint by train_time_interval is left out" in text for text in said)


def test_a_checkpoint_that_a_rank_is_too_short_for_is_left_out(tmp_path: Path) -> None:
    """Streams of unknown, different lengths: rank 0 waits at the end of its training."""
    assert FitWorld().run(2, save_a_stream, str(tmp_path)) == [(40, 1), (100, 0)]
    for file in tmp_path.glob("*.ckpt"):
        assert len(list(Path(f"{file}.replicas").iterdir())) == 2


def fit_by_hand(folder: str) -> None:
    class ByHand(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            self.optimizers().step()

    saver = SaveAt(folder, 0, [3])
    fitter = trainer(
        STRATEGIES["no_sync"](timeout_s=20), 1, callbacks=[saver], enable_checkpointing=True
    )
    with pytest.warns(UserWarning, match="saves nothing by train_time_interval where optimization"):
        fitter.fit(ByHand(), loader(64))


def test_manual_optimization_is_told_that_nothing_is_saved_by_time(tmp_path: Path) -> None:
    FitWorld().run(1, fit_by_hand, str(tmp_path))
