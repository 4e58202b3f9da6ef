"""Programs that nobody here wrote, with ddp and with strategies of this package, on two CPU ranks.

    python -m tests.programs.others FOLDER [--programs chemprop,litgpt]

Each is installed into a virtual environment in FOLDER, on top of the one that runs this.  For
nanogpt, which is no package, FOLDER must have a clone of https://github.com/karpathy/nanoGPT as
`nanoGPT`.  A program stays as it is but for its `edits`, or for the variable PL_TRAINER_STRATEGY.
Its loss at the end is compared with ddp's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.results import provenance

ROOT = Path(__file__).parents[2]
DDP = "ddp"
LIMIT_S = 900
"""How long a program may train."""
RANKS = 2
ON_TORCHRUN = (
    *("{bin}/python", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"),
)


@dataclass(frozen=True)
class Program:
    """A program, and how it runs in a folder of its own.

    Attributes:
        strategies: what stands in ddp's place
        packages: what pip installs
        prepare: makes the files that it needs, with {bin} and the strategy
        command: {bin} stands for the folder of the environment's commands
        loss: finds the loss at the end in the output
        edits: what a strategy changes in the program, for the table
        may_differ: by how much losses that should be equal may differ, relatively
    """

    strategies: tuple[str, ...]
    packages: tuple[str, ...]
    prepare: Callable[[Path, Path, str], None]
    command: tuple[str, ...]
    loss: str
    edits: str
    may_differ: float = 1e-3  # sums in another order


def edit(source: Path, target: Path, edits: dict[str, str]) -> None:
    """Writes a program with some texts, each of which it has once, replaced."""
    text = source.read_text()
    for old, new in edits.items():
        if text.count(old) != 1:
            raise ValueError(f"{source} must have {old!r} once, got it {text.count(old)} times")
        text = text.replace(old, new)
    target.write_text(text)


def molecules(folder: Path, site: Path, strategy: str) -> None:
    """Writes molecules that RDKit ships, with their measured activity."""
    source = site / "rdkit/Contrib/FreeWilson/data"
    lines = (source / "CHEMBL2321810.smi").read_text().splitlines()
    of_name = {name: smiles for smiles, name in map(str.split, lines)}
    rows = [line.split(",") for line in (source / "CHEMBL2321810_act.csv").read_text().split()]
    known = [f"{of_name[name]},{act}" for name, act in rows[1:] if name in of_name]
    (folder / "data.csv").write_text("\n".join(["smiles,act", *known[:400], ""]))


def copied(script: str) -> Callable[[Path, Path, str], None]:
    """Returns what puts a script of ours, which calls the program, where it runs."""

    def copy(folder: Path, site: Path, strategy: str) -> None:
        shutil.copy(Path(__file__).parent / "scripts" / script, folder)

    return copy


def tiny_litgpt(folder: Path, site: Path, strategy: str) -> None:
    """Writes litgpt's pretrain.py with another strategy, and what calls it."""
    fsdp = (
        'FSDPStrategy(auto_wrap_policy={Block}, state_dict_type="full", '
        'sharding_strategy="HYBRID_SHARD")'
    )
    edit(site / "litgpt/pretrain.py", folder / "pretrain.py", {fsdp: f'"{strategy}"'})
    script = Path(__file__).parent / "scripts/litgpt_pretrain.py"
    shutil.copy(script, folder)


def nano_gpt(folder: Path, site: Path, strategy: str) -> None:
    """Writes nanoGPT on a CPU, with DDP or with ours; Python's library is what it learns."""
    shutil.copytree(folder.parent / "nanoGPT", folder, dirs_exist_ok=True)
    data = folder / "data/shakespeare_char"
    shutil.copy(Path(argparse.__file__), data / "input.txt")
    on_a_cpu = {"    device = f'cuda:{ddp_local_rank}'\n    torch.cuda.set_device(device)\n": ""}
    wrapped = "    model = DDP(model, device_ids=[ddp_local_rank])\n"
    if strategy == DDP:
        edits = {wrapped: "    model = DDP(model)\n"}
    else:
        ours = f"dsgd.decentralized(model, optimizer, dsgd.{strategy}())"
        unscaled, end = (
            "        scaler.unscale_(optimizer)\n",
            "if ddp:\n    destroy_process_group()",
        )
        edits = {
            "import os\nimport time\n": "import contextlib\nimport os\nimport time\n",
            "import numpy as np\n": "import lightning_dsgd as dsgd\nimport numpy as np\n",
            wrapped: f"    training = contextlib.ExitStack()\n"
            f"    replica = training.enter_context({ours})\n",
            "model.module if ddp else model": "model",
            unscaled: f"{unscaled}        if ddp:\n"
            "            replica.reduce_gradients(optimizer)\n",
            end: end.replace("    destroy", "    training.close()\n    destroy"),
        }
    edit(folder.parent / "nanoGPT/train.py", folder / "train.py", on_a_cpu | edits)
    command = [sys.executable, str(data / "prepare.py")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


PROGRAMS = {
    "chemprop": Program(
        strategies=("balanced", "allreduce"),
        packages=("chemprop",),
        prepare=molecules,
        command=(
            *("{bin}/chemprop", "train", "--data-path", "data.csv", "--output-dir", "out"),
            *("--epochs", "3", "--batch-size", "64", "--split-sizes", "0.9", "0.1", "0.0"),
            *("--accelerator", "cpu", "--devices", "2", "--data-seed", "0", "--pytorch-seed", "0"),
            *("--message-hidden-dim", "64", "--ffn-hidden-dim", "64"),
        ),
        loss=r"val_loss:\s+([\d.]+)",
        edits="nothing",
    ),
    "litgpt": Program(
        strategies=("allreduce",),
        packages=("litgpt",),
        prepare=tiny_litgpt,
        command=("{bin}/python", "litgpt_pretrain.py", "tiny"),
        loss=r"Final evaluation \| val loss: ([\d.]+)",
        edits="the line with FSDPStrategy in pretrain.py",
    ),
    "darts": Program(
        strategies=("balanced", "allreduce"),
        packages=("darts",),
        prepare=copied("darts_forecast.py"),
        command=("{bin}/python", "darts_forecast.py"),
        loss=r"val_loss ([\d.]+)",
        edits="nothing",
    ),
    "scvi-tools": Program(
        strategies=("balanced", "allreduce"),
        packages=("scvi-tools",),
        prepare=copied("scvi_cells.py"),
        command=("{bin}/python", "scvi_cells.py"),
        loss=r"elbo_validation ([\d.]+)",
        edits="the name of the strategy",
        may_differ=1e-2,  # its random draws are of the rank that computes a micro-batch
    ),
    "nanogpt": Program(
        strategies=("AllReduce",),
        packages=(),
        prepare=nano_gpt,
        command=(
            *(*ON_TORCHRUN, "train.py", "config/train_shakespeare_char.py"),
            *("--backend=gloo", "--device=cpu", "--dtype=float32", "--compile=False"),
            *("--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32", "--batch_size=8"),
            *("--max_iters=40", "--lr_decay_iters=40", "--eval_interval=20", "--eval_iters=5"),
            *("--dropout=0.0", "--gradient_accumulation_steps=4"),
        ),
        loss=r"step 40: train loss [\d.]+, val loss ([\d.]+)",
        edits="seven lines of train.py",
    ),
}


def environment(folder: Path, packages: tuple[str, ...]) -> tuple[Path, Path]:
    """Makes a virtual environment with packages; returns its commands' and packages' folders."""
    if not packages:
        return Path(sys.executable).parent, Path(sysconfig.get_path("purelib"))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    commands, site = folder / "bin", folder / "lib" / version / "site-packages"
    if not (folder / ".installed").exists():
        venv.create(folder, with_pip=True)
        (site / "whole.pth").write_text(sysconfig.get_path("purelib"))
        command = [str(commands / "python"), "-m", "pip", "install", "--quiet", *packages]
        subprocess.run(command, check=True)
        (folder / ".installed").touch()
    return commands, site


def train(program: Program, folder: Path, commands: Path, site: Path, strategy: str) -> float:
    """Returns the loss at the end of a program with a strategy."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    program.prepare(folder, site, strategy)
    settings = {
        "PL_TRAINER_STRATEGY": strategy,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than training
    }
    libraries = Path(sys.prefix) / "lib"
    if list(libraries.glob("libmpi.so*")):  # which mpi4py looks for below the program's own
        settings["MPI4PY_LIBMPI"] = str(libraries)
    log = folder.with_suffix(".log")
    with (
        log.open("w") as output,
        _ended(
            subprocess.Popen(
                [each.format(bin=commands) for each in program.command],
                cwd=folder,
                env=os.environ | settings,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        ) as process,
    ):
        ended = process.wait(LIMIT_S)
    text = log.read_text()
    found = re.findall(program.loss, text)
    if ended or not found:
        raise RuntimeError(f"{strategy} ended with {ended}, see {log}: {text[-500:]}")
    return float(found[-1])


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--programs", default="chemprop,litgpt,darts,scvi-tools")
    parser.add_argument("--output", type=Path, help="a file for the losses, as JSON")
    args = parser.parse_args()
    whole = args.folder.resolve()
    whole.mkdir(parents=True, exist_ok=True)
    given = ["FOLDER" if word == str(args.folder) else word for word in sys.argv[1:]]
    command = shlex.join(["python", "-m", "tests.programs.others", *given])
    rows: list[dict[str, Any]] = []
    for name in args.programs.split(","):
        program = PROGRAMS[name]
        commands, site = environment(whole / f"{name}_environment", program.packages)
        with_ddp = train(program, whole / f"{name}_ddp", commands, site, DDP)
        found = list(metadata.distributions(name=name, path=[str(site)]))
        for strategy in program.strategies:
            loss = train(program, whole / f"{name}_{strategy}", commands, site, strategy)
            row = {
                "program": name,
                "version": found[0].version if found else "",
                "edits": program.edits,
                "strategy": strategy,
                "loss": loss,
                "with_ddp": with_ddp,
            }
            print(json.dumps(row), flush=True)
            rows.append(row)
        if args.output:
            ours = {row["strategy"].lower() for row in rows}
            settings = {"hyperparameters": in_force(sorted(ours), [RANKS])}
            report = {**provenance(command), **settings, "rows": rows}
            args.output.write_text(json.dumps(report, indent=1) + "\n")
    far = [
        row
        for row in rows
        if abs(row["loss"] / row["with_ddp"] - 1) > PROGRAMS[row["program"]].may_differ
    ]
    if far:
        raise SystemExit(f"losses must be those of ddp, got {far}")


if __name__ == "__main__":
    main()
