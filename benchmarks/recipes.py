"""What recipes and `examples/own` end with, each beside its baseline, all-reduce.

    python benchmarks/recipes.py                          # all; what is in the result is left out
    python benchmarks/recipes.py own "own, allreduce"     # some of them

Each run is the recipe as it stands, with real ranks, and its metrics in a CSV file.  The figure is
the last one of the consensus on validation data; `mb` is what rank 0 sends in a step.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.results import provenance, save

ROOT = Path(__file__).parents[1]
OWN = ROOT / "examples" / "own"
BASELINE = str(OWN / "allreduce.yaml")
VARIANTS = ("diloco", "one_byte", "survival", "claimed")
FIGURES = ("accuracy", "return", "bleu", "perplexity", "mse", "wer")
CASES: dict[str, list[str]] = {
    "own": ["config.yaml"],
    "own, allreduce": ["config.yaml", BASELINE],
    **{f"own, {name}": ["config.yaml", f"{name}.yaml"] for name in VARIANTS},
    "own, claimed, allreduce": ["config.yaml", "claimed.yaml", BASELINE],
}
for recipe in sorted(ROOT.glob("recipes/*.yaml")):
    CASES |= {recipe.stem: [str(recipe)], f"{recipe.stem}, allreduce": [str(recipe), BASELINE]}


def run(name: str, seed: int) -> dict[str, Any]:
    """One training, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        place = shutil.copytree(OWN, Path(folder, "own"))
        configs = [f"--config={config}" for config in CASES[name]]
        logger = ["--trainer.logger=lightning.pytorch.loggers.CSVLogger"]
        logger.append(f"--trainer.logger.save_dir={folder}")
        quiet = ["--trainer.enable_progress_bar=false", f"--seed_everything={seed}"]
        # Forked ranks import nothing: trainings of seconds on two cores end sooner so.
        quiet.append("--trainer.strategy.init_args.start_method=fork")
        command = [sys.executable, "-m", "lightning_dsgd", "fit", *configs, *logger, *quiet]
        begin = time.perf_counter()
        subprocess.run(command, cwd=place, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - begin
        (file,) = Path(folder).rglob("metrics.csv")
        with file.open() as table:
            rows = list(csv.DictReader(table))
    last = {key: float(row[key]) for row in rows for key in row if row[key]}
    (figure,) = [f"val_{name}" for name in FIGURES if f"val_{name}" in last][:1]
    sent = [row for row in rows if row.get("dsgd/bytes_sent_total")][-1]
    return {
        "name": name,
        "seed": seed,
        "figure": figure,
        "value": round(last[figure], 4),
        "mb": round(float(sent["dsgd/bytes_sent_total"]) / (int(sent["step"]) + 1) / 1e6, 5),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="these alone; by default all")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/results/examples/recipes.json")
    args = parser.parse_args()
    known = json.loads(args.output.read_text())["runs"] if args.output.exists() else []
    done = {(each["name"], each["seed"]): each for each in known}
    for name in CASES:
        if args.names and name not in args.names:
            continue
        for seed in range(args.seeds):
            if (name, seed) not in done:
                done[name, seed] = run(name, seed)
                print(done[name, seed], flush=True)
                runs = [
                    done[key]
                    for key in sorted(done, key=lambda key: (key[1], [*CASES].index(key[0])))
                ]
                made = provenance("python benchmarks/recipes.py")
                made["hyperparameters"] = in_force(
                    [*ALGORITHMS], [4]
                )  # unless a recipe sets others
                save(made | {"runs": runs}, args.output)


if __name__ == "__main__":
    main()
