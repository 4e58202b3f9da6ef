"""A rank that is lost is started again by `lightning-dsgd launch`, and joins the others."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.elastic.launch.reserve import IMPORTS
from lightning_dsgd.session.checkpoint.files import replicas_folder
from tests.support.launched import Launched, until
from tests.support.models import loader
from tests.support.mpi import ROOT
from tests.support.ports import free_port
from tests.support.scripts.joined import smooth
from tests.support.thorough import cases, some

FEW = ("wagma", "popsgd:claimed", "balanced")
SCRIPT = (ROOT / "tests/support/scripts/joined.py").read_text()


def job(
    folder: Path, name: str, ranks: int, *options: str, nodes: int = 1, resume: str = ""
) -> Launched:
    arguments = (name, str(ranks), str(nodes), "", resume)
    given = ("--ranks", str(ranks), "--nodes", str(nodes), "--imports", ",".join(IMPORTS), *options)
    return Launched(folder, SCRIPT, *given, arguments=arguments)


def free_address() -> str:
    """Where nobody listens."""
    return f"127.0.0.1:{free_port()}"


def where(folder: Path, rank: int) -> dict[str, Any]:
    """Where a rank is, as it has said last."""
    file = folder / f"at_{rank}"
    return json.loads(file.read_text()) if file.exists() else {"epoch": -1, "pid": 0}


def check_end(folder: Path, ranks: list[int]) -> int:
    """These ranks have trained to the same end; how many batches its epoch had for each."""
    ends = [json.loads((folder / f"ended_{rank}").read_text()) for rank in ranks]
    for end in ends:
        assert end == ends[0]
    assert ends[0]["members"] == len(ranks)
    return int(ends[0]["num_batches"])


def kill_and_let_join(
    folder: Path, name: str, lost: int, ranks: int, ready: Callable[[], bool] = lambda: True
) -> None:
    """Kills a rank in the second epoch or later, once `ready` says so, and lets it join."""
    with job(folder, name, ranks) as launched:
        until(lambda: all(where(folder, rank)["epoch"] >= 1 for rank in range(ranks)))
        until(ready)
        before = where(folder, lost)
        os.kill(before["pid"], signal.SIGKILL)
        until(lambda: where(folder, lost)["pid"] != before["pid"])
        joined = where(folder, lost)
        assert joined["epoch"] >= before["epoch"]
        assert joined["step"] > before["step"]
        assert ranks in joined["members"]
        until(lambda: where(folder, lost)["epoch"] > joined["epoch"])
        (folder / "end").touch()
        assert launched.end() == 0, launched.said("stderr")
    said = "".join(log.read_text() for log in sorted((folder / "logs").iterdir()))
    assert f"rank {ranks} joined (started as {lost}), {ranks} ranks go on" in said
    assert f"rank {lost} started again" in launched.said("stderr")
    assert check_end(folder, list(range(ranks))) == 20  # as at the start


@cases("name", now=[FEW[0]], later=some([n for n in (*ALGORITHMS, *FEW) if n != FEW[0]], FEW[1:]))
def test_a_rank_is_killed_and_started_again_and_trains_with_the_others(tmp_path, name):
    """In the simulated world, all algorithms let others join: test_algorithms.py."""
    kill_and_let_join(tmp_path, name, 0, 3)


@pytest.mark.exhaustive
def test_a_rank_that_is_lost_and_comes_back_leaves_no_trace_in_balanced(tmp_path):
    """The weights at the end are those of one process on all batches of all ranks."""
    kill_and_let_join(tmp_path, "balanced:smooth", 0, 3)
    end = json.loads((tmp_path / "ended_1").read_text())
    model, optimizer, scheduler = smooth()
    source, num_steps = loader(3 * 160), 0
    for epoch in range(end["epoch"]):
        samplers = [DistributedSampler(source.dataset, 3, rank, seed=0) for rank in range(3)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        ranks = [DataLoader(source.dataset, 8, sampler=sampler) for sampler in samplers]
        for batches in zip(*ranks, strict=True):
            optimizer.zero_grad()
            for x, y in batches:
                ((model(x.double()) - y.double()).square().mean() / 3).backward()
            optimizer.step()
            scheduler.step()
            num_steps += 1
    assert end["step"] == num_steps
    for p, given in zip(model.parameters(), end["weights"], strict=True):
        trained = torch.tensor(given, dtype=torch.float64)
        torch.testing.assert_close(trained, p.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_third_rank_joins_two_and_they_go_on_from_their_checkpoint(tmp_path):
    """It trains, is saved, and all three are resumed."""
    where_they_meet, arguments = ("--rendezvous", free_address()), ("local_sgd", "2", "1", "3")
    more = tmp_path / "more"
    more.mkdir()
    first = Launched(tmp_path, SCRIPT, "--ranks", "2", *where_they_meet, arguments=arguments)
    third = Launched(
        more, SCRIPT, "--ranks", "1", "--join", *where_they_meet, arguments=arguments, to=tmp_path
    )
    with first:
        until(lambda: all(where(tmp_path, rank)["epoch"] >= 1 for rank in range(2)))
        with third:
            until(lambda: where(tmp_path, 2)["epoch"] >= 1)
            joined = where(tmp_path, 2)
            assert joined["members"] == [0, 1, 2]
            until(lambda: where(tmp_path, 2)["epoch"] >= joined["epoch"] + 2)
            (tmp_path / "end").touch()
            assert [first.end(), third.end()] == [0, 0], third.said("stderr")
    assert "rank 2 joined (started as 2), 3 ranks go on" in first.said("stdout")
    assert check_end(tmp_path, [0, 1, 2]) == 14  # 320 samples among 3, in batches of 8
    end = json.loads((tmp_path / "ended_2").read_text())
    saved = tmp_path / "last.ckpt"
    assert len(list(Path(replicas_folder(saved)).iterdir())) == 3

    again = tmp_path / "again"
    again.mkdir()
    (again / "end").touch()
    with job(again, "local_sgd", 3, resume=str(saved)) as launched:
        assert launched.end() == 0, launched.said("stderr")
    assert "saved from" not in launched.said("stderr") + launched.said("stdout")
    assert check_end(again, [0, 1, 2]) == 20
    resumed = json.loads((again / "ended_2").read_text())
    assert resumed["step"] > end["step"]


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_newcomer_with_another_model_ends_and_the_others_go_on(tmp_path):
    with job(tmp_path, "local_sgd", 3, "--max-restarts", "1") as launched:
        until(lambda: all(where(tmp_path, rank)["epoch"] >= 1 for rank in range(3)))
        (tmp_path / "other").touch()
        os.kill(where(tmp_path, 1)["pid"], signal.SIGKILL)
        until(lambda: "rank 1 is not started again" in launched.said("stderr"))
        until(lambda: where(tmp_path, 0)["members"] == [0, 2])
        (tmp_path / "end").touch()
        assert launched.end() == 0, launched.said("stderr")
    assert "got 11 parameters and buffers (checksum" in launched.said("logs/rank_1.1.log")
    check_end(tmp_path, [0, 2])


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_node_that_is_lost_and_started_again_joins(tmp_path):
    """Its ranks leave, as they get SIGTERM when their supervisor is killed."""
    where_they_meet = ("--rendezvous", free_address())

    def node(number: int) -> Launched:
        return job(tmp_path, "wagma", 1, "--node", str(number), *where_they_meet, nodes=2)

    with node(0) as first:
        with node(1):
            until(lambda: all(where(tmp_path, rank)["epoch"] >= 1 for rank in range(2)))
            lost = where(tmp_path, 1)["pid"]
        until(lambda: where(tmp_path, 0)["members"] == [0])
        with node(1) as second:
            until(lambda: where(tmp_path, 0)["members"] == [0, 2])
            until(lambda: where(tmp_path, 1)["pid"] != lost)
            joined = where(tmp_path, 0)["epoch"]
            until(lambda: where(tmp_path, 1)["epoch"] > joined)
            (tmp_path / "end").touch()
            assert [first.end(), second.end()] == [0, 0]
    check_end(tmp_path, [0, 1])
