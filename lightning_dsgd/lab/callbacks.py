"""Callbacks: what the communication costs, stragglers on demand, checkpoints for trackers."""

from __future__ import annotations

import json
import os
import time
import warnings
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl

from lightning_dsgd.lab import accelerators, trackers
from lightning_dsgd.lab.simulate.machines import delayed_ranks
from lightning_dsgd.trainer import seams

_OF_RANK: Final[tuple[str, ...]] = (
    "bytes_sent",
    "wait_s",
    "staleness",
    "late_share",
    "local_steps_per_sync",
    "participation",
)


_IN_PROGRESS_BAR: Final[frozenset[str]] = frozenset(
    {"wait_s", "wait_share", "late_share", "staleness", "consensus_distance"}
)


def _is_counted(name: str) -> bool:
    """Returns whether a figure is counted from the beginning, and logged as the difference."""
    return name == "wait_s" or name.startswith(("bytes_sent", "messages_sent"))


def participation(figures: dict[str, float], world_size: int) -> float:
    """Returns the share of ranks in this rank's averages: of those there, and in time.

    Args:
        figures: what `communication` has returned
        world_size: how many ranks there were at the start
    """
    members = figures.get("num_members", world_size)
    return members / max(members, world_size) * (1.0 - figures.get("late_share", 0.0))


class CommunicationMonitor(pl.Callback):
    """Logs what a decentralised strategy sends and waits for, as `dsgd/...`, through all loggers.

    Every `log_every_n_steps` of the Trainer, from rank 0:

    | name | what |
    |---|---|
    | `dsgd/bytes_sent`, `dsgd/messages_sent` | since the last entry, by this rank |
    | `dsgd/bytes_sent_total` | since this fit began |
    | `dsgd/bytes_sent_tcp`, `dsgd/messages_sent_nccl`, ... | the part that one engine has carried |
    | `dsgd/wait_s` | how long the training thread was held up since the last entry |
    | `dsgd/wait_share` | the same, as a share of the time since the last entry |
    | `dsgd/comm_overlap` | share of the communication so far that was hidden behind computation |
    | `dsgd/consensus_distance` | of the last evaluation: distance from the mean over its norm |
    | `dsgd/updates_kept` | at the last evaluation: the share of all updates that is not lost |
    | `dsgd/step_scale` | with `scale_steps`: by how much steps are scaled, on average |
    | `dsgd/participation` | share of the ranks that are left, times `1 - late_share` |
    | `dsgd/staleness`, `dsgd/late_share`, `dsgd/density`, ... | where an algorithm has them |

    After each epoch, of this epoch and over all ranks: `dsgd/mean/wait_s`, `dsgd/max/wait_s`, and
    the same for `bytes_sent`, `staleness`, `late_share`, `local_steps_per_sync` and
    `participation`.  They are gathered at the epoch's end, so no step waits.  A rank's wait for the
    last one there is part of `wait_s`.

    W&B, MLflow, TensorBoard and CSV are told the strategy, its hyperparameters and options in
    force, and the recipe; `lab/trackers.py` says which gets what.

    Args:
        per_rank: whether every rank's are logged too, as `dsgd/rank_00003/wait_s`; a W&B run then
            has a chart of each with a line for each rank
        prog_bar: whether rank 0's `dsgd/wait_s`, `dsgd/wait_share`, `dsgd/late_share`,
            `dsgd/staleness` and `dsgd/consensus_distance` stand in the progress bar too
    """

    def __init__(self, per_rank: bool = False, prog_bar: bool = False) -> None:
        self.per_rank = per_rank
        self.prog_bar = prog_bar
        self._last: dict[str, float] = {}
        self._of_rank: dict[str, float] = {}
        self._at_epoch_start: dict[str, float] = {}
        self._logged_s = 0.0
        self._bytes_at_start = 0.0
        self._series: dict[str, dict[str, tuple[list[float], list[float]]]] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if not hasattr(trainer.strategy, "communication"):
            raise ValueError(
                "CommunicationMonitor needs a strategy of lightning_dsgd, got "
                f'{type(trainer.strategy).__name__}; use for example strategy="local_sgd"'
            )
        self._last = {}
        if trainer.is_global_zero:
            config = trackers.in_force(trainer.strategy, trainer.world_size)
            recipe = trackers.recipe_of(trainer)
            for logger in trainer.loggers:
                trackers.begin(logger, config, recipe)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._last = trainer.strategy.communication()  # what setting up has cost is not a step's
        # A resume within an epoch, and a newcomer, begin no epoch.
        self._of_rank, self._at_epoch_start = {}, self._last
        self._bytes_at_start = self._last["bytes_sent"]
        self._series = {}
        self._logged_s = time.monotonic()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._of_rank, self._at_epoch_start = {}, trainer.strategy.communication()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if self.per_rank or trainer.is_last_batch:
            self._of_rank = trainer.strategy.communication()
        # Before the log is written: the very steps at which Lightning's loggers take their values,
        # and of a step only the last batch.
        num_steps = seams.num_optimizer_steps(trainer) + 1
        is_accumulating = pl_module.automatic_optimization and seams.is_accumulating(trainer)
        if is_accumulating or num_steps % trainer.log_every_n_steps:
            return
        figures = trainer.strategy.communication()
        last, self._last = self._last, dict(figures)
        total = figures["bytes_sent"] - self._bytes_at_start
        for name in filter(_is_counted, figures):
            figures[name] -= last.get(name, 0.0)
        figures["bytes_sent_total"] = total
        figures["participation"] = participation(figures, trainer.world_size)
        now_s = time.monotonic()
        figures["wait_share"] = min(1.0, figures["wait_s"] / max(1e-9, now_s - self._logged_s))
        self._logged_s = now_s
        for name, value in figures.items():
            shown = self.prog_bar and name in _IN_PROGRESS_BAR
            pl_module.log(
                f"dsgd/{name}", value, shown, on_step=True, on_epoch=False, sync_dist=False
            )

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.barrier()  # standing still is waiting, too, and belongs to this epoch
        before = trainer.strategy.communication()
        own = (self._of_rank or before) | {"wait_s": before["wait_s"]}
        own["participation"] = participation(own, trainer.world_size)
        figures = {name: own[name] for name in _OF_RANK if name in own}
        for name in filter(_is_counted, figures):
            figures[name] -= self._at_epoch_start.get(name, 0.0)
        by_rank = gathered(trainer.strategy.session, figures)
        after = trainer.strategy.communication()
        for name in self._last.keys() & after.keys():
            if name != "wait_s" and _is_counted(name):  # what gathering costs is not a step's
                self._last[name] += after[name] - before[name]
        if not trainer.is_global_zero:
            return
        metrics = {}
        for name in figures:
            values = [theirs[name] for theirs in by_rank if name in theirs]
            metrics[f"dsgd/mean/{name}"] = sum(values) / len(values)
            metrics[f"dsgd/max/{name}"] = max(values)
        step = seams.num_optimizer_steps(trainer)
        if self.per_rank:
            metrics |= self._of_each(by_rank, step)
        # Not by `log`, which would warn that the other ranks' values are left out.
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)

    def _of_each(self, by_rank: list[dict[str, float]], step: int) -> dict[str, float]:
        """Returns each rank's figures, and keeps them for the charts."""
        metrics = {}
        for rank, theirs in enumerate(by_rank):
            for name, value in theirs.items():
                metrics[f"dsgd/rank_{rank:05d}/{name}"] = value
                line = self._series.setdefault(name, {}).setdefault(f"rank {rank}", ([], []))
                line[0].append(step)
                line[1].append(value)
        return metrics

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for logger in trainer.loggers if trainer.is_global_zero else ():
            for name, series in self._series.items():
                trackers.give_series(logger, name, series)


def gathered(session: Any, figures: dict[str, float]) -> list[dict[str, float]]:
    """Returns every rank's figures, by rank; a lost rank has none.

    All ranks call it, between steps.
    """

    def gather() -> list[Any]:
        theirs = [json.loads(text) for text in session.texts(json.dumps(figures))]
        return [[*session.ranks.members], theirs]

    # Who takes them over from others may be in a view with fewer members.
    alone = [[session.rank], [figures]]
    members, theirs = session.ranks.together(gather, apart=alone)
    by_rank: list[dict[str, float]] = [{} for _ in range(max(members) + 1)]
    for rank, each in zip(members, theirs, strict=True):
        by_rank[rank] = each
    return by_rank


class StragglerInjector(pl.Callback):
    """Delays some random ranks in every step, as the papers do in their experiments.

    Args:
        delay_s: how long a delayed rank sleeps
        num_ranks: how many ranks are delayed in each step
        seed: the seed of the draw, the same on all ranks
        on: what is late: the "host", which sleeps, or the "device", whose kernel spins so long
            before the step; the host goes on meanwhile.  Only CUDA devices have such a kernel
    """

    def __init__(self, delay_s: float, num_ranks: int = 1, seed: int = 0, on: str = "host") -> None:
        if not delay_s >= 0:
            raise ValueError(
                f"delay_s must not be negative, got delay_s={delay_s}; try delay_s=0.3"
            )
        if num_ranks < 0:
            raise ValueError(f"num_ranks must not be negative, got num_ranks={num_ranks}; try 1")
        if on not in ("host", "device"):
            raise ValueError(f'on must be "host" or "device", got on={on!r}; try on="host"')
        self.delay_s = delay_s
        self.num_ranks = num_ranks
        self.seed = seed
        self.on = on
        self._step = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.num_ranks > trainer.world_size:
            raise ValueError(
                "num_ranks must be at most the number of ranks, got "
                f"num_ranks={self.num_ranks} with {trainer.world_size} ranks; "
                f"try num_ranks={trainer.world_size}"
            )
        if self.on == "device":
            accelerators.spin(trainer.strategy.root_device, 0.0)
        self._step = 0

    def delayed_ranks(self, step: int, world_size: int) -> list[int]:
        """Returns the ranks delayed in this step: a pure function of seed, step and world_size."""
        return delayed_ranks(self.seed, step, world_size, self.num_ranks)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_rank in self.delayed_ranks(self._step, trainer.world_size):
            self._delay(trainer)
        self._step += 1

    def _delay(self, trainer: Any) -> None:
        if self.on == "host":
            time.sleep(self.delay_s)
        else:
            accelerators.spin(trainer.strategy.root_device, self.delay_s)


class CheckpointArtifacts(pl.Callback):
    """Gives a run of W&B or MLflow the checkpoints whole: with the replica of each rank.

    ```python
    L.Trainer(strategy="wagma", logger=WandbLogger(), callbacks=[CheckpointArtifacts()])
    ```

    Use it in place of the loggers' own `log_model`, which gives the file with the consensus alone.
    From what it gives, as many ranks resume exactly.  An offline run of W&B keeps a copy, and
    `wandb sync` sends the copy.

    It gives what ModelCheckpoint keeps when training ends: the best checkpoints and the last.

    Args:
        as_they_come: whether checkpoints are given after each epoch too, as a job needs it that may
            be killed
    """

    def __init__(self, as_they_come: bool = False) -> None:
        self.as_they_come = as_they_come
        self._given: dict[str, int] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if not any(map(trackers.takes_pages, trainer.loggers)):
            found = ", ".join(type(logger).__name__ for logger in trainer.loggers) or "no logger"
            raise ValueError(
                f"CheckpointArtifacts needs WandbLogger or MLFlowLogger, got {found}; give the "
                "Trainer one of them, or leave the callback out"
            )

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self.as_they_come:
            self._give(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._give(trainer)

    def _give(self, trainer: Any) -> None:
        if not trainer.is_global_zero:
            return
        for saver in trainer.checkpoint_callbacks:
            best = getattr(saver, "best_model_path", "")
            kept = [
                *getattr(saver, "best_k_models", ()),
                best,
                getattr(saver, "last_model_path", ""),
            ]
            for name in dict.fromkeys(filter(None, kept)):
                file = Path(os.path.realpath(name))
                if not file.is_file():
                    continue  # ModelCheckpoint has removed it
                saved_ns = file.stat().st_mtime_ns
                if self._given.get(str(file)) != saved_ns:
                    self._given[str(file)] = saved_ns
                    score = getattr(saver, "best_k_models", {}).get(name)
                    about = {
                        "file": file.name,
                        "num_ranks": trainer.world_size,
                        "score": None if score is None else float(score),
                    }
                    aliases = ["latest", "best"] if name == best else ["latest"]
                    self._give_one(trainer, file, aliases, about)

    @staticmethod
    def _give_one(trainer: Any, file: Path, aliases: list[str], about: dict[str, Any]) -> None:
        replicas = Path(f"{file}.replicas")
        found = len(list(replicas.glob("rank_*.pt")))
        if 0 < found < trainer.world_size:
            warnings.warn(
                f"{replicas} has the replicas of {found} ranks of {trainer.world_size}: from the "
                "artifact no exact resume is possible; save into a folder that all nodes see",
                stacklevel=2,
            )
        for logger in filter(trackers.takes_pages, trainer.loggers):
            trackers.give_checkpoint(logger, file, replicas, aliases, about)
