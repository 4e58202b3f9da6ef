"""DiLoCo with the Trainer; its parts are tested in `primitives/test_periodic.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dsgd import DiLoCoStrategy
from lightning_dsgd.algorithms.diloco import DiLoCo
from tests.support.models import Regression, loader, trainer, weights
from tests.support.worlds import FitWorld


def test_the_defaults_are_the_papers() -> None:
    algorithm = DiLoCo()
    assert (algorithm.sync_period, algorithm.outer_lr, algorithm.outer_momentum) == (500, 0.7, 0.9)
    assert algorithm.outer_nesterov


def fit(options: dict[str, Any]) -> tuple[Tensor, float]:
    torch.manual_seed(0)
    model = Regression()
    strategy = DiLoCoStrategy(outer_momentum=0.4, timeout_s=60.0, **options)
    fitter = trainer(strategy, 3, max_epochs=3)
    fitter.fit(model, loader(96), loader(96))
    return weights(model), float(fitter.callback_metrics["val_loss"])


@pytest.mark.exhaustive
def test_fits_in_fragments_of_four_bits_while_the_sums_travel() -> None:
    streaming = {
        "sync_period": 6,
        "num_fragments": 2,
        "overlap_steps": 2,
        "wire_dtype": "int4",
    }
    results = FitWorld(timeout_s=60.0).run(3, fit, streaming)
    for x, loss in results:
        assert torch.equal(x, results[0][0])
        assert loss < 2.5  # the variance of the target is 10
