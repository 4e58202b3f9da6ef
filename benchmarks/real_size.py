"""One task of real size: loss against seconds of wall clock, with stragglers and a slower network.

    python benchmarks/real_size.py           # measures what the result file lacks
    python benchmarks/real_size.py --plot    # draws what the result file has

`Trainer.fit` with 4 real ranks: a GPT of 10.8 million weights learns the bytes of Python's own
library, with AdamW and OneCycleLR, in epochs with a validation and a checkpoint each.  Gradients
are real.  What is emulated is how long they take: each layer's passes sleep until a batch that
takes --compute-ms, two thirds of it backward, would be as far.  So gradients can travel meanwhile,
with DDP too.  The emulated link connects network namespaces, and needs root.

    random       one random rank is --delay-ms late in every step
    slow-rank    the last rank computes twice as long
    both         both

The clock runs from the first batch to the end, and stops for nothing.  Each strategy trains with
each of --lrs and a seed of its own; the rate with the lower final loss trains the reported seeds.
The target is 99% of DDP's final quality, that is 1/0.99 of its loss.

The result file is written after every training.  A run that was interrupted, or asks for more
strategies, seeds or situations, continues it.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from benchmarks import script
from benchmarks.compare import contestants, convergence
from lightning_dsgd import StragglerInjector
from lightning_dsgd.lab.drawing import chart
from lightning_dsgd.lab.drawing.style import Picture
from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.jobs.cells import Cell
from lightning_dsgd.lab.jobs.fit import communication
from lightning_dsgd.lab.jobs.job import Job
from lightning_dsgd.lab.jobs.network import demanded
from lightning_dsgd.lab.jobs.run_cells import rank_of_this_process
from lightning_dsgd.lab.results import save
from lightning_dsgd.tasks.language import Encoder, TextData
from lightning_dsgd.tasks.text import NUM_SMALLEST

BASELINE = "ddp"
STRATEGIES = (
    "ddp,ddp_bf16,ddp_powersgd:rank=4,"
    "wagma:overlap=true:scale_steps=true:data=claimed,popsgd:scale_steps=true:data=claimed,"
    "hpsgd:wire_dtype=int8:scale_steps=true:data=claimed"
)
SITUATIONS = {"random": (1, 1.0), "slow-rank": (0, 2.0), "both": (1, 2.0)}
"""How many random ranks are late, and how many times as long the last rank computes."""
FORWARD = 1 / 3
"""The share of a step's computation that is its forward pass."""
VALIDATION_BATCH = 16
COUNTS = ("epochs", "epoch_steps", "batch", "accumulate", "validated")
"""Options that are settings of every rank."""


# ---- what a rank does ----


@dataclass
class Pace:
    """Lets the computation for a piece of text take `piece_s`, if the real one is not slower."""

    piece_s: float
    begin_s: float = field(default=0.0, init=False)
    compute_s: float = field(default=0.0, init=False)

    def begin(self, num_pieces: int) -> None:
        """Begins with a micro-batch of so many pieces."""
        self.begin_s = time.monotonic()
        self.compute_s = num_pieces * self.piece_s

    def wait(self, share: float) -> None:
        """Sleeps until that share of the computation would be done."""
        time.sleep(max(0.0, self.begin_s + share * self.compute_s - time.monotonic()))


class _Paced(torch.autograd.Function):
    """Is the identity; its passes wait."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pace: Pace, forward: float, backward: float) -> Tensor:
        ctx.pace, ctx.share = pace, backward
        pace.wait(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Any:
        ctx.pace.wait(ctx.share)
        return (*g, None, None, None)


class GPT(L.LightningModule):
    """Predicts each byte from those before it, at the pace of another machine."""

    def __init__(self, size: dict[str, int], lr: float, pace: Pace) -> None:
        super().__init__()
        self.encoder = Encoder(NUM_SMALLEST, **size, dropout=0.0, causal=True)
        self.lr, self.pace = lr, pace
        stages = [self.encoder.embedded, *self.encoder.layers.layers]
        for number, stage in enumerate(stages):
            done = number / size["depth"]
            shares = FORWARD * done, FORWARD + (1 - FORWARD) * (1 - done)
            stage.register_forward_hook(partial(self._paced, shares))

    def _paced(self, shares: tuple[float, float], module: Any, inputs: Any, y: Tensor) -> Any:
        return _Paced.apply(y, self.pace, *shares) if self.training else y

    def loss(self, batch: list[Tensor]) -> Tensor:
        pieces = batch[0].long()
        logits = nn.functional.linear(self.encoder(pieces[:, :-1]), self.encoder.embedding.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.pace.begin(len(batch[0]))
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.lr, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            self.lr,
            total_steps=int(self.trainer.estimated_stepping_batches),
            pct_start=0.1,
            cycle_momentum=False,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Clock(L.Callback):
    """Notes seconds, those of a core too, steps, MB sent and the loss after each epoch."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.begin_s = self.core_begin_s = self.sent = 0.0

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        torch.distributed.barrier()
        self.sent = communication(trainer).get("bytes_sent", 0.0)
        self.begin_s, self.core_begin_s = time.monotonic(), time.process_time()

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        sent = communication(trainer).get("bytes_sent")
        self.rows.append(
            {
                "step": trainer.global_step,
                "seconds": round(time.monotonic() - self.begin_s, 2),
                "core_s": round(time.process_time() - self.core_begin_s, 2),
                "mb_sent": -1.0 if sent is None else round((sent - self.sent) / 1e6, 2),
                "value": round(float(trainer.callback_metrics["val_loss"]), 5),
            }
        )


@cache
def _splits(seq_len: int) -> dict[str, Any]:
    data = TextData(seq_len=seq_len)
    data.setup("fit")
    return dict(data.splits)


def run_cell(cell: Cell, settings: dict[str, Any]) -> dict[str, Any]:
    """Trains once on this rank."""
    L.seed_everything(cell["seed"], verbose=False)
    late, slow = SITUATIONS[cell["situation"]]
    accumulated = settings["accumulate"]
    clock, pace = Clock(), Pace(settings["compute_s"] / settings["batch"])
    checkpoint = ModelCheckpoint(
        settings["folder"], "best", monitor="val_loss", enable_version_counter=False
    )
    trainer = contestants.trainer(
        cell["strategy"],
        settings["world_size"],
        max_epochs=settings["epochs"],
        limit_train_batches=settings["epoch_steps"] * accumulated,
        accumulate_grad_batches=accumulated,
        enable_checkpointing=True,
        callbacks=[StragglerInjector(settings["delay_s"], late, cell["seed"]), clock, checkpoint],
    )
    if rank_of_this_process() == settings["world_size"] - 1:
        pace.piece_s *= slow
    splits = _splits(settings["size"]["seq_len"])
    train = DataLoader(splits["train"], settings["batch"], shuffle=True, drop_last=True)
    held_out = Subset(splits["val"], range(settings["validated"]))
    trainer.fit(
        GPT(settings["size"], cell["lr"], pace), train, DataLoader(held_out, VALIDATION_BATCH)
    )
    assert Path(checkpoint.best_model_path).exists()
    return {"rows": clock.rows}


# ---- the command ----


def key(cell: Cell) -> tuple[Any, ...]:
    """Returns what tells a training from all others of the result file."""
    return tuple(cell[name] for name in ("situation", "strategy", "lr", "seed"))


class Results:
    """The result file: what was measured so far, and what follows from it.

    Args:
        path: the file
        report: its contents
    """

    def __init__(self, path: Path, report: dict[str, Any]) -> None:
        self.path, self.report = path, report

    @property
    def cells(self) -> list[Cell]:
        """The trainings, in the order in which they were made."""
        return self.report["cells"]  # type: ignore[no-any-return]

    def measure(self, job: Job, wanted: list[Cell]) -> None:
        """Trains what is missing, and writes the file after each."""
        done = {key(cell) for cell in self.cells}
        missing = [cell for cell in wanted if key(cell) not in done]
        if not missing:
            return
        for number, result in enumerate(job.measure(missing), 1):
            made = {"commit": self.report["commit"], "load_average": os.getloadavg()}
            self.cells.append(result | convergence.flatten(result) | made)
            del self.cells[-1]["ranks"]
            last = self.cells[-1]["rows"][-1]
            self.write()
            print(
                f"{number} of {len(missing)}: {key(result)}: loss {last['value']:.3f} after "
                f"{last['seconds']:.0f} s",
                flush=True,
            )

    def lr(self, situation: str, spec: str) -> float | None:
        """The rate with which the tuning seed, or else the reported ones, end lowest, if any."""
        tuning_seed = self.report["settings"]["tuning_seed"]
        mine = [c for c in self.cells if (c["situation"], c["strategy"]) == (situation, spec)]
        tried = [cell for cell in mine if cell["seed"] == tuning_seed] or mine
        best = min(tried, key=lambda cell: cell["rows"][-1]["value"], default={"lr": None})
        return best["lr"]  # type: ignore[no-any-return]

    def reported(self, situation: str) -> list[Cell]:
        """Trainings with the chosen rates and other seeds, of seeds that DDP has trained too."""
        tuning_seed = self.report["settings"]["tuning_seed"]
        chosen = [
            cell
            for cell in self.cells
            if cell["situation"] == situation
            and cell["seed"] != tuning_seed
            and cell["lr"] == self.lr(situation, cell["strategy"])
        ]
        seeds = {cell["seed"] for cell in chosen if cell["strategy"] == BASELINE}
        # The baseline first; else as measured.
        return sorted(
            (cell for cell in chosen if cell["seed"] in seeds),
            key=lambda cell: cell["strategy"] != BASELINE,
        )

    def comparison(self, situation: str) -> dict[str, Any] | None:
        """One situation as `benchmarks convergence` reports it; None before DDP has trained."""
        cells = self.reported(situation)
        if not cells:
            return None
        final = [cell["rows"][-1]["value"] for cell in cells if cell["strategy"] == BASELINE]
        target = statistics.mean(final) / 0.99
        summary = convergence.summarize(cells, BASELINE, target, higher_is_better=False)
        rows = [row | {"lr": self.lr(situation, row["strategy"])} for row in summary]
        common = {"monitor": "val_loss", "target": target, "higher_is_better": False}
        return common | {"cells": cells, "summary": rows}

    def write(self) -> None:
        """Writes the file, with the summaries."""
        found = {name: self.comparison(name) for name in SITUATIONS}
        self.report["summary"] = [
            {"situation": name, "target": round(one["target"], 5), **row}
            for name, one in found.items()
            if one is not None
            for row in one["summary"]
        ]
        save(self.report, self.path)

    def tell(self) -> None:
        """Prints a table of all strategies for each situation that was measured."""
        for name in SITUATIONS:
            one = self.comparison(name)
            if one is not None:
                table = convergence.table(one["summary"], percent=False, target=one["target"])
                print(f"\n{name}, target {one['target']:.3f}\n{table}")

    def plot(self, situation: str, path: Path) -> None:
        """Draws the loss of each strategy in a situation, over seconds and over steps."""
        one = self.comparison(situation)
        if one is None:
            raise SystemExit(
                f"{self.path} must hold {BASELINE} with {situation}, and has no such training; "
                "measure it first"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(drawn(one, described(self.report["settings"], situation)))
        print(f"written: {path}")


NAMES = {"ddp_bf16": "ddp, bf16", "ddp_powersgd": "PowerSGD"}


def at_equal_time(one: dict[str, Any]) -> str:
    """Says with what loss the first strategy of ours ends, and which one DDP has then."""
    specs = list(dict.fromkeys(cell["strategy"] for cell in one["cells"]))
    ours = next((spec for spec in specs if not spec.startswith(BASELINE)), BASELINE)
    at, loss = looks(one, ours)[-1]
    ddp = looks(one, BASELINE)
    then, ddp_loss = min(ddp, key=lambda look: abs(look[0] - at))
    return (
        f"{ours.partition(':')[0]} ends with a loss of {loss:.3f} after {at:.0f} s; DDP has "
        f"{ddp_loss:.3f} after {then:.0f} s, and {ddp[-1][1]:.3f} when it ends"
    )


def looks(one: dict[str, Any], spec: str) -> list[tuple[float, float]]:
    """The mean seconds and the mean loss of the seeds, at each look."""
    runs = [cell["rows"] for cell in one["cells"] if cell["strategy"] == spec]
    return [
        (
            statistics.mean(row["seconds"] for row in rows),
            statistics.mean(row["value"] for row in rows),
        )
        for rows in zip(*runs, strict=True)
    ]


def described(settings: dict[str, Any], situation: str) -> str:
    """Says what was trained, and what slowed it down."""
    model = GPT(settings["size"], 0.0, Pace(0.0))
    num_weights = sum(p.numel() for p in model.parameters()) / 1e6
    network = settings["network"]
    parts = [
        f"A GPT of {num_weights:.{1 if num_weights > 1 else 2}f} million weights",
        f"{settings['world_size']} real ranks on 2 cores",
        *([f"links of {network['rate_bit_s'] / 1e9:g} Gbit/s"] if network["emulated"] else []),
        _SLOWED[situation],
    ]
    return ", ".join(parts)


_SLOWED = {
    "random": "one rank late at random",
    "slow-rank": "one rank takes twice as long",
    "both": "one slow rank and one late at random",
}


def drawn(one: dict[str, Any], what: str) -> str:
    """The loss of each strategy over seconds, as a picture."""
    seeds = len({cell["seed"] for cell in one["cells"]})
    picture = Picture(at_equal_time(one), f"{what}; {seeds} seeds: mean and range.")
    series = []
    for spec in dict.fromkeys(cell["strategy"] for cell in one["cells"]):
        rows = [c["rows"] for c in one["cells"] if c["strategy"] == spec]
        curves = [([r["seconds"] for r in of], [r["value"] for r in of]) for of in rows]
        name = spec.partition(":")[0]
        is_ours = not spec.startswith(BASELINE)
        at, mean, low, high = chart.mean_of(curves)
        band = (low, high) if is_ours or spec == BASELINE else ((), ())
        called = NAMES.get(name, name)
        series.append(chart.Series(spec, called, at, mean, *band, dashed=name in NAMES))
    values = [v for each in series for v in each.ys]
    y_range = min(values) - 0.03, max(values) + 0.03
    say = "{:.2f}".format
    chart.lines(picture, "Loss", series, 190, y_range, say, "seconds")
    return picture.svg()


def opened(path: Path) -> Results:
    """Returns what the result file holds so far."""
    return Results(path, json.loads(path.read_text()) if path.exists() else {"cells": []})


def taken_up(path: Path, job: Job, tuning_seed: int, specs: list[str]) -> Results:
    """The results so far, to be continued; refuses to mix them with those of other settings."""
    results = opened(path)
    now = job.provenance()
    now["settings"] |= {"tuning_seed": tuning_seed}
    algorithms = in_force((spec.replace(":data=claimed", "") for spec in specs), [job.ranks])
    before = results.report
    known = before.get("hyperparameters", {})
    others = [spec for spec in algorithms if known.get(spec, algorithms[spec]) != algorithms[spec]]
    if before.get("settings", now["settings"]) != now["settings"] or others:
        raise SystemExit(
            f"{path} was measured with other settings or defaults ({', '.join(others)}); give "
            "another --output, or remove the file"
        )
    rest = {name: value for name, value in before.items() if name not in now}
    results.report = now | {"hyperparameters": known | algorithms} | {"cells": rest["cells"]}
    return results


def cells(situations: list[str], specs: list[str], seeds: list[int], lrs: Any) -> list[Cell]:
    """Seed by seed, so that an interrupted run has all strategies for its first seeds."""
    return [
        {"situation": situation, "strategy": spec, "lr": lr, "seed": seed}
        for situation in situations
        for seed in seeds
        for spec in specs
        for lr in lrs(situation, spec)
    ]


def main(argv: list[str] | None = None) -> None:
    parser = script.parser(__doc__, "docs/results/benchmarks/real_size.json")
    parser.add_argument("--strategies", default=STRATEGIES, help="separated by commas")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--network", default="1gbit", help="of every rank; or none")
    parser.add_argument("--compute-ms", type=float, default=800.0)
    parser.add_argument("--delay-ms", type=float, default=640.0)
    parser.add_argument("--situation", choices=SITUATIONS, default="both")
    parser.add_argument("--seeds", default="1,2,3", help="that are reported")
    parser.add_argument("--tuning-seed", type=int, default=1000)
    parser.add_argument("--lrs", default="0.0005,0.001", help="to choose from")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--epoch-steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=2, help="pieces of text a rank and batch")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a rank and step")
    parser.add_argument("--validated", type=int, default=128, help="pieces of text")
    parser.add_argument("--size", default="64,384,6,6", help="seq_len,dim,depth,num_heads")
    parser.add_argument(
        "--plot",
        type=Path,
        nargs="?",
        const=Path("docs/images/real_size.svg"),
        help="measure nothing, and draw the result file",
    )
    args = parser.parse_args(argv)
    if args.plot is not None:
        results = opened(args.output)
        results.tell()
        results.plot(args.situation, args.plot)
        return
    specs, seeds = args.strategies.split(","), [int(seed) for seed in args.seeds.split(",")]
    try:
        link = demanded(None if args.network == "none" else args.network)
        for spec in specs:
            contestants.check(spec, args.ranks)
    except (TypeError, ValueError) as err:
        parser.error(str(err))
    lrs = [float(lr) for lr in args.lrs.split(",")]
    names = ("seq_len", "dim", "depth", "num_heads")
    settings = {
        "world_size": args.ranks,
        "compute_s": args.compute_ms / 1e3,
        "delay_s": args.delay_ms / 1e3,
        "size": dict(zip(names, map(int, args.size.split(",")), strict=True)),
        **{name: getattr(args, name) for name in COUNTS},
    }
    job = Job(f"{__file__}:run_cell", settings, args.ranks, link)
    results = taken_up(args.output, job, args.tuning_seed, specs)
    with tempfile.TemporaryDirectory() as folder:
        job.settings = job.settings | {"folder": folder}
        situation = [args.situation]
        if len(lrs) > 1:
            results.measure(job, cells(situation, specs, [args.tuning_seed], lambda *_: lrs))
        chosen = (lambda *at: [results.lr(*at)]) if len(lrs) > 1 else (lambda *_: lrs)
        results.measure(job, cells(situation, specs, seeds, chosen))
    results.write()
    results.tell()
    print(f"\nwritten: {args.output}")


if __name__ == "__main__":
    main()
