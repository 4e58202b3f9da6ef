"""A smoke of every strategy, for `make test-versions`: it trains, saves, resumes and agrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_dsgd.algorithms import ALL_ALGORITHMS
from lightning_dsgd.trainer.named import strategy_of
from tests.support.models import Regression, loader, trainer, weights
from tests.support.worlds import FitWorld


def fit(name: str, folder: Path, **kwargs: Any) -> tuple[L.LightningModule, L.Trainer]:
    L.seed_everything(0, verbose=False)  # how soon it learns depends on where it begins
    model = Regression()
    saver = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=-1)
    run = trainer(
        strategy_of(name, timeout_s=20.0),
        2,
        callbacks=[saver],
        enable_checkpointing=True,
        max_epochs=kwargs.pop("max_epochs"),
    )
    run.fit(model, loader(), loader(32), **kwargs)
    return model, run


def fit_and_resume(folder: Path) -> dict[str, tuple[Tensor, int, float]]:
    """Two epochs under each strategy, the second by another trainer: weights, steps, loss."""
    results = {}
    for name in ALL_ALGORITHMS:
        fit(name, folder / name, max_epochs=1)
        path = str(folder / name / "epoch=0.ckpt")
        model, run = fit(name, folder / name, max_epochs=2, ckpt_path=path)
        loss = float(run.callback_metrics["val_loss"])
        results[name] = weights(model), run.global_step, loss
    return results


@pytest.mark.exhaustive
@pytest.mark.versions
def test_every_strategy_trains_and_resumes(tmp_path: Path) -> None:
    ours, theirs = FitWorld().run(2, fit_and_resume, tmp_path)
    assert set(ours) == set(ALL_ALGORITHMS)
    for name, (x, steps, loss) in ours.items():
        assert torch.equal(x, theirs[name][0]), name
        assert (steps, theirs[name][1]) == (16, 16), name
        assert loss == theirs[name][2], name
        assert x.isfinite().all(), name
    for name in ("allreduce", "local_sgd", "dpsgd", "sgp"):  # others learn by what time allows
        assert ours[name][2] < 5, name  # of 10, the variance of the target
