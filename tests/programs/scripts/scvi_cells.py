"""scvi-tools' variational model of made cells on two ranks; the environment names the strategy."""

from __future__ import annotations

import os

import scvi


def main() -> None:
    name = os.environ["PL_TRAINER_STRATEGY"]
    strategy = "ddp_find_unused_parameters_true" if name == "ddp" else f"ddp_{name}"
    scvi.settings.seed = 0
    cells = scvi.data.synthetic_iid(batch_size=400, n_genes=100)
    scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
    model = scvi.model.SCVI(cells)
    model.train(
        max_epochs=5,
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        check_val_every_n_epoch=1,
        train_size=0.9,
        batch_size=32,
        enable_progress_bar=False,
    )
    history = model.history
    if "elbo_validation" in history:  # on the first rank
        print("elbo_validation", history["elbo_validation"].iloc[-1].item())


if __name__ == "__main__":
    main()
