"""Scripts rebuilt from users' issues: the rank, its line and the collective are named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.mpi import has_mpi, mpiexec
from tests.support.thorough import cases
from tests.why.jobs import SCRIPTS, forked, place, watched

MISSING, DISAGREE, RAISED, KILLED, LEFT = "missing", "disagree", "raised", "killed", "left"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
NOW = [
    # script, ranks, what has happened, whose fault, what the others were in, a word of the remedy
    ("branch_by_rank", 3, MISSING, [2], "all_reduce", "depends on the rank"),
    ("uneven_batches", 3, DISAGREE, [1], "all_reduce", "fewer batches"),
]
LATER = [
    ("out_of_memory", 3, RAISED, [1], "", "smaller batch"),
    ("killed_by_kernel", 3, KILLED, [1], "", "dmesg"),
    ("metric_on_rank_zero", 3, DISAGREE, [0], "all_reduce", "depends on the rank"),
    ("dead_loader", 2, MISSING, [1], "all_reduce", "num_workers"),
    ("unused_branch", 2, RAISED, [1], "", "find_unused_parameters"),
    ("log_on_one_rank", 3, DISAGREE, [1], "all_reduce", "depends on the rank"),
    ("save_on_rank_zero", 3, DISAGREE, [0], "broadcast", "depends on the rank"),
    ("sigterm_to_one_rank", 3, LEFT, [1], "", 'strategy="wagma"'),
]


@cases("script, num_ranks, cause, culprits, collective, remedy", now=NOW, later=LATER)
@pytest.mark.timeout(300)
def test_the_rank_and_its_line_are_named(
    script: str,
    num_ranks: int,
    cause: str,
    culprits: list[int],
    collective: str,
    remedy: str,
    tmp_path: Path,
) -> None:
    job = forked(tmp_path / "run", script, num_ranks)
    assert (job.verdict["cause"], job.verdict["culprits"]) == (cause, culprits), job.said
    text = "\n".join(job.verdict["lines"])
    assert place(script, "culprit") in text
    assert remedy in text
    assert job.status != 0
    if collective:
        assert job.verdict["collective"]["name"] == collective
        assert place(script, "others") in text
    assert all(f"why: {line}" in job.said for line in job.verdict["lines"])


SHARDED = cases(
    "fsdp, stops, purpose",
    now=[],
    later=[
        ("2", "backward", "FSDP, gradients"),
        ("2", "forward", "FSDP, weights"),
        ("1", "backward", "FSDP, gradients"),
    ],
)


@SHARDED
@pytest.mark.timeout(300)
def test_the_others_wait_in_a_collective_of_fsdp(
    fsdp: str, stops: str, purpose: str, tmp_path: Path
) -> None:
    job = forked(tmp_path / "run", "fully_sharded", 2, FSDP=fsdp, STOPS=stops)
    assert (job.verdict["cause"], job.verdict["culprits"]) == (MISSING, [1]), job.said
    assert f"({purpose})" in job.verdict["lines"][0]
    assert place("fully_sharded", "culprit") in job.said
    assert place("fully_sharded", "others") in job.said


@pytest.mark.exhaustive
def test_a_rank_that_was_never_started_is_named(tmp_path: Path) -> None:
    job = forked(tmp_path / "run", "too_few_started", 3, STARTED_RANKS="2")
    assert (job.verdict["cause"], job.verdict["culprits"]) == ("unstarted", [2]), job.said
    assert place("too_few_started", "others") in "\n".join(job.verdict["lines"])


@pytest.mark.exhaustive
def test_groups_in_different_orders_are_a_cycle(tmp_path: Path) -> None:
    job = forked(tmp_path / "run", "crossed_groups", 2)
    assert job.verdict["cause"] == "cycle", job.said


@pytest.mark.exhaustive
def test_a_rank_that_is_late_before_it_joins_is_named(tmp_path: Path) -> None:
    script = str(SCRIPTS / "late_before_start.py")
    job = watched(tmp_path / "run", *TORCHRUN, "--nproc-per-node=2", script, options=("--end",))
    assert (job.verdict["cause"], job.verdict["culprits"]) == ("missing", [1]), job.said
    assert place("late_before_start", "culprit") in job.said
    assert place("late_before_start", "others") in job.said


@pytest.mark.exhaustive
def test_ranks_of_torchrun_are_watched(tmp_path: Path) -> None:
    script = str(SCRIPTS / "branch_by_rank.py")
    job = watched(tmp_path / "run", *TORCHRUN, "--nproc-per-node=3", script, options=("--end",))
    assert (job.verdict["cause"], job.verdict["culprits"]) == ("missing", [2]), job.said
    assert place("branch_by_rank", "culprit") in job.said
    assert job.status == 1


@pytest.mark.exhaustive
def test_ranks_of_lightnings_own_launcher_are_watched(tmp_path: Path) -> None:
    script = str(SCRIPTS / "log_on_one_rank.py")
    job = watched(tmp_path / "run", sys.executable, script, options=("--end",))
    assert (job.verdict["cause"], job.verdict["culprits"]) == ("disagree", [1]), job.said
    assert place("log_on_one_rank", "culprit") in job.said
    assert job.status == 1


@has_mpi
@pytest.mark.exhaustive
def test_ranks_of_mpiexec_are_watched(tmp_path: Path) -> None:
    script = str(SCRIPTS / "started_by_others.py")
    command = [str(mpiexec(sys.executable)), "-n", "2", sys.executable, script]
    job = watched(tmp_path / "run", *command, str(tmp_path / "store"), options=("--end",))
    assert (job.verdict["cause"], job.verdict["culprits"]) == ("missing", [1]), job.said
    assert place("started_by_others", "culprit") in job.said
    assert place("started_by_others", "others") in job.said
    assert job.status == 1
