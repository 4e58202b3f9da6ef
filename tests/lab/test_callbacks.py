"""Callbacks of ours: what they log, and where."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, WandbLogger

from lightning_dsgd import CheckpointArtifacts, CommunicationMonitor, LocalSGD, StragglerInjector
from lightning_dsgd.lab import trackers
from lightning_dsgd.replica import flat
from tests.support.fits import Plain, fit, run, strategy
from tests.support.models import loader, trainer, weights
from tests.support.trackers import wandb_logger

# ---- figures ----
DELAY_S = 0.4  # which is much beside what a busy machine delays the other rank


class Bar(L.Callback):
    def __init__(self) -> None:
        self.shown: list[set[str]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.shown.append({name for name in trainer.progress_bar_metrics if "dsgd" in name})


def fit_with_figures(folder: str) -> tuple[int, list[int], list[set[str]]]:
    """Bytes of the weights, who was delayed in each batch, and what the progress bar showed."""
    straggler, bar = StragglerInjector(DELAY_S, num_ranks=1, seed=1), Bar()
    model, run = fit(
        "allreduce",
        val={"num_samples": 16},
        max_epochs=2,
        accumulate_grad_batches=2,
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=2,
        callbacks=[CommunicationMonitor(per_rank=True, prog_bar=True), straggler, bar],
    )
    (weights_of,) = flat.flatten(model.named_parameters())
    delayed = [straggler.delayed_ranks(batch, run.world_size) for batch in range(16)]
    return weights_of.x.nbytes, [rank for (rank,) in delayed], bar.shown


def read_figures(folder: Path, name: str) -> list[dict[str, float]]:
    """The rows that have a figure."""
    with (folder / "metrics.csv").open() as file:
        return [
            {key: float(value) for key, value in row.items() if value}
            for row in csv.DictReader(file)
            if row.get(name)
        ]


def test_figures_in_the_csv_log_are_those_of_the_formula(tmp_path: Path) -> None:
    """Of steps of two batches, in two epochs; the progress bar shows some of them."""
    (num_bytes, delayed, shown), *_ = run(2, fit_with_figures, str(tmp_path))
    rows = read_figures(tmp_path, "dsgd/bytes_sent")
    assert [row["step"] for row in rows] == [1, 3, 5, 7]
    # Two steps, each with 2(P-1)/P |g|, and 8 bytes for this rank and each parameter.
    step_bytes = 2 * (num_bytes + 8 * (1 + 4))
    first_of_epoch_2 = rows[2]  # since the first epoch's evaluation
    assert all(r["dsgd/bytes_sent"] == step_bytes for r in rows if r is not first_of_epoch_2)
    for row in rows:
        assert row["dsgd/bytes_sent_tcp"] == row["dsgd/bytes_sent"] >= step_bytes
        assert row["dsgd/messages_sent_tcp"] == row["dsgd/messages_sent"] >= 4
        assert 0 <= row["dsgd/comm_overlap"] <= 1
        assert row["dsgd/consensus_distance"] == 0
    # Whoever was delayed less often in a step waits for who was more often.
    behind = [sum(delayed[step : step + 2]) - 1 for step in range(0, 16, 2)]
    waits = behind.count(1)
    assert waits > 0
    assert sum(row["dsgd/wait_s"] for row in rows) >= 0.5 * 2 * DELAY_S * waits
    assert all((row["dsgd/wait_share"] > 0) == (row["dsgd/wait_s"] > 0) for row in rows)
    assert all(row["dsgd/wait_share"] <= 1 for row in rows)
    waits_shown = {"dsgd/wait_s", "dsgd/wait_share"}
    assert [names - {"dsgd/consensus_distance"} for names in shown[4:]] == [waits_shown] * 12
    assert shown[-1] == waits_shown | {"dsgd/consensus_distance"}
    # At each epoch's end every rank's figures, of this epoch alone.
    first, second = read_figures(tmp_path, "dsgd/rank_00000/wait_s")
    for row in (first, second):
        for name in ("wait_s", "bytes_sent"):
            each = [row[f"dsgd/rank_{rank:05d}/{name}"] for rank in range(2)]
            assert row[f"dsgd/max/{name}"] == max(each)
            assert row[f"dsgd/mean/{name}"] == pytest.approx(sum(each) / 2)
    assert first["dsgd/rank_00001/bytes_sent"] == second["dsgd/rank_00001/bytes_sent"] > 0


def fit_with_wandb(folder: str) -> str:
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")
    logger = WandbLogger(save_dir=folder, offline=True, project="tests")
    monitor = CommunicationMonitor(per_rank=True)
    fit("local_sgd", logger=logger, log_every_n_steps=2, callbacks=[monitor])
    import wandb

    directory = wandb.run.dir if wandb.run is not None else ""
    wandb.finish()
    return directory


def test_figures_are_in_an_offline_wandb_run_with_their_step_axis(tmp_path: Path) -> None:
    ranks = run(2, fit_with_wandb, str(tmp_path))
    assert ranks[0]
    assert not ranks[1]
    (file,) = tmp_path.rglob("*.wandb")
    records = file.read_bytes()
    assert records.count(b"dsgd/bytes_sent") >= 4  # 8 steps, every second one logged
    assert b"trainer/global_step" in records[records.index(b"dsgd/*") :][:64]  # the step axis
    for entry in (b'"name":"local_sgd"', b'"num_ranks":2', b'"sync_period":4', b'"on_loss":"end"'):
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
    return weights(model), kept.rules, kept.aliases, lines, kept.config


def test_from_a_wandb_artifact_training_resumes_exactly(tmp_path: Path) -> None:
    """And the run has its config, summary rules, and a chart with a line for each rank."""
    whole = run(2, fit_epochs, tmp_path / "whole", 2)
    run(2, fit_epochs, tmp_path / "part", 1)
    artifact = tmp_path / "part" / "model-abc"
    resumed = run(2, fit_epochs, tmp_path / "rest", 2, artifact / "model.ckpt")
    assert len(list(artifact.glob("model.ckpt.replicas/rank_*.pt"))) == 2
    for (straight, *_), (again, *_) in zip(whole, resumed, strict=True):
        assert torch.equal(straight, again)
    _, rules, aliases, lines, config = whole[0]
    said = {"name": "local_sgd", "num_ranks": 2, "sync_period": 4, "on_loss": "end"}
    assert said.items() <= config["strategy"].items()
    assert "dsgd/*" in rules
    assert rules["dsgd/wait_share"] == "mean"
    assert aliases == [["latest", "best"]]
    assert sorted(lines) == ["rank 0"] * 2 + ["rank 1"] * 2  # of two epochs


@pytest.mark.parametrize("wire", ["process_group", "mpi as rank 0 of 2", "smoke"])
def test_a_tracker_is_told_the_wire_that_carries_messages(wire: str) -> None:
    net = SimpleNamespace(wire=SimpleNamespace(name=wire))
    of_rank = SimpleNamespace(
        session=SimpleNamespace(net=net), algorithm=LocalSGD(), in_force={"transport": "auto"}
    )
    assert trackers.in_force(of_rank, 2)["transport"] == wire.split()[0]


def test_checkpoints_are_given_to_no_other_logger(tmp_path: Path) -> None:
    fitted = trainer("auto", 1, logger=CSVLogger(tmp_path))
    with pytest.raises(ValueError, match="needs WandbLogger or MLFlowLogger, got CSVLogger"):
        CheckpointArtifacts().setup(fitted, None, "fit")
