"""The folder `examples/own`: each variant trains, beside the baseline; jobs of two schedulers."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_dsgd.cli import main
from lightning_dsgd.elastic.launch import command
from lightning_dsgd.elastic.launch.node import Place
from tests.support.launched import until
from tests.support.mpi import ended, environment
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
    asked = [(own / f"asked_{node}").read_text().split("\n")[:-1] for node in range(4)]
    check_launchers(asked, "node0", own, monkeypatch)


def check_launchers(
    asked: Sequence[Sequence[str]], first: str, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of four nodes has a launcher, they meet at the first, and all train the same."""
    seen = []
    for node, (launches, *words) in enumerate(asked):
        assert launches == "launch"
        args = command.parser().parse_args(words)
        host, port = command._address(args.rendezvous)
        place = Place(args.ranks, args.nodes, args.node, host, port)
        assert (place.node, place.nodes, host) == (node, 4, first)
        seen.append([args.script, *args.arguments])
    assert len(seen) == 4
    monkeypatch.chdir(own)
    monkeypatch.syspath_prepend(own)
    monkeypatch.setattr(sys, "argv", ["lightning-dsgd", *seen[0], "--print_config"])
    with pytest.raises(SystemExit) as end:
        main()
    assert (end.value.code, seen.count(seen[0])) == (0, 4)


# ---- pods of Kubernetes ----


def service_and_job() -> list[Any]:
    return list(yaml.safe_load_all((OWN / "survival_pods.yml").read_text()))


def commands(job: Any) -> list[list[str]]:
    """What each pod runs, as the kubelet writes an Indexed Job's variable into it."""
    [container] = job["spec"]["template"]["spec"]["containers"]
    return [
        [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in container["command"]]
        for index in range(job["spec"]["completions"])
    ]


def test_each_pod_has_a_launcher_and_they_meet_at_the_first(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, job = service_and_job()
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    asked = [words[1:] for words in commands(job)]
    check_launchers(asked, f"{name}-0.{pod['subdomain']}", own, monkeypatch)
    args = command.parser().parse_args(asked[0][1:])
    assert args.end_s + 10 < pod["terminationGracePeriodSeconds"]  # SIGKILL comes from the launcher


@pytest.mark.exhaustive
@pytest.mark.timeout(500)
def test_a_pod_that_is_taken_away_leaves_and_the_others_train_to_the_end(own: Path) -> None:
    """What the pods run, as processes, with one rank each."""
    _, job = service_and_job()
    meet = f"--rendezvous=127.0.0.1:{free_port()}"
    changed = {"--ranks=4": "--ranks=1", "--rendezvous=own-0.own:29500": meet}
    options = ["--trainer.devices=1", "--trainer.strategy.init_args.min_ranks=2", *SMALL]
    options += ["--trainer.max_epochs=150", "--data.num_train=256"]
    pods = []
    for index, (_, *words) in enumerate(commands(job)):
        here = Path(shutil.copytree(OWN, own / f"pod_{index}"))
        given = [changed.get(word, word) for word in words] + options
        asked = [sys.executable, "-m", "lightning_dsgd", *given]
        pods.append(subprocess.Popen(asked, cwd=here, env=environment()))
    try:
        until((own / "pod_0" / "lightning_logs" / "version_0" / "metrics.csv").exists)
        pods[3].send_signal(signal.SIGTERM)
        assert pods[3].wait(120) == 1  # so its place is filled, and the job is not over
        log = (own / "pod_3" / "launch_logs" / "rank_3.0.log").read_text()
        assert "rank 3 received SIGTERM" in log  # in an evaluation it leaves at once, and is lost
        assert [pod.wait(240) for pod in pods[:3]] == [0, 0, 0]
    finally:
        for pod in pods:
            pod.kill()


def test_the_page_has_every_file() -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    for path in OWN.iterdir():
        assert f"`{path.name}`" in page or path.name == "__pycache__"
