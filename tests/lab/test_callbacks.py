"""Callbacks of ours: what they log, and where."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, WandbLogger

from lightning_dsgd import CheckpointArtifacts, CommunicationMonitor, StragglerInjector
from lightning_dsgd.lab.stragglers import delayed_ranks
from lightning_dsgd.replica import flat
from tests.support.fits import Plain, fit, run, strategy
from tests.support.models import loader, trainer, weights
from tests.support.trackers import wandb_logger

# ---- figures ----
DELAY_S = 0.4  # which is much beside what a busy machine delays the other rank


def fit_with_figures(
    name: str, folder: str, accumulate: int = 1, delay_s: float = DELAY_S
) -> tuple[int, list[list[int]]]:
    straggler = StragglerInjector(delay_s, num_ranks=1, seed=1)
    model, run = fit(
        name,
        val={"num_samples": 16},
        accumulate_grad_batches=accumulate,
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=2,
        callbacks=[CommunicationMonitor(), straggler],
    )
    (weights_of,) = flat.flatten(model.named_parameters())
    delayed = [straggler.delayed_ranks(step, run.world_size) for step in range(8)]
    return weights_of.x.nbytes, delayed


def read_figures(folder: Path) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open() as file:
        return [
            {key: float(value) for key, value in row.items() if value}
            for row in csv.DictReader(file)
            if row.get("dsgd/bytes_sent")
        ]


def test_figures_count_all_batches_of_an_accumulated_step(tmp_path: Path) -> None:
    (num_bytes, _), *_ = run(2, fit_with_figures, "allreduce", str(tmp_path), 2, 0.0)
    rows = read_figures(tmp_path)
    assert [row["dsgd/bytes_sent"] for row in rows] == [2 * (num_bytes + 8 * (1 + 4))] * len(rows)
    assert len(rows) == 2


def test_figures_in_the_csv_log_are_those_of_the_formula(tmp_path: Path) -> None:
    (num_bytes, delayed), *_ = run(2, fit_with_figures, "allreduce", str(tmp_path))
    rows = read_figures(tmp_path)
    assert [row["step"] for row in rows] == [1, 3, 5, 7]
    for row in rows:
        # Two steps, each with 2(P-1)/P |g|, and 8 bytes for this rank and each parameter.
        assert row["dsgd/bytes_sent"] == 2 * (num_bytes + 8 * (1 + 4))
        assert row["dsgd/bytes_sent_tcp"] == row["dsgd/bytes_sent"]
        assert row["dsgd/messages_sent_tcp"] == row["dsgd/messages_sent"] >= 4
        assert 0 <= row["dsgd/comm_overlap"] <= 1
    # Whoever is not delayed waits for who is.
    assert all(len(ranks) == 1 for ranks in delayed)
    waits = sum(ranks == [1] for ranks in delayed)
    assert 0 < waits < 8
    assert sum(row["dsgd/wait_s"] for row in rows) >= 0.5 * DELAY_S * waits
    assert all((row["dsgd/wait_share"] > 0) == (row["dsgd/wait_s"] > 0) for row in rows)
    assert all(row["dsgd/wait_share"] <= 1 for row in rows)


def test_the_distance_of_the_ranks_is_logged(tmp_path: Path) -> None:
    run(2, fit_with_figures, "no_sync", str(tmp_path))
    rows = read_figures(tmp_path)
    assert [row["dsgd/bytes_sent"] for row in rows] == [0.0] * 4
    assert rows[0]["dsgd/consensus_distance"] == 0.0  # of the sanity check


def fit_with_wandb(name: str, folder: str) -> str:
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")
    logger = WandbLogger(save_dir=folder, offline=True, project="tests")
    monitor = CommunicationMonitor(per_rank=True)
    fit(name, logger=logger, log_every_n_steps=2, callbacks=[monitor])
    import wandb

    directory = wandb.run.dir if wandb.run is not None else ""
    wandb.finish()
    return directory


def test_figures_are_in_an_offline_wandb_run_with_their_step_axis(tmp_path: Path) -> None:
    ranks = run(2, fit_with_wandb, "local_sgd", str(tmp_path))
    assert ranks[0]
    assert not ranks[1]
    (file,) = tmp_path.rglob("*.wandb")
    records = file.read_bytes()
    for key in (b"dsgd/bytes_sent", b"dsgd/messages_sent", b"dsgd/wait_s", b"dsgd/comm_overlap"):
        assert records.count(key) >= 4  # 8 steps, every second one logged
    assert b"trainer/global_step" in records[records.index(b"dsgd/*") :][:64]  # the step axis
    for entry in (b'"name":"local_sgd"', b'"num_ranks":2', b'"sync_period":4'):
        assert entry in records
    for entry in (b'"transport":"process_group"', b'"on_loss":"end"', b'"timeout_s":60'):
        assert entry in records
    for name in ("mean", "max", "rank_00000", "rank_00001"):
        assert f"dsgd/{name}/wait_s".encode() in records


def fit_epochs(folder: Path, epochs: int, checkpoint: Path | None = None) -> Any:
    """The weights in the end; on rank 0 what the run got too."""
    logger, kept = wandb_logger(folder)
    saver = ModelCheckpoint(folder / "saved")
    callbacks = [CommunicationMonitor(per_rank=True), CheckpointArtifacts(), saver]
    model = Plain()
    options = {"max_epochs": epochs, "enable_checkpointing": True, "logger": logger}
    fitted = trainer(strategy("local_sgd"), 2, callbacks=callbacks, **options)
    fitted.fit(model, loader(), ckpt_path=checkpoint)
    lines = [row[1] for row in kept.logged["dsgd/by_rank/wait_s"].table.data] if kept.logged else []
    figures = {name: value for name, value in kept.logged.items() if "by_rank" not in name}
    return weights(model), kept.rules, kept.aliases, lines, figures


def test_from_a_wandb_artifact_training_resumes_exactly(tmp_path: Path) -> None:
    """And the run has summary rules, means and maxima, and a chart with a line for each rank."""
    whole = run(2, fit_epochs, tmp_path / "whole", 2)
    run(2, fit_epochs, tmp_path / "part", 1)
    artifact = tmp_path / "part" / "model-abc"
    resumed = run(2, fit_epochs, tmp_path / "rest", 2, artifact / "model.ckpt")
    assert len(list(artifact.glob("model.ckpt.replicas/rank_*.pt"))) == 2
    for (straight, *_), (again, *_) in zip(whole, resumed, strict=True):
        assert torch.equal(straight, again)
    _, rules, aliases, lines, figures = whole[0]
    assert rules["dsgd/wait_share"] == "mean"
    assert aliases == [["latest", "best"]]
    assert sorted(lines) == ["rank 0"] * 2 + ["rank 1"] * 2  # of two epochs
    for name in ("wait_s", "bytes_sent"):
        each = [figures[f"dsgd/rank_{rank:05d}/{name}"] for rank in range(2)]
        assert figures[f"dsgd/max/{name}"] == max(each)
        assert figures[f"dsgd/mean/{name}"] == pytest.approx(sum(each) / 2)


def test_checkpoints_are_given_to_no_other_logger(tmp_path: Path) -> None:
    fitted = trainer("auto", 1, logger=CSVLogger(tmp_path))
    with pytest.raises(ValueError, match="needs WandbLogger or MLFlowLogger, got CSVLogger"):
        CheckpointArtifacts().setup(fitted, None, "fit")


class Bar(L.Callback):
    def __init__(self) -> None:
        self.shown: list[set[str]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.shown.append({name for name in trainer.progress_bar_metrics if "dsgd" in name})


def fit_with_figures_in_the_bar(prog_bar: bool) -> list[set[str]]:
    bar = Bar()
    monitor = CommunicationMonitor(prog_bar=prog_bar)
    options = {"log_every_n_steps": 2, "val_check_interval": 4, "num_sanity_val_steps": 0}
    fit("wagma", Plain, val={"num_samples": 16}, callbacks=[monitor, bar], **options)
    return bar.shown


def test_the_progress_bar_shows_some_figures_if_asked_to() -> None:
    """Also between the steps at which they are logged; the distance from the first evaluation."""
    assert run(2, fit_with_figures_in_the_bar, False)[0] == [set()] * 8
    shown, _ = run(2, fit_with_figures_in_the_bar, True)
    waits = {"dsgd/wait_s", "dsgd/wait_share", "dsgd/late_share", "dsgd/staleness"}
    assert [names - {"dsgd/consensus_distance"} for names in shown[2:]] == [waits] * 6
    assert shown[-1] == waits | {"dsgd/consensus_distance"}


def fit_two_epochs_with_figures_of_every_rank(folder: str) -> int:
    """The bytes of the weights."""
    logger = CSVLogger(folder, name="", version="")
    straggler = StragglerInjector(delay_s=0.01, num_ranks=1)
    monitor = CommunicationMonitor(per_rank=True)
    model, _ = fit("dpsgd", max_epochs=2, logger=logger, callbacks=[monitor, straggler])
    (weights_of,) = flat.flatten(model.named_parameters())
    return int(weights_of.x.nbytes)


def test_every_ranks_figures_are_logged_at_the_end_of_each_epoch(tmp_path: Path) -> None:
    num_bytes, *_ = run(3, fit_two_epochs_with_figures_of_every_rank, str(tmp_path))
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("dsgd/rank_00000/wait_s")]
    assert len(rows) == 2
    for row in rows:
        for rank in range(3):
            steps = float(row[f"dsgd/rank_{rank:05d}/bytes_sent"]) / (2 * num_bytes)
            assert steps == round(steps) > 0  # its two neighbours', of this epoch alone
            assert float(row[f"dsgd/rank_{rank:05d}/wait_s"]) >= 0
    first, second = (float(row["dsgd/rank_00002/bytes_sent"]) for row in rows)
    assert first == second


# ---- the draw of the ranks that are delayed ----
def test_a_draw_depends_on_the_seed_and_the_step_alone() -> None:
    draws = [delayed_ranks(seed, step, 8, 2) for seed in (0, 1) for step in range(20)]
    assert draws == [delayed_ranks(seed, step, 8, 2) for seed in (0, 1) for step in range(20)]
    assert draws[:20] != draws[20:]
    assert all(len(set(ranks)) == 2 for ranks in draws)
    assert {rank for ranks in draws for rank in ranks} == set(range(8))
