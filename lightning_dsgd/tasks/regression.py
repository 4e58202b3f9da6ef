"""The convex problems of the PopSGD paper (https://arxiv.org/abs/1910.12308, section 6).

Least squares that are generated, linear regression on YearPredictionMSD and logistic regression on
gisette, both in the format in which the UCI repository keeps them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanSquaredError

from lightning_dsgd.tasks.base import Batch, Classifier, SplitData, Task

YEAR_FEATURES = 90
YEAR_TRAIN = 463_715
"""The rows of YearPredictionMSD.txt to train on; its authors say that the others are to test."""
GISETTE_FEATURES = 5000


def least_squares(
    num_samples: int, dim: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Returns A and b of f(x) = |A x - b|^2 / 2m: A normal (m, d), b = A 1 + normal noise."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(num_samples, dim, generator=generator, dtype=dtype)
    b = a.sum(1) + torch.randn(num_samples, generator=generator, dtype=dtype)
    return a, b


class LinearRegression(Task):
    """Minimises f(x) = (a x - b)^2 / 2 over samples (a, b), from x = 0.

    Args:
        num_features: the features of a sample.
        bias: whether a constant is added to a x.
        lr: learning rate.
        momentum: the momentum of SGD.
        **kwargs: options of `Task`.
    """

    def __init__(
        self,
        num_features: int = 8,
        bias: bool = False,
        lr: float = 0.01,
        momentum: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(lr=lr, momentum=momentum, **kwargs)
        self.save_hyperparameters()
        self.net = zero_linear(num_features, 1, bias)
        self.val_mse = MeanSquaredError()
        self.test_mse = MeanSquaredError()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.net(inputs)
        return outputs[:, 0]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self(inputs), targets) / 2
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch, self.val_mse)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("test", batch, self.test_mse)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch[0])  # type: ignore[no-any-return]

    def _evaluate(self, split: str, batch: Batch, mse: MeanSquaredError) -> None:
        inputs, targets = batch
        predicted = self(inputs)
        mse.update(predicted, targets)
        loss = nn.functional.mse_loss(predicted, targets) / 2
        self.log(f"{split}_loss", loss, on_epoch=True, sync_dist=True)
        self.log(f"{split}_mse", mse, on_epoch=True, prog_bar=True)


class LogisticRegression(Classifier):
    """Trains logistic regression from weights of 0; two logits differ by the usual form's one.

    Args:
        num_features: the features of a sample.
        num_classes: how many classes there are.
        lr: learning rate.
        momentum: the momentum of SGD.
        **kwargs: options of `Task`.
    """

    def __init__(
        self,
        num_features: int = 100,
        num_classes: int = 2,
        lr: float = 0.1,
        momentum: float = 0.0,
        **kwargs: Any,
    ) -> None:
        net = zero_linear(num_features, num_classes, bias=True)
        super().__init__(net, num_classes, lr=lr, momentum=momentum, **kwargs)
        self.save_hyperparameters()


def zero_linear(num_inputs: int, num_outputs: int, bias: bool) -> nn.Linear:
    """Makes a linear layer whose weights are 0."""
    layer = nn.Linear(num_inputs, num_outputs, bias)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


class LeastSquaresData(SplitData):
    """Loads the generated least squares of the PopSGD paper; validates on the training data.

    Args:
        num_samples: rows of A.
        num_features: columns of A.
        batch_size: samples a rank and step; the paper's appendix has 1.
        num_workers: loader processes a rank.
        **kwargs: options of `SplitData`.
    """

    def __init__(
        self,
        num_samples: int = 4096,
        num_features: int = 8,
        batch_size: int = 1,
        num_workers: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(batch_size, num_workers, **kwargs)
        self.num_samples = num_samples
        self.num_features = num_features

    def setup(self, stage: str) -> None:
        dataset = TensorDataset(
            *least_squares(self.num_samples, self.num_features, dtype=torch.float32)
        )
        self.splits = dict.fromkeys(("train", "val", "test"), dataset)

    def val_dataloader(self) -> Any:
        return self._loader("val", batch_size=max(self.batch_size, 256))


class YearPredictionData(SplitData):
    """Loads the year of a song and 90 figures of its timbre, each brought to mean 0 and variance 1.

    Years are brought there too: always saying the mean year has a mean squared error of 1.

    Args:
        path: YearPredictionMSD.txt: a line a song, the year and the figures between commas; None
            for a linear problem of this form that is generated.
        num_train: the first so many lines are to train, the others to validate and test.
        batch_size: songs a rank and step.
        num_workers: loader processes a rank.
        **kwargs: options of `SplitData`.
    """

    def __init__(
        self,
        path: str | None = None,
        num_train: int = YEAR_TRAIN,
        batch_size: int = 32,
        num_workers: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(batch_size, num_workers, **kwargs)
        self.path = path
        self.num_train = num_train

    def setup(self, stage: str) -> None:
        if self.path is None:
            features, years = least_squares(5000, YEAR_FEATURES, dtype=torch.float32)
            table = torch.cat((years[:, None], features), 1)
            num_train = 4500
        else:
            table = read_table(Path(self.path), YEAR_FEATURES + 1, ",")
            num_train = self.num_train
            if len(table) <= num_train:
                raise ValueError(
                    f"there must be more lines than num_train, got {len(table)} lines with "
                    f"num_train={num_train}; lower num_train, or fetch the whole file"
                )
        mean, std = table[:num_train].mean(0), table[:num_train].std(0)
        table = (table - mean) / std.clamp_min(1e-12)
        train, val = (
            TensorDataset(rows[:, 1:], rows[:, 0])
            for rows in (table[:num_train], table[num_train:])
        )
        self.splits = {"train": train, "val": val, "test": val}


class GisetteData(SplitData):
    """Loads the digits 4 and 9, described by 5,000 figures, of which half mean nothing.

    Args:
        path: folder with gisette_train.data, gisette_train.labels, gisette_valid.data and
            gisette_valid.labels: a line a sample, figures from 0 to 999 between spaces, and its
            class, 1 or -1.  None for a problem of this form with 100 figures that is generated.
        batch_size: samples a rank and step.
        num_workers: loader processes a rank.
        **kwargs: options of `SplitData`.
    """

    def __init__(
        self, path: str | None = None, batch_size: int = 32, num_workers: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(batch_size, num_workers, **kwargs)
        self.path = path

    def setup(self, stage: str) -> None:
        if self.path is None:
            a, b = least_squares(4000, 100, seed=5, dtype=torch.float32)
            labels = (b > 0).long()
            train = TensorDataset(a[:2000], labels[:2000])
            val = TensorDataset(a[2000:], labels[2000:])
        else:
            train, val = (self._read(Path(self.path), split) for split in ("train", "valid"))
        self.splits = {"train": train, "val": val, "test": val}

    def _read(self, folder: Path, split: str) -> TensorDataset:
        features = read_table(folder / f"gisette_{split}.data", GISETTE_FEATURES, None)
        labels = read_table(folder / f"gisette_{split}.labels", 1, None)[:, 0]
        if len(features) != len(labels) or not (labels.abs() == 1).all():
            raise ValueError(
                f"gisette_{split}.labels must have a line of 1 or -1 for each of the "
                f"{len(features)} lines of gisette_{split}.data, got {len(labels)} lines"
            )
        return TensorDataset(features / 999, (labels > 0).long())


def read_table(file: Path, num_columns: int, separator: str | None) -> Tensor:
    """Returns the numbers of a text file, (lines, num_columns); by default, blanks separate."""
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist; it is kept at https://archive.ics.uci.edu")
    rows = []
    with file.open() as lines:
        for number, line in enumerate(lines, 1):
            fields = line.split(separator)
            if not line.strip():
                continue
            if len(fields) != num_columns:
                raise ValueError(
                    f"{file}:{number} must hold {num_columns} numbers, got {len(fields)}"
                )
            rows.append(torch.tensor([float(field) for field in fields]))
    if not rows:
        raise ValueError(f"{file} must hold lines of {num_columns} numbers, got none")
    return torch.stack(rows)
