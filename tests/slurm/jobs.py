"""Jobs of a real SLURM, on a cluster of three nodes: `make test-slurm`."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.slurm.cluster import Cluster, impossible, until
from tests.support.mpi import ROOT
from tests.why.jobs import SCRIPTS, place

pytestmark = pytest.mark.timeout(900)

TRAIN = str(ROOT / "tests/slurm/train.py")
BOTH = pytest.mark.parametrize("strategy", ["wagma", "balanced"])
TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2")
THREE = ("--nodes=3", "--ntasks-per-node=1")
A_RANK_EACH = ("--devices", "1", "--nodes")
"""Options of the script; behind these the number of nodes."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if impossible():
        pytest.skip(impossible())
    with Cluster(tmp_path_factory.mktemp("slurm"), Path(sys.prefix, "slurm")) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: Cluster) -> Iterator[None]:
    """Each test has all nodes, and leaves no job behind."""
    yield
    cluster.restore()


def results(folder: Path, run: int = 0) -> list[Any]:
    """What each rank has told, by rank."""
    files = sorted(folder.glob(f"run_{run}_rank_*.pt"))
    return [torch.load(file) for file in files]


def check(folder: Path, num_ranks: int, kind: str = "SLURMEnvironment", run: int = 0) -> list[Any]:
    """All have trained to the end, to one model, started as this environment says."""
    ranks = results(folder, run)
    assert len(ranks) == num_ranks
    assert {rank["environment"] for rank in ranks} == {kind}
    assert all(torch.equal(rank["weights"], ranks[0]["weights"]) for rank in ranks)
    return ranks


def train(folder: Path, *options: str) -> list[str]:
    return ["python", TRAIN, str(folder), *options]


def trains(cluster: Cluster, job: str, folder: Path, num_ranks: int) -> None:
    """Waits until all ranks of a job are in the midst of training."""

    def do() -> bool:
        cluster.check_runs(job)
        return len(list(folder.glob("trains_0_*"))) == num_ranks

    until(do, f"{num_ranks} ranks train in {folder}")


@BOTH
def test_srun(strategy: str, cluster: Cluster, tmp_path: Path) -> None:
    command = train(tmp_path, "--strategy", strategy)
    said = cluster.run("srun", "--label", *TWO_BY_TWO, *command, cwd=tmp_path)
    ranks = check(tmp_path, 4)
    assert [rank["place"] for rank in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {rank["transport"] for rank in ranks} == {"ProcessGroupTransport"}, said


def blocks(page: str) -> list[str]:
    """The batch files that stand in a page, in their order."""
    text = (ROOT / "docs" / page).read_text()
    return [each for each in re.findall(r"```bash\n(.*?)```", text, re.S) if "#SBATCH" in each]


PAGE_SCRIPT = """\
import lightning as L
import lightning_dsgd
from tests.support.models import Regression, loader

trainer = L.Trainer(strategy="wagma", accelerator="cpu", devices=1, num_nodes=2, max_epochs=1)
trainer.fit(Regression(), loader())
print("Started by", type(trainer.strategy.cluster_environment).__name__)
"""
KINDS = ["SLURMEnvironment", "TorchElasticEnvironment"]


@pytest.mark.parametrize(("block", "kind"), list(enumerate(KINDS)), ids=["srun", "torchrun"])
def test_the_batch_files_of_the_page(
    block: int, kind: str, cluster: Cluster, tmp_path: Path
) -> None:
    """With a rank on each node in place of four, as processors are few."""
    (tmp_path / "train.py").write_text(PAGE_SCRIPT)
    file = blocks("cluster.md")[block].replace("per-node=4", "per-node=1")
    (tmp_path / "train.sbatch").write_text(file.replace("per-node 4", "per-node 1"))
    job = cluster.await_job(cluster.submit("train.sbatch", cwd=tmp_path))
    said = Path(job["StdOut"]).read_text()
    assert "All 2 ranks have started" in said
    assert said.count(f"Started by {kind}") == 2, said


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder of one's own, as `lightning-dsgd recipes own` makes it."""
    return Path(shutil.copytree(ROOT / "examples/own", tmp_path / "own"))


def test_the_batch_file_of_the_example(cluster: Cluster, own: Path) -> None:
    """With a rank on each node, too."""
    file = own / "train.sbatch"
    file.write_text(
        file.read_text().replace("-node=4", "-node=1").replace("devices 4", "devices 1")
    )
    few = ["--trainer.max_epochs", "1", "--data.num_train", "512", "--data.num_val", "64"]
    job = cluster.await_job(cluster.submit(file.name, *few, cwd=own))
    assert "`max_epochs=1` reached" in Path(job["StdOut"]).read_text()
    assert list(own.glob("lightning_logs/version_*/checkpoints/*.ckpt"))


def test_a_node_dies_under_launchers_of_srun(cluster: Cluster, own: Path) -> None:
    file = own / "survival.sbatch"
    file.write_text(file.read_text().replace("--ranks 4", "--ranks 2"))
    endless = ["--trainer.max_epochs", "100000", "--trainer.devices", "2"]
    job = cluster.submit("--nodes=3", file.name, *endless, cwd=own)
    log = own / f"own-{job}.log"
    saved = "lightning_logs/version_0/checkpoints/*.ckpt"
    until(lambda: any(own.glob(saved)), "the first epoch is saved")
    cluster.lose("n3")
    until(lambda: "4 ranks go on" in log.read_text(), "ranks go on without the node")
    cluster.await_states({"n3": "down*"})
    assert cluster.job(job)["JobState"] == "RUNNING"
    cluster.run("scancel", "--signal=TERM", job, cwd=own)
    cluster.await_job(job, "FAILED")
    assert "received SIGTERM" in log.read_text()


def test_others_go_on_where_srun_ends_none_with_one(cluster: Cluster, tmp_path: Path) -> None:
    lasting = ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
    command = train(tmp_path, "--on-loss", "continue", "--dies", "2", *A_RANK_EACH, "3")
    status, said = cluster.ended("srun", *THREE, *lasting, *command, cwd=tmp_path)
    assert status == 137, said
    assert "2 ranks go on" in said
    check(tmp_path, 2)


def test_a_lost_rank_ends_all_and_is_named(cluster: Cluster, tmp_path: Path) -> None:
    command = train(tmp_path, "--dies", "2", *A_RANK_EACH, "3")
    status, said = cluster.ended("srun", *THREE, *command, cwd=tmp_path)
    assert status
    told = [rank["exception"] for rank in results(tmp_path)]
    assert len(told) == 2, said
    assert all("rank 2 died" in text for text in told), told


def test_kill_on_bad_exit_leaves_nothing_behind(cluster: Cluster, tmp_path: Path) -> None:
    lasting = ["--endless", "--on-loss", "continue", *A_RANK_EACH, "3"]
    command = train(tmp_path, "--dies", "2", *lasting)
    status, said = cluster.ended("srun", *THREE, "--kill-on-bad-exit=1", *command, cwd=tmp_path)
    assert status, said
    assert not cluster.run("squeue", "--noheader", "--steps", cwd=tmp_path)


def batch(folder: Path, *command: str, **options: str) -> Path:
    """A batch file that has srun start this command on two nodes, a rank on each."""
    options = {"nodes": "2", "ntasks-per-node": "1", **options}
    lines = ["#!/bin/bash", "#SBATCH --requeue"]
    lines += [f"#SBATCH --{name}={value}" for name, value in options.items()]
    file = folder / "job.sbatch"
    file.write_text("\n".join([*lines, f"srun {' '.join(command)}"]) + "\n")
    return file


@BOTH
@pytest.mark.parametrize("signal", ["SIGUSR1", "SIGTERM"])
def test_a_signal_saves_and_requeues_the_job_which_resumes(
    signal: str, strategy: str, cluster: Cluster, tmp_path: Path
) -> None:
    options = ["--strategy", strategy, "--endless", "--saves", "--requeue-signal", signal]
    options += [*A_RANK_EACH, "2"]
    file = batch(tmp_path, *train(tmp_path, *options))
    job = cluster.submit(str(file), cwd=tmp_path)
    trains(cluster, job, tmp_path, 2)
    cluster.run("scancel", f"--signal={signal.removeprefix('SIG')}", job, cwd=tmp_path)
    resumed(cluster, job, tmp_path)


@BOTH
def test_a_job_that_slurm_requeues_saves_and_resumes(
    strategy: str, cluster: Cluster, tmp_path: Path
) -> None:
    options = ["--strategy", strategy, "--endless", "--saves", "--workers", "1"]
    options += [*A_RANK_EACH, "2"]
    file = batch(tmp_path, *train(tmp_path, *options))
    job = cluster.submit(str(file), cwd=tmp_path)
    trains(cluster, job, tmp_path, 2)
    cluster.run("scontrol", "requeue", job, cwd=tmp_path)
    resumed(cluster, job, tmp_path)


def resumed(cluster: Cluster, job: str, folder: Path) -> None:
    """The job runs a second time, and goes on where the first has stopped."""
    assert cluster.await_job(job)["Restarts"] == "1"
    first, second = results(folder, 0), check(folder, 2, run=1)
    assert len({rank["steps"] for rank in first}) == 1
    assert {rank["first_step"] for rank in second} == {first[0]["steps"]}
    assert {rank["steps"] for rank in second} == {first[0]["steps"] + 4}


def test_tasks_of_an_array_do_not_meet(cluster: Cluster, tmp_path: Path) -> None:
    """Though both run on one node at the same time."""
    own_folder = str(tmp_path / "task_$SLURM_ARRAY_TASK_ID")
    command = ["python", TRAIN, own_folder, "--nodes", "1"]
    places = {"array": "0-1", "nodes": "1", "ntasks-per-node": "2", "nodelist": "n1"}
    job = cluster.submit(str(batch(tmp_path, *command, **places)), cwd=tmp_path)
    for task in range(2):
        cluster.await_job(f"{job}_{task}")
        check(tmp_path / f"task_{task}", 2)


def test_a_rank_says_which_name_does_not_resolve(cluster: Cluster, tmp_path: Path) -> None:
    cluster.teach("n2", "n1")
    command = train(tmp_path, "--startup-timeout-s", "30", *A_RANK_EACH, "2")
    on_two = ["--nodes=2", "--ntasks-per-node=1", "--nodelist=n1,n2", "--label"]
    status, said = cluster.ended("srun", *on_two, *command, cwd=tmp_path)
    assert status
    assert re.search(r"must resolve on n2, got 'n1' from SLURM_STEP_NODELIST=n\[1-2\]", said), said


WHY = "lightning-dsgd why --end -- srun python train.py"
"""The command of the page."""


def test_why_names_the_rank_and_the_line_of_a_job_of_two_nodes(
    cluster: Cluster, tmp_path: Path
) -> None:
    assert f"\n{WHY} " in (ROOT / "docs/stuck.md").read_text()
    script = (SCRIPTS / "log_on_one_rank.py").read_text()
    (tmp_path / "train.py").write_text(script.replace("devices=3", "devices=1, num_nodes=2"))
    file = tmp_path / "job.sbatch"
    file.write_text(f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1\n{WHY}\n")
    job = cluster.await_job(cluster.submit(file.name, cwd=tmp_path), "FAILED")
    said = Path(job["StdOut"]).read_text()
    assert job["ExitCode"] == "1:0"
    assert "why: stuck: rank 1 entered " in said, said
    for rank, who in (1, "culprit"), (0, "others"):
        at = place("log_on_one_rank", who).replace("log_on_one_rank", "train")
        assert re.search(rf"why:   rank {rank}: (is at|waits in) {at} in ", said), said
    assert "why: ending the job, as --end says" in said


def test_why_ends_an_srun_of_the_head_and_its_ranks(cluster: Cluster, tmp_path: Path) -> None:
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1"]
    script = [str(SCRIPTS / "started_by_others.py"), str(tmp_path / "store")]
    command = ["why", "--end", "--stuck-after", "4", "--", *srun, "python", *script]
    status, said = cluster.ended("lightning-dsgd", *command, cwd=tmp_path)
    assert status == 1, said
    assert "why: stuck: rank 1 never entered " in said, said
    assert f"why:   rank 1: is at {place('started_by_others', 'culprit')} in " in said, said
    assert f"why:   rank 0: waits in {place('started_by_others', 'others')} in " in said, said
    until(lambda: not cluster.run("squeue", "--noheader", "--steps", cwd=tmp_path), "the step ends")
