"""Where all ranks meet: evaluation, callbacks that decide, ranks that are out of batches."""

from __future__ import annotations

import copy
import csv
import itertools
import os
import re
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partialmethod
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric, SumMetric

from lightning_dsgd import CommunicationMonitor
from lightning_dsgd.transport import PeerLost
from lightning_dsgd.transport.native import Native
from lightning_dsgd.transport.process_group import ProcessGroupTransport
from tests.support.fits import (
    Adversaries,
    Plain,
    Recorder,
    Seeded,
    assert_close,
    buffers,
    every_strategy,
    fit,
    run,
    same,
    some_now,
    strategy,
)
from tests.support.models import Regression, loader, trainer, weights
from tests.support.thorough import cases
from tests.support.worlds import ask_gloo


# ---- ranks with different numbers of batches ----
def fit_uneven(name: str, make: Callable[..., Any]) -> tuple[Tensor, float]:
    samples = {"num_samples": 8 * (3, 11)[int(os.environ["RANK"])]}, {"num_samples": 32}
    model, run = fit(name, make, *samples, max_epochs=2, use_distributed_sampler=False)
    everything = torch.cat([weights(model).double(), buffers(model)])
    return everything, float(run.callback_metrics["val_loss"])


class TwoDtypes(Seeded):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch[0], batch[1] / self.scale.float()))


class Pair(Adversaries):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("unused", torch.zeros(1))


def fit_uneven_natively(name: str, make: Callable[..., Any]) -> tuple[Tensor, int]:
    num_sums = 0
    init, ask = ProcessGroupTransport.__init__, Native.ask

    def count(*args: Any) -> Any:
        nonlocal num_sums
        num_sums += 1
        return ask(*args)

    ask_gloo()
    Native.ask = count  # type: ignore[method-assign]
    ProcessGroupTransport.__init__ = partialmethod(init, native_devices=("cpu",))  # type: ignore[assignment]
    state, _ = fit_uneven(name, make)
    return state, num_sums


@pytest.mark.parametrize(("name", "make"), [("allreduce", TwoDtypes), ("local_sgd", Pair)])
def test_several_parts_sum_by_torch_as_by_messages(name: str, make: Callable[..., Any]) -> None:
    """Over gloo as over NCCL: the parts of a rank that is out of batches sum in any order."""
    by_torch = run(2, fit_uneven_natively, name, make)
    assert all(num_sums > 10 for _, num_sums in by_torch)
    by_messages = run(2, fit_uneven, name, make)
    assert same([state for state, _ in (*by_torch, *by_messages)])
    assert by_messages[0][0].isfinite().all()
    assert len({val_loss for _, val_loss in by_messages}) == 1


class Stream(IterableDataset[Any]):
    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(loader(8 * self.num_batches), self.num_batches)


class Apart(Seeded):
    """With metrics of torchmetrics, which ask all ranks without the strategy.

    Rank 2 alone has something to tell one of them.  A buffer's dtype is no plain number's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_validated = self.num_cleared = 0
        self.mean, self.computed, self.seldom = MeanMetric(), SumMetric(), SumMetric()
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.net[3].requires_grad_(requires_grad=False)

    def on_train_epoch_start(self) -> None:
        self.net[3].requires_grad_(self.current_epoch >= 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rank = torch.tensor(float(self.global_rank), dtype=torch.float64)
        self.mean(rank)
        self.computed(1.0)
        if self.global_rank == 2:
            self.seldom.update(1.0)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("seldom", self.seldom, on_step=False, on_epoch=True)
        for key in ("rank", "late")[: 1 + (self.current_epoch >= 3)]:
            self.log(key, rank, on_step=False, on_epoch=True, sync_dist=True, batch_size=8)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("computed", self.computed.compute())
        self.computed.reset()

    def on_validation_model_zero_grad(self) -> None:
        super().on_validation_model_zero_grad()
        self.num_cleared += 1

    def on_validation_start(self) -> None:
        self.num_validated += not self.trainer.sanity_checking


EPOCHS: dict[str, dict[str, Any]] = {
    "saves": {},
    "streams": {"is_stream": True},
    "validates within": {"num_val": 2, "val_check_interval": 2},
    "accumulates between": {
        **{"num_val": 2, "val_check_interval": 0.5, "accumulate_grad_batches": 4},
        **{"max_steps": -1, "max_epochs": 2},
    },
    "stops early": {"num_val": 2, "min_steps": 7, "stops": True},
    "resumes": {"ckpt": "epoch=1-step=8.ckpt"},
}
"""Of ranks with 6, 4 and 2 batches; unless said otherwise, with 8 steps: in 2, 2 and 4 epochs."""


def fit_apart(
    name: str, case: str, folder: str
) -> tuple[int, int, int, list[float], list[str], Tensor]:
    given = {"max_steps": 8, "max_epochs": -1, "num_val": 0, **EPOCHS[case]}
    num_batches = (6, 4, 2)[int(os.environ["RANK"])]
    saver = ModelCheckpoint(folder, save_top_k=-1)
    callbacks: list[L.Callback] = [saver, CommunicationMonitor(per_rank=True)]
    if given.pop("stops", False):
        callbacks.append(EarlyStopping("val_loss", patience=0, min_delta=1e9))
    is_stream, num_val = given.pop("is_stream", False), given.pop("num_val")
    ckpt = Path(folder, given.pop("ckpt")) if "ckpt" in given else None
    model = Apart()
    run = trainer(
        *(strategy(name, timeout_s=20.0), 3),
        callbacks=callbacks,
        enable_checkpointing=True,
        use_distributed_sampler=False,
        logger=CSVLogger(folder, name="", version=""),
        **given,
    )
    train: Any = loader(8 * num_batches)
    if is_stream:
        train = DataLoader(Stream(num_batches), batch_size=None)
    run.fit(model, train, loader(8 * num_val) if num_val else None, ckpt_path=ckpt)
    assert model.num_cleared == model.num_validated or run.accumulate_grad_batches > 1
    files = sorted(path.name for path in Path(folder).glob("*.ckpt"))
    assert torch.equal(model.turns, torch.polar(torch.ones(3), torch.arange(3.0)))
    keys = "rank", "mean", "late", "computed", "seldom"
    logged = [float(run.callback_metrics.get(key, 2.0)) for key in keys]
    return run.global_step, run.current_epoch, model.num_validated, logged, files, weights(model)


@cases(
    "name, case, steps, epochs, num_validated",
    now=[
        ("local_sgd", "streams", [8, 8, 8], 4, 0),
        ("wagma", "validates within", [8, 8, 8], 4, 3 + 2 + 1 + 1),
        ("local_sgd", "stops early", [8, 8, 7], 4, 4),
        ("wagma", "resumes", [8, 8, 8], 4, 0),
    ],
    later=[("wagma", "accumulates between", [4, 2, 2], 2, 4)],
)
def test_ranks_with_different_numbers_of_batches_go_through_the_same_epochs(
    *, name: str, case: str, steps: list[int], epochs: int, num_validated: int, tmp_path: Path
) -> None:
    if case == "resumes":
        run(3, fit_apart, name, "saves", str(tmp_path))
    ranks = run(3, fit_apart, name, case, str(tmp_path))
    assert [rank[0] for rank in ranks] == steps
    assert [rank[1:3] for rank in ranks] == [(epochs, num_validated)] * 3
    assert ranks[0][3] == ranks[1][3] == ranks[2][3]
    if epochs == 4:
        # Rank 2 alone has batches in the last epoch.
        assert ranks[0][3][:3] == pytest.approx([2.0] * 3)
    if case in ("streams", "validates within", "stops early"):
        assert ranks[0][3][3:] == [steps[2] - 6.0] * 2
    assert same([rank[5] for rank in ranks])
    with (tmp_path / "metrics.csv").open() as file:
        sent = [row.get("dsgd/rank_00000/bytes_sent") for row in csv.DictReader(file)]
    assert min(float(each) for each in sent if each) >= 0.0
    num_saved = {"validates within": 6, "accumulates between": 4, "resumes": 6}
    assert len(ranks[0][4]) == num_saved.get(case, epochs)


class Sparing(Plain):
    """A rank may have no data."""

    def __init__(self) -> None:
        super().__init__()
        self.allow_zero_length_dataloader_with_multiple_devices = True


class Alone(Plain):
    def on_train_epoch_end(self) -> None:
        if self.global_rank == 0:
            self.log("alone", 1.0, sync_dist=True)


# ---- logged metrics ----
class Logging(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rank = float(self.global_rank)
        self.log("both", rank, on_step=True, on_epoch=True, sync_dist=True)
        self.log("sum", rank, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        self.log("max", rank, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("after", float(self.global_rank), on_step=True, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("epoch", float(self.global_rank), sync_dist=True)


def fit_logging(name: str) -> tuple[list[float], dict[str, float], list[str]]:
    steps = Recorder("both_step")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, run = fit(name, Logging, callbacks=[steps])
    texts = [str(w.message) for w in caught if "logs the value of rank 0 alone" in str(w.message)]
    return steps.values, {k: float(v) for k, v in run.callback_metrics.items()}, texts


@every_strategy
def test_logged_values_are_over_all_ranks_where_that_makes_no_step_wait(name: str) -> None:
    ranks = run(3, fit_logging, name)
    num_batches = len(ranks[0][0])
    for rank, (steps, metrics, texts) in enumerate(ranks):
        of_a_step = 1.0 if name == "allreduce" else rank
        assert steps == [of_a_step] * num_batches
        assert metrics["after"] == of_a_step
        assert (metrics["both_epoch"], metrics["epoch"]) == (1.0, 1.0)
        assert (metrics["sum"], metrics["max"]) == (3.0 * num_batches, 2.0)
        assert len(texts) == (1 if rank == 0 and name != "allreduce" else 0)


UNEVEN: dict[str, tuple[dict[str, Any], str]] = {
    "saves": (
        {"saves": {"every_n_train_steps": 3}, "validates": None},
        "ranks must save as often .* got 5 batches .* on rank 0, 8 .* every_n_epochs",
    ),
    "saves by time": (
        {"saves": {"train_time_interval": timedelta(hours=1)}},
        "ranks must save as often .* train_time_interval=1:00:00; use every_n_ep",
    ),
    "logs alone": (
        {"make": Alone},
        "same points .* over all ranks .* on rank 0, the (end|begin).* on rank 1",
    ),
    "has nothing to train on": (
        {"trains": (5, 0)},
        "batches to train on, got 5 .* rank 0, 0 .* rank 1.*; give ev",
    ),
    "has nothing to validate on": (
        {"validates": (4, 0)},
        "got 4 batches on rank 0, 0 batches on rank 1 of evaluati",
    ),
    "logs": (
        {"make": Logging},
        "must not be asked of ranks that have run out of batches.* use on_epoch=True",
    ),
}
"""What the ranks of a case do, and what they are told."""


def fit_unevenly(case: str, folder: str) -> str:
    given = {"make": Sparing, "trains": (5, 8), "validates": (4, 4), "saves": None}
    given |= UNEVEN[case][0]
    rank, saves, val = int(os.environ["RANK"]), given["saves"], given["validates"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samples = [num and {"num_samples": 8 * num[rank]} for num in (given["trains"], val)]
            saving = {"callbacks": [ModelCheckpoint(folder, **saves)]} if saves else {}
            saving |= {"enable_checkpointing": bool(saves), "use_distributed_sampler": False}
            limits = {"max_epochs": 2, "options": {"timeout_s": 20}}
            fit("allreduce", given["make"], *samples, **limits, **saving)
    except (ValueError, PeerLost) as error:  # PeerLost: another rank was first to notice
        return str(error)
    return "trained"


@some_now("case", UNEVEN, now=("saves", "logs alone", "has nothing to train on", "logs"))
def test_what_makes_uneven_ranks_wait_for_each_other_is_refused(case: str, tmp_path: Path) -> None:
    for error in run(2, fit_unevenly, case, str(tmp_path)):
        assert re.search(UNEVEN[case][1], error)


# ---- callbacks that decide ----
class Stopping(Seeded):
    """A metric that goes on falling on rank 0 and does not on rank 1."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("own", -float(self.current_epoch) if self.global_rank == 0 else 0.0)


def fit_monitored(name: str, folder: str) -> tuple[str, float, float, int]:
    best = ModelCheckpoint(folder, monitor="val_loss")  # the name holds the number of steps
    samples = {"num_samples": 8 * (5, 3)[int(os.environ["RANK"])]}, {"num_samples": 32}
    options = {"callbacks": [best, EarlyStopping("own", patience=2)], "num_sanity_val_steps": 0}
    options |= {"enable_checkpointing": True, "use_distributed_sampler": False}
    model, run = fit(name, Stopping, *samples, max_epochs=8, **options)
    num_epochs = run.current_epoch
    (metrics,) = run.validate(model, loader(32), ckpt_path="best", verbose=False)
    return best.best_model_path, float(best.best_model_score or 0), metrics["val_loss"], num_epochs


def loss_of(checkpoint: str) -> float:
    model = Seeded()
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["state_dict"])
    model.eval()
    with torch.no_grad():
        (batch,) = loader(32, 32)
        return float(model.loss(batch))


@every_strategy
def test_callbacks_that_monitor_a_metric_decide_alike_on_all_ranks(
    name: str, tmp_path: Path
) -> None:
    """One checkpoint of the consensus, also of ranks that have made different numbers of steps."""
    ranks = run(2, fit_monitored, name, str(tmp_path))
    path, score, *_ = ranks[0]
    for own, its_score, validated, num_epochs in ranks:
        assert (own, its_score, num_epochs) == (path, score, 3)
        assert validated == pytest.approx(score, rel=1e-5)
    assert score == pytest.approx(loss_of(path), rel=1e-5)
    assert [str(file) for file in tmp_path.glob("*.ckpt")] == [path]
    assert [str(folder) for folder in tmp_path.glob("*.replicas")] == [f"{path}.replicas"]
    files = [file.name for file in Path(f"{path}.replicas").iterdir()]
    assert sorted(files) == ["rank_00000.pt", "rank_00001.pt"]


def fit_swa(name: str) -> tuple[Tensor, Tensor]:
    swa = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, annealing_epochs=1)
    model, _ = fit(name, Seeded, max_epochs=4, callbacks=[swa])
    return weights(model), buffers(model)


@every_strategy
def test_stochastic_weight_averaging_ends_with_one_model(name: str) -> None:
    ranks = run(2, fit_swa, name)
    assert same([x for x, _ in ranks])
    assert same([b for _, b in ranks])


class LooksAtTheEnd(L.Callback):
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(torch.cat([weights(pl_module).double(), buffers(pl_module)]))


class ExportsAtTheEnd(Seeded):
    """And is changed there, on each rank in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def on_train_end(self) -> None:
        self.seen.append(torch.cat([weights(self).double(), buffers(self)]))
        with torch.no_grad():
            for tensor in (self.net[0].bias, self.net[1].running_mean):
                tensor.fill_(1.0 + self.trainer.global_rank)


class StopsEarly(L.Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop = trainer.global_step == 3


def end_each(names: list[str], folder: str) -> list[Any]:
    """What is seen at the end of trainings, what is saved there, and what is there afterwards."""
    ends = []
    for name in names:
        for stops in ([], [StopsEarly()]):
            look = LooksAtTheEnd()
            file = f"{name}{len(stops)}"
            saver = ModelCheckpoint(folder, every_n_epochs=9, save_last=True)
            saver.CHECKPOINT_NAME_LAST = file
            callbacks = [look, saver, *stops]
            model, _ = fit(
                name, ExportsAtTheEnd, max_epochs=1, callbacks=callbacks, enable_checkpointing=True
            )
            saved = torch.load(f"{folder}/{file}.ckpt", weights_only=True)["state_dict"]
            hidden = model.net[0].bias, model.net[1].running_mean
            ends.append(
                {
                    "seen": [*look.seen, *model.seen],
                    "saved": torch.cat([saved[n].reshape(-1) for n, _ in model.named_parameters()]),
                    "after": torch.cat([weights(model), *hidden]),
                    "hidden": torch.cat([tensor.detach() for tensor in hidden]),
                }
            )
    return ends


@cases(
    "names",
    now=[["local_sgd", "oktopk"]],
    later=[
        ["allreduce", "no_sync", "dpsgd", "wagma", "hpsgd", "sgp", "popsgd", "adpsgd", "diloco"]
    ],
)
def test_all_hold_the_consensus_where_training_ends(names: list[str], tmp_path: Path) -> None:
    """In `on_train_end` of every callback and of the module, and again after these."""
    for one, other in zip(*run(2, end_each, names, str(tmp_path)), strict=True):
        assert same([*one["seen"], *other["seen"]])
        num_weights = len(one["saved"])
        assert_close(one["saved"].double(), one["seen"][0][:num_weights])
        assert same([one["after"], other["after"]])
        assert_close(one["hidden"], torch.full_like(one["hidden"], 1.5))


# ---- parameters that no optimizer trains, and the step changes ----
class Taught(Seeded):
    """A teacher follows the network, as in BYOL; a second one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.frozen = copy.deepcopy(self.net).requires_grad_(False)
        self.shown: list[Tensor] = []

    def on_train_batch_end(self, *args: Any) -> None:
        for mine, theirs in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            mine.data = 0.9 * mine.data + 0.1 * theirs.detach()

    def on_validation_end(self) -> None:
        self.shown.append(weights(self.teacher))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=self.lr)


def fit_taught(name: str, folder: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    saver = ModelCheckpoint(dirpath=folder, filename="taught", save_on_train_epoch_end=True)
    options = {"callbacks": [saver], "enable_checkpointing": True}
    model, _ = fit(name, Taught, val={"num_samples": 16}, max_epochs=2, **options)
    assert isinstance(model, Taught)
    own = torch.load(f"{folder}/taught.ckpt.replicas/rank_0000{os.environ['RANK']}.pt")
    teacher = torch.cat(
        [own["state_dict"][f"teacher.{n}"].reshape(-1) for n, _ in model.teacher.named_parameters()]
    )
    return weights(model.teacher), model.shown[-1], teacher, weights(model.frozen)


def test_a_teacher_is_averaged_where_its_student_is(tmp_path: Path) -> None:
    ranks = run(2, fit_taught, "local_sgd", str(tmp_path))
    ends, shown, owns, frozen = zip(*ranks, strict=True)
    assert same(ends)
    assert same(shown)
    assert same([*frozen, weights(Taught().frozen)])  # to the bit
    saved = torch.load(tmp_path / "taught.ckpt", weights_only=True)["state_dict"]
    names = [name for name, _ in Taught().teacher.named_parameters()]
    teacher = torch.cat([saved[f"teacher.{name}"].reshape(-1) for name in names])
    assert_close(teacher, torch.stack(owns).mean(0))
    assert not same(owns)  # each rank goes on with its own


# ---- validation ----
class Watching(Seeded):
    """Looks at its weights and statistics around a validation in the middle of an epoch.

    The strategy's hooks come after the module's: `on_validation_start` still sees what was trained,
    `on_validation_end` still what was validated.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before, self.during, self.after, self.statistics = [], [], [], []

    def on_train_batch_end(self, *args: Any) -> None:
        self.statistics.append(buffers(self))

    def everything(self) -> Tensor:
        return torch.cat([weights(self).double(), buffers(self)])

    def on_validation_start(self) -> None:
        self.before.append(self.everything())

    def on_validation_end(self) -> None:
        self.during.append(self.everything())

    def on_validation_model_train(self) -> None:
        super().on_validation_model_train()
        self.after.append(self.everything())


def fit_watching(name: str, options: dict[str, Any]) -> tuple[list[Tensor], ...]:
    limits = {"val_check_interval": 0.5, "max_epochs": 2}
    model, _ = fit(name, Watching, val={"num_samples": 16}, options=options, **limits)
    assert isinstance(model, Watching)
    assert len(model.before) == 5  # the sanity check, and two an epoch
    statistics = [*model.statistics, buffers(model)]
    return model.before, model.during, model.after, statistics


def check_statistics(ranks: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """They are local in training and one at the end; gives the last local ones, and the end."""
    (*ours, our_end), (*theirs, their_end) = (statistics for *_, statistics in ranks)
    assert not any(map(torch.equal, ours, theirs))
    assert torch.equal(our_end, their_end)
    return ours[-1], theirs[-1], our_end


@every_strategy
def test_validation_shows_the_consensus_and_gives_back_the_weights_to_the_bit(name: str) -> None:
    ranks = run(2, fit_watching, name, {})
    for before, _, after, _ in ranks:
        assert all(map(torch.equal, before, after))
    for index in range(1, 5):
        before, during, _ = ([rank[i][index] for rank in ranks] for i in range(3))
        assert same(during)
        # Ranks differ at least in their BatchNorm statistics.
        assert not same(before)
        assert_close(during[0], (before[0] + before[1]) / 2, 1e-5)
    ours, theirs, end = check_statistics(ranks)
    assert_close(end, (ours + theirs) / 2)


def test_local_evaluation_shows_each_rank_its_own_weights() -> None:
    ranks = run(2, fit_watching, "no_sync", {"evaluate": "local", "average_buffers": False})
    for before, during, after, _ in ranks:
        assert all(map(torch.equal, before, during))
        assert all(map(torch.equal, before, after))
    assert not same([rank[1][-1] for rank in ranks])
    ours, _, end = check_statistics(ranks)
    assert torch.equal(end, ours)  # those of rank 0


def fit_and_evaluate(name: str) -> dict[str, Any]:
    L.seed_everything(int(os.environ["RANK"]), verbose=False)
    model, run = Regression(), trainer(strategy(name), 2)
    results: dict[str, Any] = {}
    for when in ("alone", "after fit"):
        results[f"validate {when}"] = run.validate(model, loader(32), verbose=False)
        results[f"test {when}"] = run.test(model, loader(32), verbose=False)
        results[f"predict {when}"] = torch.cat(run.predict(model, loader(32, shuffle=False)))
        if when == "alone":
            run.fit(model, loader(), loader(32))
            results["fit"] = [{"val_loss": float(run.callback_metrics["val_loss"])}]
    results["weights"] = weights(model)
    return results


@every_strategy
def test_validate_test_and_predict_work_alone_and_after_fit(name: str) -> None:
    ranks = run(2, fit_and_evaluate, name)
    first = ranks[0]
    assert same([rank["weights"] for rank in ranks])
    for rank in ranks:
        for key in ("validate alone", "test alone", "validate after fit", "test after fit"):
            assert rank[key] == first[key]
    assert first["validate alone"] == first["test alone"]
    assert first["validate after fit"] == first["test after fit"] == first["fit"]
    assert first["validate after fit"] != first["validate alone"]
    # The ranks predict different samples, with the same model.
    assert not torch.equal(ranks[0]["predict after fit"], ranks[1]["predict after fit"])
    assert len(ranks[0]["predict after fit"]) == 16
