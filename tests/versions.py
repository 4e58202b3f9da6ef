"""Runs a smoke of all strategies with other versions: `make test-versions`.

    python tests/versions.py [--folder FOLDER] [--only PYTHON/TORCH/LIGHTNING] [--output FILE]

Makes a virtual environment for each Python and torch, of 5 GB where pip finds no CPU build of
torch, and removes it before it makes the next one.  docs/getting_started.md shows what ran.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COMBINATIONS = (
    ("3.11", "2.8.0", "2.6.0"),
    ("3.11", "2.8.0", "2.6.6"),
    ("3.11", "2.9.1", "2.6.6"),
    ("3.12", "2.11.0", "2.6.6"),
    ("3.11", "2.13.0", "2.6.0"),
    ("3.11", "2.13.0", "2.6.6"),
    ("3.11", "2.14.1", "2.6.6"),
    ("3.11", "2.15.0", "2.6.6"),
    ("3.13", "2.15.0", "2.6.6"),
    ("3.14", "2.15.0", "2.6.6"),
)
"""Python, torch and Lightning: the oldest and newest that pyproject.toml admits, and between."""
RESULT = "docs/results/getting_started/versions.json"
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


def interpreter(version: str) -> str:
    """A Python of this version: the one that runs, one beside it (pyenv), or one on PATH."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    beside = sorted(Path(sys.base_prefix).parent.glob(f"{version}.*/bin/python"))
    found = str(beside[-1]) if beside else shutil.which(f"python{version}")
    if found is None:
        raise SystemExit(f"python{version} must be on PATH, or beside {sys.base_prefix}")
    return found


def install(folder: Path, python: str, torch: str, lightning: str) -> Path:
    """The interpreter of a virtual environment with these versions; the one before is removed."""
    target = folder / f"python-{python}-torch-{torch}"
    for other in folder.glob("python-*"):
        if other != target:
            shutil.rmtree(other)
    inside = target / "bin" / "python"
    if not inside.exists():
        subprocess.run([interpreter(python), "-m", "venv", str(target)], check=True)
    wanted = [f"torch=={torch}", f"lightning=={lightning}", f"pytorch-lightning=={lightning}"]
    tools = ["pytest", "pytest-timeout", "pytest-xdist", "psutil", "tensorboardX"]
    pip = [str(inside), "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    subprocess.run([*pip, *wanted, *tools, "-e", str(ROOT)], check=True)
    return inside


def smoke(python: Path) -> dict[str, Any]:
    """Which versions ran, whether all passed, and what pytest says at the end."""
    modules = "platform.python_version(), torch.__version__, lightning.__version__"
    names = f"import platform, torch, lightning; print({modules})"
    told = subprocess.check_output([python, "-c", names], text=True)
    row = dict(zip(("python", "torch", "lightning"), told.split(), strict=True))
    command = [str(python), "-m", "pytest", "-q", *SMOKE, "-m", "not exhaustive or versions"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(done.stdout)
    last = [f"pytest ended with {done.returncode}", *done.stdout.strip().splitlines()][-1]
    said = re.sub(r" in [\d.]+s.*", "", last).strip("= ")
    date = str(datetime.date.today())
    return {**row, "passed": done.returncode == 0, "said": said, "date": date}


def keep(row: dict[str, Any], output: Path) -> None:
    """Adds a row to a result file, in place of one of the same combination."""
    rows = json.loads(output.read_text())["rows"] if output.exists() else []
    rows = [*(other for other in rows if other["wanted"] != row["wanted"]), row]
    lines = ",\n".join(f"  {json.dumps(other)}" for other in rows)
    command = f"python tests/versions.py --output {RESULT}"
    output.write_text(f'{{\n "command": "{command}",\n "rows": [\n{lines}\n ]\n}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions")
    parser.add_argument("--only", help="one combination, as 3.11/2.13.0/2.6.0")
    parser.add_argument("--output", type=Path, help="a JSON file, whose rows are kept or replaced")
    args = parser.parse_args()
    has_passed = True
    for combination in COMBINATIONS:
        name = "/".join(combination)
        if args.only in (None, name):
            print(f"Python, torch and Lightning {name}: installing, then testing", flush=True)
            row = {"wanted": name, **smoke(install(args.folder, *combination))}
            print(row, flush=True)
            has_passed &= row["passed"]
            if args.output:
                keep(row, args.output)
    sys.exit(not has_passed)


if __name__ == "__main__":
    main()
