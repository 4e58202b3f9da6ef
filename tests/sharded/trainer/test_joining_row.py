"""A replica in shards that has lost a rank comes back, under `lightning-dsgd launch`.

In a simulated world: tests/elastic/test_rows.py; how its ranks find each other: test_gathering.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dsgd.elastic.launch.reserve import IMPORTS
from lightning_dsgd.session.checkpoint import record
from tests.sharded.trainer.test_sharded import Sharded
from tests.support.launched import Launched, until
from tests.support.mpi import ROOT

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]
SCRIPT = (ROOT / "tests/support/scripts/joined_row.py").read_text()
NAME = "local_sgd:sync_period=3"
Death = tuple[int, int, str, int]


def job(
    folder: Path, name: str, parallel: str, deaths: list[Death], *options: str, ranks: int = 4
) -> Launched:
    arguments = (name, parallel, json.dumps(deaths))
    given = ("--ranks", str(ranks), "--imports", ",".join(IMPORTS), *options)
    return Launched(folder, SCRIPT, *given, arguments=arguments)


def where(folder: Path, rank: int) -> dict[str, Any]:
    """Where a rank is, as it has said last."""
    file = folder / f"at_{rank}"
    return json.loads(file.read_text()) if file.exists() else {"members": [], "epoch": -1}


def await_return(folder: Path, members: list[int]) -> None:
    """Until all ranks have trained in that view, and then in another epoch."""
    ranks = range(len(members))
    until(lambda: all(where(folder, rank)["members"] == members for rank in ranks))
    epoch = max(where(folder, rank)["epoch"] for rank in ranks)
    until(lambda: all(where(folder, rank)["epoch"] > epoch + 1 for rank in ranks))


def begun_with(folder: Path) -> dict[int, dict[int, Any]]:
    """What each rank has begun with in each view."""
    begun: dict[int, dict[int, Any]] = {}
    for file in folder.glob("view_*"):
        _, number, rank = file.name.split("_")
        begun.setdefault(int(number), {})[int(rank)] = json.loads(file.read_text())
    return begun


def check_end(folder: Path, members: list[int], said: str) -> None:
    """All four have come to one model, from which newcomers have gone on as their column."""
    ends = [json.loads((folder / f"ended_{rank}").read_text()) for rank in range(4)]
    for end in ends:
        assert end == ends[0]
    assert ends[0]["members"] == members
    shares = [where(folder, rank)["shares"] for rank in range(4)]
    assert len({(each["num_replicas"], each["rank"]) for each in shares}) in (2, 4)
    begun = begun_with(folder)
    newest = begun[max(begun)]
    assert sorted(newest) == members
    for new in members[2:]:
        giver = next(rank for rank in members if rank % 2 == new % 2)
        assert newest[new] == newest[giver]
        assert newest[new]["step"] > 0
        assert torch.tensor(newest[new]["moments"][0]).abs().sum() > 0
    row = f"replica of ranks {members[2]} and {members[3]} joined"
    assert f"{row} (started as " in said
    saved = torch.load(folder / "last.ckpt", weights_only=True)
    assert saved["state_dict"].keys() == Sharded().state_dict().keys()
    mark = record.save_of(saved)
    assert mark is not None
    assert (mark.num_shards, mark.world_size) == (2, 4)


def lose(folder: Path, name: str, parallel: str, deaths: list[Death], members: list[int]) -> str:
    """Trains until a lost row is back; returns what the launcher has said."""
    with job(folder, name, parallel, deaths) as launched:
        await_return(folder, members)
        (folder / "end").touch()
        assert launched.end() == 0, launched.said("stderr")
    said = "".join(log.read_text() for log in sorted((folder / "logs").iterdir()))
    check_end(folder, members, said)
    return launched.said("stderr")


def test_a_replica_that_has_lost_a_rank_comes_back(tmp_path: Path) -> None:
    said = lose(tmp_path, NAME, "fsdp", [(3, 1, "training_step", 12)], [0, 1, 4, 5])
    assert "rank 2 started again" in said
    assert "rank 3 started again" in said


def test_a_replica_has_the_state_of_one_other_though_the_first_giver_is_lost(
    tmp_path: Path,
) -> None:
    """Rank 0 has given its state, and rank 1 dies in place of that."""
    deaths = [(5, 1, "training_step", 12), (1, 1, "give", 1)]
    with job(tmp_path, NAME, "fsdp", deaths, ranks=6) as launched:
        await_return(tmp_path, [2, 3, 6, 7, 8, 9])
        (tmp_path / "end").touch()
        assert launched.end() == 0, launched.said("stderr")
    [begun] = [each for each in begun_with(tmp_path).values() if sorted(each) == [2, 3, 6, 7]]
    assert (begun[6], begun[7]) == (begun[2], begun[3])
    said = "".join(log.read_text() for log in (tmp_path / "logs").iterdir())
    assert "replica of ranks 6 and 7 joined (started as 4 and 5)" in said


@pytest.mark.parametrize(
    ("name", "parallel", "deaths", "members"),
    [
        ("wagma", "fsdp", [(0, 1, "training_step", 12)], [2, 3, 4, 5]),
        (NAME, "tensor", [(1, 1, "training_step", 30)], [2, 3, 4, 5]),
        # A newcomer dies, and its row comes once more.
        (NAME, "fsdp", [(3, 1, "training_step", 12), (3, 2, "ask", 1)], [0, 1, 6, 7]),
        (NAME, "fsdp", [(3, 1, "training_step", 12), (2, 2, "take", 1)], [0, 1, 6, 7]),
        (NAME, "fsdp", [(3, 1, "training_step", 12), (2, 2, "configure_model", 1)], [0, 1, 6, 7]),
        (NAME, "tensor", [(3, 1, "training_step", 12), (3, 2, "mesh", 1)], [0, 1, 6, 7]),
        # One row after the other.
        (
            "dpsgd",
            "fsdp",
            [(3, 1, "training_step", 12), (3, 2, "training_step", 9)],
            [0, 1, 6, 7],
        ),
    ],
)
def test_a_replica_comes_back_whoever_of_it_is_lost(
    name: str, parallel: str, deaths: list[Death], members: list[int], tmp_path: Path
) -> None:
    lose(tmp_path, name, parallel, deaths, members)
