"""What a run's tracker gets beside its figures, as far as each of them goes.

| | W&B | MLflow | TensorBoard | CSV |
|---|---|---|---|---|
| what is in force | config | parameters | text, `hparams.yaml` | `hparams.yaml` |
| the recipe | file `recipe.yaml` | artifact `recipe.yaml` | text | `config.yaml`, Lightning's |
| charts | summary rules, ranks as series | none | custom scalars | none |
| the timeline | panel | artifact `timeline.html` | none | none |
| checkpoints with replicas | artifact | artifact | none | none |

Rank 0 alone calls these functions.  They know a logger by the name of Lightning's class, and so
those of `pytorch_lightning` too.  `OfflineWandbLogger` is the logger of the recipes.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from lightning.pytorch.loggers import WandbLogger

from lightning_dsgd.trainer import seams

_SUMMARIES: Final = {
    "bytes_sent_total": "max",
    "comm_overlap": "last",
    "consensus_distance": "last,max",
    "late_share": "mean",
    "participation": "mean",
    "staleness": "mean",
    "updates_kept": "last",
    "wait_share": "mean",
    "max/wait_s": "mean,max",
    "mean/wait_s": "mean,max",
}
"""What W&B's table of runs shows of a figure; of the others the last value."""
_CHARTS: Final = {
    "waiting": ["dsgd/wait_share", "dsgd/late_share", "dsgd/comm_overlap"],
    "bytes so far": ["dsgd/bytes_sent_total"],
    "drift": ["dsgd/consensus_distance"],
    "late by": ["dsgd/staleness", "dsgd/staleness_max"],
    "waits, mean and maximum over ranks": ["dsgd/mean/wait_s", "dsgd/max/wait_s"],
    "waits of each rank": [r"dsgd/rank_\d+/wait_s"],
    "bytes of each rank": [r"dsgd/rank_\d+/bytes_sent"],
}
"""TensorBoard's custom scalars: the charts, and the figures of each as patterns."""

Series = Mapping[str, tuple[list[float], list[float]]]
"""By label, the x and the y of a line."""


def in_force(strategy: Any, num_ranks: int) -> dict[str, Any]:
    """Returns all that a strategy trains with: its hyperparameters, options and transport."""
    wire = getattr(strategy.session.net, "wire", None)
    given = {**strategy.algorithm.hyperparameters(), **strategy.in_force}
    plain = {k: v if isinstance(v, (bool, int, float)) else str(v) for k, v in given.items()}
    transport = "simulated" if wire is None else wire.name.split()[0]
    named = {"name": strategy.algorithm.name, "num_ranks": num_ranks}
    return {**named, **plain, "transport": transport}


def recipe_of(trainer: Any) -> str:
    """Returns the YAML of a training that Lightning's command line has started; "" of others."""
    for callback in trainer.callbacks:
        if seams.is_a("SaveConfigCallback", callback):
            return str(callback.parser.dump(callback.config))
    return ""


def begin(logger: Any, config: Mapping[str, Any], recipe: str) -> None:
    """Tells a logger's run what is in force, and what its charts and summaries show."""
    if seams.is_a("WandbLogger", logger):
        run = logger.experiment
        run.config.update({"strategy": dict(config)}, allow_val_change=True)
        run.define_metric("dsgd/*", step_metric="trainer/global_step")
        for name, summary in _SUMMARIES.items():
            run.define_metric(f"dsgd/{name}", "trainer/global_step", summary=summary)
        if recipe:
            file = Path(run.dir, "recipe.yaml")
            file.parent.mkdir(parents=True, exist_ok=True)  # a disabled run has made none
            file.write_text(recipe, encoding="utf-8")
            run.save(str(file), base_path=run.dir, policy="now")
    elif seams.is_a("MLFlowLogger", logger):
        logger.log_hyperparams({"strategy": dict(config)})
        if recipe:
            logger.experiment.log_text(logger.run_id, recipe, "recipe.yaml")
    elif seams.is_a("TensorBoardLogger", logger):
        logger.hparams["strategy"] = dict(config)
        rows = "".join(f"| {name} | {value} |\n" for name, value in config.items())
        logger.experiment.add_text("dsgd/strategy", f"| option | value |\n|---|---|\n{rows}")
        charts = {name: ["Multiline", tags] for name, tags in _CHARTS.items()}
        logger.experiment.add_custom_scalars({"dsgd": charts})
        if recipe:
            logger.experiment.add_text("dsgd/recipe", f"```yaml\n{recipe}\n```")
    elif seams.is_a("CSVLogger", logger):
        logger.log_hyperparams({"strategy": dict(config)})


def give_series(logger: Any, name: str, series: Series) -> None:
    """Gives a W&B run a chart with a line for each rank; others chart the figures themselves."""
    if seams.is_a("WandbLogger", logger):
        import wandb

        xs, ys = ([list(line[axis]) for line in series.values()] for axis in (0, 1))
        chart = wandb.plot.line_series(xs, ys, list(series), f"{name} of each rank", "step")
        logger.experiment.log({f"dsgd/by_rank/{name}": chart})


def takes_pages(logger: Any) -> bool:
    """Returns whether a logger's run can hold a page or a file."""
    return any(seams.is_a(name, logger) for name in ("WandbLogger", "MLFlowLogger"))


def give_page(logger: Any, name: str, html: str) -> None:
    """Gives a run a page: W&B shows it as a panel, MLflow among the artifacts."""
    if seams.is_a("WandbLogger", logger):
        import wandb

        page = wandb.Html(html, inject=False, data_is_not_path=True)
        logger.experiment.log({f"dsgd/{name}": page})
    else:
        logger.experiment.log_text(logger.run_id, html, f"{name}.html")


def give_checkpoint(
    logger: Any, file: Path, replicas: Path, aliases: Iterable[str], about: Mapping[str, Any]
) -> None:
    """Gives a run a checkpoint whole: the file, and the folder with the ranks' replicas beside it.

    Args:
        logger: W&B's, or MLflow's, which has no aliases
        file: the checkpoint
        replicas: the folder, if there is one
        aliases: of this version of the artifact
        about: what to say of the checkpoint
    """
    if seams.is_a("WandbLogger", logger):
        import wandb

        run = logger.experiment
        artifact = wandb.Artifact(f"model-{run.id}", type="model", metadata=dict(about))
        artifact.add_file(str(file), name="model.ckpt")
        if replicas.is_dir():
            artifact.add_dir(str(replicas), name="model.ckpt.replicas")
        run.log_artifact(artifact, aliases=list(aliases))
        return
    client, where = logger.experiment, f"checkpoints/{file.stem}"
    client.log_artifact(logger.run_id, str(file), where)
    if replicas.is_dir():
        client.log_artifacts(logger.run_id, str(replicas), f"{where}/{file.name}.replicas")
    client.log_text(logger.run_id, json.dumps(about), f"{where}/about.json")


class OfflineWandbLogger(WandbLogger):
    """Lightning's WandbLogger, which writes to `wandb/` and sends nothing unless it is told to.

    An agent of a sweep tells it to: the runs that an agent starts are online.  The environment
    variable WANDB_MODE comes first: with "online" it sends, with "disabled" it does not even write.
    (`WandbLogger(offline=True)` itself overwrites that variable.)

    Args:
        project: under which the run stands; checkpoints go to a folder of this name.
        **kwargs: options of WandbLogger, but not `offline`.
    """

    def __init__(self, project: str = "lightning-dsgd", **kwargs: Any) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise ModuleNotFoundError(
                "OfflineWandbLogger needs the package wandb, which is not installed; install it "
                "(pip install wandb), or use CSVLogger"
            )
        by_default = "online" if os.environ.get("WANDB_SWEEP_ID") else "offline"
        offline = os.environ.get("WANDB_MODE", by_default) in ("offline", "dryrun")
        super().__init__(project=project, offline=offline, **kwargs)
