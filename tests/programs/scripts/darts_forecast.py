"""A forecast of two sines by darts' N-BEATS on two ranks; the environment names the strategy."""

from __future__ import annotations

import numpy as np
from darts import TimeSeries
from darts.models import NBEATSModel


def main() -> None:
    t = np.arange(600, dtype=np.float32)
    series = TimeSeries.from_values(np.sin(t / 7) + 0.3 * np.sin(t / 3))
    model = NBEATSModel(
        24,
        12,
        num_stacks=2,
        num_blocks=1,
        num_layers=2,
        layer_widths=32,
        n_epochs=4,
        batch_size=16,
        random_state=0,
        pl_trainer_kwargs={"accelerator": "cpu", "devices": 2, "enable_progress_bar": False},
    )
    model.fit(series[:480], val_series=series[480:])
    if model.trainer.is_global_zero:
        print("val_loss", float(model.trainer.callback_metrics["val_loss"]))


if __name__ == "__main__":
    main()
