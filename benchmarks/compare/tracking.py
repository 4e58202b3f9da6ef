"""A comparison as W&B runs: one for each strategy and seed, and one with the table of them all.

The runs of a comparison share a group.  They are offline unless WANDB_MODE says otherwise.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import wandb

from benchmarks.compare.plots import plot_convergence
from lightning_dsgd.hyperparameters import parse


def log_comparison(report: dict[str, Any], output: Path, project: str) -> None:
    """Logs what `benchmarks convergence` has written.

    Args:
        report: the contents of the result file
        output: the result file, which becomes an artifact; the runs go into `wandb/` beside it
        project: the project of W&B
    """
    common: dict[str, Any] = {
        "project": project,
        "group": f"{output.stem}-{time.strftime('%Y%m%d-%H%M%S')}",
        "dir": output.absolute().parent,
        "mode": os.environ.get("WANDB_MODE", "offline"),
    }
    for cell in report["cells"]:
        spec, seed = cell["strategy"], cell["seed"]
        name, options = parse(spec)
        strategy = {"name": name, "num_ranks": report["settings"]["ranks"], **options}
        config = {**report["settings"], "seed": seed, "strategy": strategy}
        with wandb.init(name=f"{spec} seed {seed}", config=config, **common) as run:
            run.define_metric("*", step_metric="step")
            for row in cell["rows"]:
                run.log(row)
    summary = report["summary"]
    columns = list(dict.fromkeys(key for row in summary for key in row))
    with wandb.init(name="comparison", job_type="comparison", **common) as run:
        rows = [[_cell(row.get(column)) for column in columns] for row in summary]
        with tempfile.TemporaryDirectory() as folder:
            image = Path(folder, "curves.png")
            plot_convergence(report, image)
            table = wandb.Table(columns=columns, data=rows)
            run.log({"comparison": table, "curves": wandb.Image(str(image))})
            artifact = wandb.Artifact(output.stem, type="benchmark")
            artifact.add_file(str(output))
            run.log_artifact(artifact)


def _cell(value: Any) -> Any:
    """Turns a range into a text, as a column holds values of one type."""
    return " to ".join(f"{end:.4g}" for end in value) if isinstance(value, list) else value
