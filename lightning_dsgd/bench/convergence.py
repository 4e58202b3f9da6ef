"""Steps, seconds and bytes that strategies need to train a task, seed by seed, in one job.

    lightning-dsgd bench convergence --task digits --strategies allreduce,wagma,wagma:group_size=1 \
        --ranks 4 --epochs 20 --seeds 3 --compute-ms 20 --delay-ms 16 --delayed-ranks 2 \
        --target 0.97 --output FILE.json

Every strategy trains once for each seed, on the same data and from the same weights, in an order
that changes from seed to seed.  After each epoch the consensus model is evaluated on the validation
data; the time that this takes does not count.  With `--compute-ms` a step takes at least so long;
`--delay-ms` holds random ranks up in every step, the same ones for every strategy.  What a task is
made of can be changed: `--model '{"lr": 0.01}' --data '{"batch_size": 32}'`.

best      the best value over all epochs, mean over the seeds
last      the value after the last epoch, mean over the seeds
to target when the value first reaches the target: optimizer steps, seconds, MB sent by a rank; the
          median over the seeds, and how many of them got there
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightning_dsgd.bench import tracking
from lightning_dsgd.bench.job import LAUNCHERS, Cell, Job, finish, in_turn
from lightning_dsgd.bench.throughput import chosen_link, communication, refuse


@dataclass(frozen=True)
class Task:
    """What is trained: "module:class" of the model and of the data, and what is watched.

    Args:
        model: the LightningModule
        data: the LightningDataModule
        monitor: the logged name of the validation value
        higher_is_better: which of two values is the better
        model_options: of the model
        data_options: of the data
    """

    model: str
    data: str
    monitor: str
    higher_is_better: bool
    model_options: dict[str, Any]
    data_options: dict[str, Any]


_DIGITS: Final = "lightning_dsgd.tasks.digits"
_HELD_OUT: Final = {"split": (1077, 720, 0)}  # one image of 720 is 0.14 points
TASKS: Final = {
    "digits": Task(
        f"{_DIGITS}:DigitsClassifier",
        f"{_DIGITS}:DigitsData",
        "val_accuracy",
        True,
        {"lr": 0.02},
        _HELD_OUT,
    ),
    "resnet": Task(  # residual, with BatchNorm
        "lightning_dsgd.tasks.images:ImageClassifier",
        f"{_DIGITS}:DigitsData",
        "val_accuracy",
        True,
        {"network": "resnet8", "lr": 0.05, "decay": "cosine"},
        _HELD_OUT,
    ),
    "language": Task(  # characters of Python's own library
        "lightning_dsgd.tasks.language:CausalLanguageModel",
        "lightning_dsgd.tasks.language:TextData",
        "val_loss",
        False,
        {"dim": 64, "depth": 2, "seq_len": 64, "lr": 3e-3, "decay": "cosine"},
        {"seq_len": 64, "max_chars": 200_000, "batch_size": 16},
    ),
}


def run_cell(cell: Cell, settings: dict[str, Any]) -> dict[str, Any]:
    """One fit of one strategy with one seed, on this rank."""
    import lightning as L
    import torch

    from lightning_dsgd.bench import contestants
    from lightning_dsgd.bench.rank import load
    from lightning_dsgd.callbacks import StragglerInjector

    task = TASKS[settings["task"]]

    class Paced(L.Callback):
        """Forward and backward take at least as long as they are told to, delays apart."""

        def on_train_batch_start(self, *_: Any) -> None:
            self.begin = time.perf_counter()

        def on_after_backward(self, *_: Any) -> None:
            time.sleep(max(0.0, settings["compute_s"] - (time.perf_counter() - self.begin)))

    class History(L.Callback):
        def __init__(self) -> None:
            self.rows: list[dict[str, float]] = []
            self.trained_s = self.begin = 0.0
            self.sent_before = 0.0

        def on_train_start(self, trainer: Any, *_: Any) -> None:
            torch.distributed.barrier()
            self.sent_before = communication(trainer).get("bytes_sent", 0.0)
            self.begin = time.perf_counter()

        def on_validation_start(self, trainer: Any, *_: Any) -> None:
            # Before anybody waits for the slowest at the end of the epoch.
            self.trained_s += time.perf_counter() - self.begin
            sent = communication(trainer).get("bytes_sent")
            self.rows.append(
                {
                    "step": trainer.global_step,
                    "seconds": self.trained_s,
                    "mb_sent": -1.0 if sent is None else (sent - self.sent_before) / 1e6,
                }
            )

        def on_validation_end(self, trainer: Any, *_: Any) -> None:
            self.rows[-1]["value"] = float(trainer.callback_metrics[task.monitor])
            self.rows[-1] |= {
                key: communication(trainer)[key]
                for key in ("consensus_distance", "late_share", "staleness", "wait_s")
                if key in communication(trainer)
            }
            self.begin = time.perf_counter()

    L.seed_everything(cell["seed"], verbose=False)
    model = load(task.model)(**{**task.model_options, **settings["model"]})
    data = load(task.data)(**{**task.data_options, **settings["data"]})
    history = History()
    straggler = StragglerInjector(settings["delay_s"], settings["delayed_ranks"], seed=cell["seed"])
    trainer = contestants.trainer(
        cell["strategy"],
        settings["world_size"],
        max_epochs=settings["epochs"],
        check_val_every_n_epoch=settings["val_every"],
        callbacks=[straggler, Paced(), history],  # the delay comes on top
    )
    trainer.fit(model, data)
    return {"rows": history.rows}


def flatten(result: Cell) -> dict[str, Any]:
    """One curve a cell: the seconds of the slowest rank, the means of the rest."""
    curves = [rank["rows"] for rank in result["ranks"]]
    rows = []
    for epoch in zip(*curves, strict=True):
        row = {key: statistics.mean(rank[key] for rank in epoch) for key in epoch[0]}
        rows.append(row | {"seconds": max(rank["seconds"] for rank in epoch)})
    return {"strategy": result["strategy"], "seed": result["seed"], "rows": rows}


def summarize(
    cells: list[dict[str, Any]], baseline: str, target: float | None, *, higher_is_better: bool
) -> list[dict[str, Any]]:
    """One row a strategy, over its seeds; differences from the baseline are seed by seed."""
    sign = 1.0 if higher_is_better else -1.0
    last = {(cell["strategy"], cell["seed"]): cell["rows"][-1]["value"] for cell in cells}
    summary = []
    for spec in dict.fromkeys(cell["strategy"] for cell in cells):
        mine = [cell for cell in cells if cell["strategy"] == spec]
        values = [cell["rows"][-1]["value"] for cell in mine]
        differences = [last[spec, cell["seed"]] - last[baseline, cell["seed"]] for cell in mine]
        row: dict[str, Any] = {
            "strategy": spec,
            "last": statistics.mean(values),
            "last_range": [min(values), max(values)],
            "best": statistics.mean(
                sign * max(sign * entry["value"] for entry in cell["rows"]) for cell in mine
            ),
            "difference": statistics.mean(differences),
            "seconds": statistics.median(cell["rows"][-1]["seconds"] for cell in mine),
            "mb_sent": statistics.median(cell["rows"][-1]["mb_sent"] for cell in mine),
        }
        for key in ("late_share", "staleness", "consensus_distance"):
            if key in mine[0]["rows"][-1]:
                row[key] = statistics.mean(cell["rows"][-1][key] for cell in mine)
        if target is not None:
            reached = [
                next((r for r in cell["rows"] if sign * r["value"] >= sign * target), None)
                for cell in mine
            ]
            there = [entry for entry in reached if entry is not None]
            row["reached"] = len(there)
            for key in ("step", "seconds", "mb_sent"):
                figures = [entry[key] for entry in there]
                row[f"{key}_to_target"] = statistics.median(figures) if figures else None
        summary.append(row)
    return summary


def table(summary: list[dict[str, Any]], *, percent: bool, target: float | None) -> str:
    """The summary in Markdown."""
    scale, unit = (100, " %") if percent else (1, "")
    baseline = summary[0]["strategy"]
    head = ["strategy", f"last{unit}", f"- {baseline}", f"best{unit}", "seconds", "MB sent", "late"]
    if target is not None:
        head += ["reached", "steps to target", "seconds to target", "MB to target"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in summary:
        low, high = row["last_range"]
        cells = [
            f"`{row['strategy']}`",
            f"{scale * row['last']:.2f} ({scale * low:.2f} to {scale * high:.2f})",
            f"{scale * row['difference']:+.2f}",
            f"{scale * row['best']:.2f}",
            f"{row['seconds']:.1f}",
            f"{row['mb_sent']:.1f}" if row["mb_sent"] >= 0 else "",
            f"{row['late_share']:.0%}" if "late_share" in row else "",
        ]
        if target is not None:
            cells.append(str(row["reached"]))
            for key, form in (("step", ".0f"), ("seconds", ".1f"), ("mb_sent", ".1f")):
                value = row[f"{key}_to_target"]
                cells.append("" if value is None or value < 0 else format(value, form))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError(f"must be such as '{{\"lr\": 0.01}}', got {text!r}")
    return options


def main(argv: list[str] | None = None) -> None:
    """Runs the job and writes the result file."""
    parser = argparse.ArgumentParser(
        prog="lightning-dsgd bench convergence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--strategies", default="allreduce,local_sgd,wagma")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--network", help="of every rank, such as 1gbit or 10gbit,1ms")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="subprocess")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--val-every", type=int, default=1, help="epochs between evaluations")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--compute-ms", type=float, default=0.0)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--delayed-ranks", type=int, default=0)
    for name in ("model", "data"):
        parser.add_argument(
            f"--{name}", type=_options, default={}, metavar="JSON", help=f"options of the {name}"
        )
    parser.add_argument("--target", type=float, help="value that is to be reached")
    parser.add_argument(
        "--wandb",
        metavar="PROJECT",
        help="log to W&B too, offline unless WANDB_MODE says otherwise",
    )
    parser.add_argument("--output", type=Path, default=Path("convergence.json"))
    args = parser.parse_args(argv)
    refuse(parser, args)
    link, network = chosen_link(args.network)
    print(f"{args.task}, {args.ranks} ranks, {network}")
    task, specs = TASKS[args.task], args.strategies.split(",")
    job = Job(
        "lightning_dsgd.bench.convergence:run_cell",
        {
            "world_size": args.ranks,
            "task": args.task,
            "epochs": args.epochs,
            "val_every": args.val_every,
            "model": args.model,
            "data": args.data,
            "compute_s": args.compute_ms / 1e3,
            "delay_s": args.delay_ms / 1e3,
            "delayed_ranks": args.delayed_ranks,
        },
        args.ranks,
        link,
        args.launcher,
    )
    results = job.run(in_turn(specs, "seed", args.seeds), args.output)
    cells = [flatten(result) for result in results]
    cells.sort(key=lambda cell: (specs.index(cell["strategy"]), cell["seed"]))
    given = sys.argv[1:] if argv is None else argv
    report = job.provenance(f"lightning-dsgd bench convergence {shlex.join(given)}")
    report |= {"network": network, "monitor": task.monitor, "target": args.target}
    report["higher_is_better"] = task.higher_is_better
    report["summary"] = summarize(
        cells, specs[0], args.target, higher_is_better=task.higher_is_better
    )
    report["cells"] = cells
    percent = "accuracy" in task.monitor
    print("\n" + table(report["summary"], percent=percent, target=args.target))
    finish(report, args.output)
    if args.wandb is not None:
        tracking.log_comparison(report, args.output, args.wandb)


if __name__ == "__main__":
    main()
