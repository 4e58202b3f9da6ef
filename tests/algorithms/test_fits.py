"""Strategies under `Trainer.fit`: one model at the end, and a resume to the bit.

`tests/session` and `tests/trainer` show the same, and much more, of the four that stand for all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_dsgd import STRATEGIES
from lightning_dsgd.hyperparameters import parse
from tests.support.fits import buffers
from tests.support.models import Regression, loader, trainer, weights
from tests.support.thorough import cases
from tests.support.worlds import FitWorld

STREAMING = "sync_period=6:num_fragments=2:overlap_steps=2:wire_dtype=int4:outer_momentum=0.4"
FITS = {
    "hpsgd:max_local_steps=1:outer_lr=0.7:outer_momentum=0.5": 2,
    "oktopk:density=0.2:local_steps=4": 2,
    "sgp:overlap=1": 3,
    "adpsgd": 3,
    "noloco:sync_period=3": 2,
    "diloco:sync_period=4:num_fragments=2:fragments=layers": 2,
}
"""Each with its number of ranks: what makes averages in another way than the four does."""
LATE_FITS = {
    "sparse_loco:density=0.4:local_steps=3": 2,
    "popsgd:wire_dtype=bfloat16": 3,
    "sgp:hierarchical=true:node_size=2": 4,
    "sgp:hierarchical=true": 2,
    "popsgd:blocking=true:topology=cycle": 4,
    f"diloco:{STREAMING}": 3,
    f"diloco:{STREAMING}:mixing=0.5": 3,
    "gtopk:density=0.2": 3,
}
IN_TIME = ("adpsgd", "popsgd:wire_dtype=bfloat16", "sgp:overlap=1")
"""Two trainings with these differ by what comes when."""
EVEN = [spec for spec in LATE_FITS if spec.startswith(("sgp", "popsgd:b"))]
"""Here when a rank tells that it has run out of data makes a difference too."""


class Modest(Regression):
    """With dropout, BatchNorm, and weights of two dtypes, which have an algorithm each."""

    def __init__(self) -> None:
        L.seed_everything(0, verbose=False)
        super().__init__(lr=0.02)
        layers = nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)
        self.net = nn.Sequential(*layers)
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.evaluated: list[Tensor] = []
        self.losses: list[float] = []
        self.push_weights: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch[0], batch[1] / self.scale.float()))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]

    def on_validation_epoch_start(self) -> None:
        self.evaluated.append(torch.cat([weights(self).double(), buffers(self)]))
        figures = self.trainer.strategy.communication()
        self.push_weights.append(figures.get("push_weight", 1.0))

    def on_validation_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics["val_loss"]))


def strategy(spec: str) -> Any:
    name, options = parse(spec)
    return STRATEGIES[name](timeout_s=60.0, **options)


def fit(spec: str, world_size: int, folder: str, ckpt_path: str | None = None) -> dict[str, Any]:
    """Three epochs, with accumulation and clipping, in which this rank has some more batches."""
    saver = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    run = trainer(
        strategy(spec),
        world_size,
        max_epochs=3,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0 if "local_steps" not in spec else None,
        use_distributed_sampler=False,
        callbacks=[] if ckpt_path else [saver],
        enable_checkpointing=not ckpt_path,
    )
    model, more = Modest(), 0 if spec in EVEN else 2 * run.global_rank
    run.fit(model, loader(8 * (12 + more)), loader(32), ckpt_path=ckpt_path)
    state = run.optimizers[0].state_dict()["state"].values()
    return {
        "end": [torch.cat([weights(model).double(), buffers(model)])],
        "momentum": [each["momentum_buffer"].reshape(-1) for each in state],
        "evaluated": model.evaluated,
        "losses": model.losses,
        "push_weights": model.push_weights,
        "steps": run.global_step,
    }


def fit_and_resume(spec: str, world_size: int, folder: str) -> list[dict[str, Any]]:
    """The second fit begins where the first has saved its first epoch."""
    whole = fit(spec, world_size, folder)
    if spec in IN_TIME:
        return [whole]
    return [whole, fit(spec, world_size, folder, f"{folder}/epoch=0.ckpt")]


@cases("spec, world_size", now=[*FITS.items()], later=[*LATE_FITS.items()])
def test_a_fit_ends_in_one_model_and_resumes(spec: str, world_size: int, tmp_path: Path) -> None:
    ranks = FitWorld(timeout_s=60.0).run(
        world_size, fit_and_resume, spec, world_size, str(tmp_path)
    )
    first = ranks[0][0]
    saved = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)["state_dict"]
    for rank, (whole, *resumed) in enumerate(ranks):
        for kind in ("end", "evaluated"):
            assert all(map(torch.equal, whole[kind], first[kind])), kind
        assert whole["losses"] == first["losses"]
        assert whole["steps"] == 3 * (6 + rank * (spec not in EVEN))
        assert not spec.startswith("hpsgd") or torch.equal(whole["end"][0], whole["evaluated"][-1])
        for again in resumed:
            assert all(map(torch.equal, again["end"], whole["end"]))
            assert all(map(torch.equal, again["momentum"], whole["momentum"]))
            assert all(map(torch.equal, again["evaluated"][-2:], whole["evaluated"][-2:]))
            assert (again["losses"][-2:], again["steps"]) == (whole["losses"][-2:], whole["steps"])
    assert first["losses"][-1] < 0.75 * first["losses"][0]
    values = [saved[key] for key in sorted(saved, key=lambda key: "running" in key or "num" in key)]
    shown = torch.cat([value.double().reshape(-1) for value in values])  # weights, then buffers
    assert torch.equal(shown, first["evaluated"][1])
    for shares in zip(*(whole["push_weights"] for whole, *_ in ranks), strict=True):
        assert sum(shares) == pytest.approx(world_size, abs=1e-12)
