"""The folder `examples/own`: each variant trains, beside the baseline; and a job of SLURM."""

from __future__ import annotations

import csv
import os
import shutil
import sys
from pathlib import Path

import pytest

from lightning_dsgd.cli import main
from lightning_dsgd.elastic.launch import command
from lightning_dsgd.elastic.launch.node import Place
from tests.support.mpi import ended
from tests.support.worlds import FitWorld

ROOT = Path(__file__).parents[1]
OWN = ROOT / "examples" / "own"
VARIANTS = sorted(path.stem for path in OWN.glob("*.yaml") if path.stem != "config")
SMALL = ["--trainer.max_epochs=1", "--trainer.log_every_n_steps=1", "--data.num_train=64"]
SMALL += ["--data.num_val=32", "--trainer.enable_progress_bar=false"]
ON_CPUS = ["--trainer.accelerator=cpu", "--trainer.precision=32-true", "--trainer.devices=2"]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A copy of the folder."""
    return Path(shutil.copytree(OWN, tmp_path / "own"))


def configs(*names: str) -> list[str]:
    return [word for name in ("config", *names) for word in ("--config", f"{name}.yaml")]


def logged(folder: Path, version: int = 0) -> list[dict[str, str]]:
    with (folder / "lightning_logs" / f"version_{version}" / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def run_each(folder: Path, variants: list[list[str]]) -> None:
    """Trains one variant after the other, on the same ranks."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    for names in variants:
        main(["fit", *configs(*names), *ON_CPUS, *SMALL])


@pytest.mark.exhaustive
def test_every_variant_trains_beside_the_baseline(own: Path) -> None:
    assert "allreduce" in VARIANTS
    variants = [[], *([name] for name in VARIANTS), ["claimed", "allreduce"]]
    outcomes = FitWorld().outcomes(2, run_each, own, variants)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    for version, names in enumerate(variants):
        rows = logged(own, version)
        assert any(row["val_accuracy"] for row in rows), names
        assert any(float(row.get("dsgd/wait_s") or 0) >= 0 for row in rows), names


# What a launcher of each of four nodes is asked for; `lightning-dsgd` writes it down.
ASKED = "#!/bin/sh\nprintf '%s\\n' \"$@\" > asked_$SLURM_NODEID\n"
SRUN_OF_FOUR = """#!/bin/sh
echo "$@" > options
while [ "${1#--}" != "$1" ]; do shift; done
for node in 0 1 2 3; do SLURM_NODEID=$node "$@"; done
"""


def test_each_node_of_slurms_job_has_a_launcher_and_they_meet_at_the_first(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is asked for what the command line knows, and trains what the files here set."""
    scripts = {"lightning-dsgd": ASKED, "srun": SRUN_OF_FOUR, "scontrol": "#!/bin/sh\necho node0\n"}
    for name, text in scripts.items():
        (own / name).write_text(text)
        (own / name).chmod(0o755)
    variables = {"SLURM_NNODES": "4", "PATH": f"{own}{os.pathsep}{os.environ['PATH']}"}
    assert ended(["bash", "survival.sbatch"], own, **variables).returncode == 0
    for option in ("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none"):
        assert option in (own / "options").read_text().split()
    seen = []
    for node in range(4):
        launches, *words = (own / f"asked_{node}").read_text().split("\n")[:-1]
        assert launches == "launch"
        args = command.parser().parse_args(words)
        host, port = command._address(args.rendezvous)
        place = Place(args.ranks, args.nodes, args.node, host, port)
        assert (place.node, place.nodes, host) == (node, 4, "node0")
        seen.append([args.script, *args.arguments])
    monkeypatch.chdir(own)
    monkeypatch.syspath_prepend(own)
    monkeypatch.setattr(sys, "argv", ["lightning-dsgd", *seen[0], "--print_config"])
    with pytest.raises(SystemExit) as end:
        main()
    assert (end.value.code, seen.count(seen[0])) == (0, 4)


def test_the_page_has_every_file() -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    for path in OWN.iterdir():
        assert f"`{path.name}`" in page or path.name == "__pycache__"
