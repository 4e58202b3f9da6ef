"""The folder `examples/own`: each variant trains, beside the baseline, and under each launcher."""

from __future__ import annotations

import csv
import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from lightning_dsgd.cli import main
from lightning_dsgd.elastic.launch import command
from lightning_dsgd.elastic.launch.place import Place
from tests.support.mpi import ended
from tests.support.ports import free_port
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


def check(folder: Path) -> None:
    """Two ranks have trained on two batches of 16 each, of 64 samples."""
    assert [path.name for path in folder.rglob("*.ckpt")] == ["epoch=0-step=2.ckpt"]
    assert any(row["val_accuracy"] for row in logged(folder))


def run_each(folder: Path, variants: list[list[str]]) -> None:
    """Trains one variant after the other, on the same ranks."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    for names in variants:
        main(["fit", *configs(*names), *ON_CPUS, *SMALL])


def test_every_variant_trains_beside_the_baseline(own: Path) -> None:
    assert "allreduce" in VARIANTS
    variants = [[], *([name] for name in VARIANTS), ["claimed", "allreduce"]]
    outcomes = FitWorld().outcomes(2, run_each, own, variants)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    for version, names in enumerate(variants):
        rows = logged(own, version)
        assert any(row["val_accuracy"] for row in rows), names
        assert any(float(row.get("dsgd/wait_s") or 0) >= 0 for row in rows), names


COMMAND = [sys.executable, "-m", "lightning_dsgd"]
LAUNCHERS = {
    "the console script": [str(Path(sys.executable).with_name("lightning-dsgd")), "fit"],
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("-m", "lightning_dsgd", "fit"),
    ],
    "launch": [*COMMAND, "launch", "--ranks", "2", "fit"],
}


def run(command: list[str], folder: Path, **variables: str) -> None:
    done = ended(command, folder, **variables)
    assert done.returncode == 0, done.stderr
    check(folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_working_folder_is_on_the_path_of_all_ranks(launcher: str, own: Path) -> None:
    variants = ["survival"] if launcher == "launch" else []
    run([*LAUNCHERS[launcher], *configs(*variants), *ON_CPUS, *SMALL], own)


SRUN = """#!/bin/sh
# Starts a task on each of two nodes, which are this one.
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_NODEID=$rank SLURM_LOCALID=0 "$@" & tasks="$tasks $!"
done
for task in $tasks; do wait $task || exit 1; done
"""


@pytest.mark.exhaustive
def test_the_job_of_slurm(own: Path, tmp_path: Path) -> None:
    """Its script, with a `srun` that sets SLURM's variables: there is no SLURM here."""
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "own", "SLURM_NNODES": "2"}
    job |= {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NODELIST": "localhost"}
    folders = [str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]
    variables = job | {"MASTER_PORT": str(free_port()), "PATH": os.pathsep.join(folders)}
    run(["bash", "train.sbatch", "--trainer.devices=1", *SMALL], own, **variables)


# What a launcher of each of four nodes, or pods, is asked for; `lightning-dsgd` writes it down.
ASKED = "#!/bin/sh\nprintf '%s\\n' \"$@\" > asked_$SLURM_NODEID\n"
SRUN_OF_FOUR = """#!/bin/sh
echo "$@" > options
while [ "${1#--}" != "$1" ]; do shift; done
for node in 0 1 2 3; do SLURM_NODEID=$node "$@"; done
"""


def of_slurm(own: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    scripts = {"lightning-dsgd": ASKED, "srun": SRUN_OF_FOUR, "scontrol": "#!/bin/sh\necho node0\n"}
    for name, text in scripts.items():
        (own / name).write_text(text)
        (own / name).chmod(0o755)
    variables = {"SLURM_NNODES": "4", "PATH": f"{own}{os.pathsep}{os.environ['PATH']}"}
    assert ended(["bash", "survival.sbatch"], own, **variables).returncode == 0
    for option in ("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none"):
        assert option in (own / "options").read_text().split()
    return [(own / f"asked_{node}").read_text().split("\n")[:-1] for node in range(4)]


def of_kubernetes(own: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    service, job = yaml.safe_load_all((own / "survival_pods.yml").read_text())
    spec = job["spec"]
    pod = spec["template"]["spec"]
    assert spec["completions"] == spec["parallelism"] == 4
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    (program, *words) = pod["containers"][0]["command"]
    assert program == "lightning-dsgd"
    of_each = [[w.replace("$(JOB_COMPLETION_INDEX)", str(n)) for w in words] for n in range(4)]
    end_s = command.parser().parse_args(of_each[0][1:]).end_s
    assert end_s < pod["terminationGracePeriodSeconds"]
    return of_each


@pytest.mark.parametrize("asked", [of_slurm, of_kubernetes])
def test_each_node_of_a_cluster_has_a_launcher_and_they_meet_at_the_first(asked, own, monkeypatch):
    """Each is asked for what the command line knows, and trains what the files here set."""
    seen = []
    for node, (launches, *words) in enumerate(asked(own, monkeypatch)):
        assert launches == "launch"
        args = command.parser().parse_args(words)
        host, port = command._address(args.rendezvous)
        place = Place(args.ranks, args.nodes, args.node, host, port)
        assert (place.node, place.nodes) == (node, 4)
        assert host == {"of_slurm": "node0", "of_kubernetes": "own-0.own"}[asked.__name__]
        seen.append([args.script, *args.arguments])
    monkeypatch.chdir(own)
    monkeypatch.syspath_prepend(own)
    monkeypatch.setattr(sys, "argv", ["lightning-dsgd", *seen[0], "--print_config"])
    with pytest.raises(SystemExit) as end:
        main()
    assert (end.value.code, seen.count(seen[0])) == (0, 4)


def test_each_file_says_how_it_is_run_and_the_page_has_them_all() -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    for name in ("config", *VARIANTS):
        head = (OWN / f"{name}.yaml").read_text()
        files = "" if name == "config" else f" --config {name}.yaml"
        assert f"fit --config config.yaml{files}\n" in head
    for path in OWN.iterdir():
        assert f"`{path.name}`" in page or path.name == "__pycache__"
