"""A rank that raises, is killed or is told to stop: the others end soon, know why, and leave nothing behind.

Functions that run on every rank come before the tests that run them.  Jobs that start their own
processes are at the end.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_dsgd import STRATEGIES
from lightning_dsgd.stopping import AgreedStop
from tests.models import Regression, loader, trainer
from tests.worlds import FitWorld, Outcome, ProcessWorld

EMPTY = torch.empty(0)
SOON_S = 15.0


# All ranks stop at the same batch


def count_until_told(net: Any, askers: tuple[int, ...], ask_at: int) -> tuple[int, int, int, int]:
    """Steps in a ring, each waiting for the rank before it; some ask to stop, within a step."""
    stop = AgreedStop(net.sub("stop"))
    batches = 0
    while stop.may_begin_batch():
        batches += 1
        if batches == ask_at and net.rank in askers:
            stop.request(signal.SIGTERM)
        net.send(EMPTY, (net.rank + 1) % net.world_size)
        net.recv(EMPTY, (net.rank - 1) % net.world_size).wait()
    verdict = batches, stop.stop_at, stop.origin, stop.signum
    net.barrier().wait()
    stop.close()
    return verdict


@pytest.mark.parametrize("askers", [(0,), (2,), (1, 2), (0, 1, 2)])
def test_all_ranks_stop_at_the_same_batch_whoever_asks(askers: tuple[int, ...]) -> None:
    results = ProcessWorld().run(3, count_until_told, askers, 20)
    assert len(set(results)) == 1
    batches, stop_at, origin, signum = results[0]
    assert batches == stop_at > 20
    assert origin in askers
    assert signum == signal.SIGTERM


def count_at_own_speed(net: Any) -> tuple[int, bool]:
    """Rank 2 is far behind when rank 0 asks; it hears of that in the middle of its fifth batch."""
    stop = AgreedStop(net.sub("stop"))
    batches = 0
    while stop.may_begin_batch():
        batches += 1
        if net.rank == 2 and batches == 5:
            net.recv(EMPTY, 0).wait()  # from the rank that asks, after it has asked
        if net.rank == 0 and batches == 50:
            stop.request(signal.SIGINT)
            while not stop._holding:
                time.sleep(0.001)
            net.send(EMPTY, 2)
    net.barrier().wait()
    stop.close()
    return batches, stop.is_asked


def test_ranks_at_different_batches_stop_at_the_same_one() -> None:
    results = ProcessWorld().run(3, count_at_own_speed)
    assert len(set(results)) == 1
    assert results[0][0] > 50
    assert results[0][1]


def ask_to_stop_alone(net: Any) -> int:
    stop = AgreedStop(net.sub("stop"))
    batches = 0
    while stop.may_begin_batch():
        batches += 1
        if batches == 5:
            stop.request(signal.SIGTERM)
    stop.close()
    return batches


def test_one_rank_stops_by_itself() -> None:
    assert ProcessWorld().run(1, ask_to_stop_alone)[0] > 5


# What a rank does, and when


@dataclass
class Plan:
    """What one rank does to itself, and where.

    Args:
        rank: who
        how: "raise", "kill" (SIGKILL), "stop" (SIGSTOP), or the name of a signal
        where: the hook of the module
        at: at which call of the hook; -1 at the last
        late_s: how long the others wait for that rank before it comes to it
    """

    rank: int
    how: str
    where: str = "training_step"
    at: int = 20
    late_s: float = 0.0
    calls: int = field(default=0, init=False)

    def act(self, hook: str, rank: int) -> None:
        if hook != self.where or rank != self.rank:
            return
        self.calls += 1
        if self.calls == self.at:
            time.sleep(self.late_s)
            if self.how == "raise":
                raise ValueError(f"no such luck in {hook}")
            os.kill(os.getpid(), getattr(signal, {"kill": "SIGKILL", "stop": "SIGSTOP"}.get(self.how, self.how)))


class Doomed(Regression):
    """Follows a plan, and notes after each batch how many there were."""

    def __init__(self, folder: str, *plans: Plan) -> None:
        L.seed_everything(0, verbose=False)
        super().__init__()
        self.folder, self.plans, self.batches = Path(folder), plans, 0

    def act(self, hook: str) -> None:
        for plan in self.plans:
            plan.act(hook, self.global_rank)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches += 1
        Path(self.folder, f"batches_{self.global_rank}").write_text(str(self.batches))
        self.act("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.act("validation_step")
        super().validation_step(batch, batch_idx)


def _hook(name: str) -> Callable[..., None]:
    def fn(self: Any, *args: Any, **kwargs: Any) -> None:
        self.act(name)

    return fn


HOOKS = (
    "setup", "configure_model", "on_fit_start", "on_train_start", "on_train_epoch_start",
    "on_train_epoch_end", "on_validation_epoch_end", "on_train_end", "on_fit_end", "teardown",
    "on_save_checkpoint",
)  # fmt: skip
for _name in HOOKS:
    setattr(Doomed, _name, _hook(_name))


def fit(name: str, plans: tuple[Plan, ...], folder: str, options: dict[str, Any], epochs: int) -> None:
    torch.set_num_threads(1)
    strategy = STRATEGIES[name](timeout_s=60.0, **options)
    callbacks = []
    if Path(folder, "save").exists():
        callbacks = [ModelCheckpoint(folder, "last", save_on_exception=True)]
    with_validation = any("validation" in plan.where for plan in plans)
    train = trainer(
        strategy,
        3,
        max_epochs=epochs,
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks),
        limit_val_batches=None if with_validation else 0,
        num_sanity_val_steps=0,
    )
    train.fit(Doomed(folder, *plans), loader(), loader(32))


def end(
    name: str,
    *plans: Plan,
    folder: Path,
    epochs: int = 1000,
    save: bool = False,
    limit_s: float = 40.0,
    **options: Any,
) -> list[Outcome]:
    if save:
        Path(folder, "save").touch()
    return FitWorld().outcomes(3, fit, name, plans, str(folder), options, epochs, limit_s=limit_s)


def batches(folder: Path) -> list[int]:
    return [int(Path(folder, f"batches_{rank}").read_text()) for rank in range(3)]


def check_named(outcomes: list[Outcome], rank: int, reason: str) -> None:
    """Every other rank ended soon, with an exit code, and says which rank it was and why."""
    for other, outcome in enumerate(outcomes):
        print(other, outcome)
        assert outcome.seconds < SOON_S
        assert outcome.exitcode != 0
        if other != rank:
            assert re.match(f"PeerLost: rank {rank} {reason}", outcome.error), outcome.error


EVERYWHERE = [("local_sgd", 0), ("local_sgd", 2), ("no_sync", 2), ("allreduce", 0), ("dpsgd", 1)]


@pytest.mark.parametrize(("name", "rank"), EVERYWHERE)
@pytest.mark.parametrize("late_s", [0.0, 1.0])
def test_a_rank_that_raises_ends_all(name: str, rank: int, late_s: float, tmp_path: Path) -> None:
    outcomes = end(name, Plan(rank, "raise", late_s=late_s), folder=tmp_path)
    check_named(outcomes, rank, "failed: ValueError: no such luck in training_step")
    assert outcomes[rank].error == "ValueError: no such luck in training_step"


@pytest.mark.parametrize(("name", "rank"), EVERYWHERE)
def test_a_rank_that_is_killed_ends_all(name: str, rank: int, tmp_path: Path) -> None:
    outcomes = end(name, Plan(rank, "kill"), folder=tmp_path)
    check_named(outcomes, rank, "died")


@pytest.mark.parametrize(("name", "rank"), EVERYWHERE)
def test_sigterm_to_a_rank_stops_all_after_the_same_batch(
    name: str, rank: int, tmp_path: Path
) -> None:
    outcomes = end(name, Plan(rank, "SIGTERM"), folder=tmp_path)
    counts = batches(tmp_path)
    assert len(set(counts)) == 1
    assert counts[0] > 20
    for me, outcome in enumerate(outcomes):
        assert outcome.error == (
            f"SIGTERMException: rank {rank} received SIGTERM; all ranks stopped, rank {me} after {counts[0]} batches"
        )
        assert outcome.seconds < SOON_S
        assert outcome.exitcode != 0


@pytest.mark.parametrize("where", HOOKS)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_raises_in_any_hook_ends_all(where: str, rank: int, tmp_path: Path) -> None:
    outcomes = end("local_sgd", Plan(rank, "raise", where, 1), folder=tmp_path, epochs=2)
    print(outcomes)
    check_named(outcomes, rank, "failed: ValueError: no such luck")
