"""Runs a smoke of all strategies with other versions: `make test-versions`.

    python tests/versions.py [--folder FOLDER] [--only TORCH/LIGHTNING]

Makes a virtual environment for each combination, of some GB where pip finds no CPU build of torch,
and prints a table of what ran, as docs/getting_started.md has it.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMBINATIONS = (
    ("2.8.0", "2.6.0"),
    ("2.8.0", "2.6.6"),
    ("2.11.0", "2.6.6"),
    ("2.13.0", "2.6.0"),
    ("2.13.0", "2.6.6"),
    ("2.14.1", "2.6.6"),
)
"""Of torch and Lightning: the oldest and the newest that pyproject.toml admits, and between."""
SMOKE = (
    "tests/test_versions.py",
    "tests/trainer/test_works_with.py::test_a_feature_ends_in_one_model",
    "tests/trainer/test_strategy.py::test_pytorch_lightning_trains_like_lightning",
    "tests/session/test_faces.py::test_steps_of_several_batches_clipping_and_overflows_are_the_same_on_every_face",
    "tests/session/test_ending.py::test_sigterm_to_all_ranks_stops_them_once",
    "tests/transport/test_staging.py::test_the_contract_holds_for_tensors_on_a_device",
    "tests/algorithms/test_on_device.py::test_algorithms_train_on_a_device",
)
"""All strategies and a resume; and what stands on private parts of torch and Lightning."""


def install(folder: Path, torch: str, lightning: str) -> Path:
    """The interpreter of a virtual environment with these versions."""
    python = folder / f"torch-{torch}-lightning-{lightning}" / "bin" / "python"
    if not python.exists():
        venv.create(python.parents[1], with_pip=True)
    wanted = [f"torch=={torch}", f"lightning=={lightning}", f"pytorch-lightning=={lightning}"]
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    tools = ["pytest", "pytest-timeout", "pytest-xdist", "psutil", "tensorboardX"]
    subprocess.run([*pip, *wanted, *tools, "-e", str(ROOT)], check=True)
    return python


def smoke(python: Path) -> tuple[bool, str]:
    """Whether all passed, and what pytest says at the end."""
    command = [str(python), "-m", "pytest", "-q", *SMOKE, "-m", "not exhaustive or versions"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(done.stdout)
    return done.returncode == 0, done.stdout.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions")
    parser.add_argument("--only", help="one combination, as 2.13.0/2.6.0")
    args = parser.parse_args()
    lines, failed = [], False
    for torch, lightning in COMBINATIONS:
        if args.only in (None, f"{torch}/{lightning}"):
            print(f"torch {torch}, Lightning {lightning}: installing, then testing", flush=True)
            passed, said = smoke(install(args.folder, torch, lightning))
            failed |= not passed
            outcome = re.sub(r" in [\d.]+s.*", "", said).strip("= ")
            lines.append(f"| {sys.version.split()[0]} | {torch} | {lightning} | {outcome} |")
    print(f"\n{datetime.date.today()}\n\n| Python | torch | Lightning | smoke |\n|---|---|---|---|")
    print("\n".join(lines))
    sys.exit(failed)


if __name__ == "__main__":
    main()
