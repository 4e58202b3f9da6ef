"""What `benchmarks convergence` trains, by name: `--task`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Workload:
    """Names what is trained, "module:class" of the model and of the data, and what is watched.

    Args:
        model: the LightningModule
        data: the LightningDataModule
        monitor: the logged name of the validation value
        higher_is_better: whether the higher of two values is the better
        model_options: options of the model
        data_options: options of the data
    """

    model: str
    data: str
    monitor: str
    higher_is_better: bool
    model_options: dict[str, Any]
    data_options: dict[str, Any]


_DIGITS: Final = "lightning_dsgd.tasks.digits"
_HELD_OUT: Final = {"split": (1077, 720, 0)}  # one image of 720 is 0.14 points
WORKLOADS: Final = {
    "digits": Workload(
        f"{_DIGITS}:DigitsClassifier",
        f"{_DIGITS}:DigitsData",
        "val_accuracy",
        True,
        {"lr": 0.02},
        _HELD_OUT,
    ),
    "resnet": Workload(  # residual, with BatchNorm
        "lightning_dsgd.tasks.images:ImageClassifier",
        f"{_DIGITS}:DigitsData",
        "val_accuracy",
        True,
        {"network": "resnet8", "lr": 0.05, "decay": "cosine"},
        _HELD_OUT,
    ),
    "language": Workload(  # characters of Python's own library
        "lightning_dsgd.tasks.language:CausalLanguageModel",
        "lightning_dsgd.tasks.language:TextData",
        "val_loss",
        False,
        {"dim": 64, "depth": 2, "seq_len": 64, "lr": 3e-3, "decay": "cosine"},
        {"seq_len": 64, "max_chars": 200_000, "batch_size": 16},
    ),
}
