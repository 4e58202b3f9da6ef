"""Ranks of `balanced` that are killed and started again leave no trace in the weights.

Each process writes its weights after each step: they are those of one process on all batches.
Shorter: `tests/elastic/test_balanced.py`, where nobody is started again.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dsgd.elastic.launch.reserve import IMPORTS
from tests.elastic.test_balanced import (
    BEFORE_SUM,
    IN_CHANGE,
    NUM_PARTS,
    Moment,
    in_one_process,
)
from tests.support.launched import Launched, until
from tests.support.mpi import ROOT
from tests.support.thorough import times

SCRIPT = (ROOT / "tests/support/scripts/untraced.py").read_text()
ENOUGH = 3
"""Steps that the last process of each rank makes before training is told to end."""

Steps = list[tuple[int, int, list[float]]]
"""What a process has written: the step, the number of members, the weights."""


def steps_of(folder: Path, rank: int, last: int = 0) -> list[Steps]:
    """The last steps of each process of a rank, or all; in the order in which they have begun."""
    num_files = len([*folder.glob(f"steps_{rank}_*")])
    files = [folder / f"steps_{rank}_{number}" for number in range(num_files)]
    # A line may be half written.
    lines = [file.read_text().rpartition("\n")[0].splitlines()[-last:] for file in files]
    return [[json.loads(line) for line in of_process] for of_process in lines]


def kill_and_replace(
    folder: Path, num_ranks: int, moments: dict[int, list[Moment]], deterministic: bool
) -> None:
    """Trains; each process that is killed is followed by another, until all are there."""

    def are_all_there() -> bool:
        for rank in range(num_ranks):
            processes = steps_of(folder, rank, ENOUGH)
            if len(processes) <= len(moments.get(rank, [])):
                return False
            last = processes[-1]
            if len(last) < ENOUGH or last[-1][1] < num_ranks:
                return False
        return True

    options = json.dumps({"deterministic": deterministic})
    arguments = str(num_ranks), options, json.dumps(moments)
    given = "--ranks", str(num_ranks), "--imports", ",".join(IMPORTS)
    with Launched(folder, SCRIPT, *given, arguments=arguments) as launched:
        until(are_all_there)
        (folder / "end").touch()
        assert launched.end() == 0, launched.said("stderr")
    ends = [json.loads((folder / f"ended_{rank}").read_text()) for rank in range(num_ranks)]
    assert [end["members"] for end in ends] == [num_ranks] * num_ranks
    check(folder, num_ranks, ends[0]["epochs"], deterministic)


def check(folder: Path, num_ranks: int, num_epochs: int, deterministic: bool) -> None:
    """All processes have made the steps of one process on all batches, and each without a gap."""
    expected = torch.stack(in_one_process(num_ranks, num_epochs))
    in_order = torch.stack(in_one_process(num_ranks, num_epochs, NUM_PARTS))
    by_step: dict[int, Any] = {}
    for rank in range(num_ranks):
        for steps in steps_of(folder, rank):
            made = [step for step, _, _ in steps]
            assert made == [*range(made[0], made[0] + len(made))] if made else True
            for step, _, given in steps:
                x = torch.tensor(given, dtype=torch.float64)
                name = f"step {step} of a process of rank {rank}: {{}}"
                torch.testing.assert_close(
                    x, expected[step], rtol=1e-12, atol=1e-12, msg=name.format
                )
                assert torch.equal(x, in_order[step]) or not deterministic, name
                assert by_step.setdefault(step, given) == given, name
    assert by_step.keys() == {*range(len(expected))}


def drawn(chance: random.Random) -> dict[int, list[Moment]]:
    """Who of eight ranks is killed, and when: the first dealer, two others, and a follower."""

    def moment(first: int, last: int) -> Moment:
        place = chance.choice([*range(6), *range(BEFORE_SUM, IN_CHANGE + 1)])
        return chance.randint(first, last), place

    lost = [0, *chance.sample(range(1, 8), 2)]
    moments = {rank: [moment(1, 8)] for rank in lost}
    moments[chance.choice(lost)].append(moment(0, 4))
    return moments


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seed", times(2))
def test_three_of_eight_ranks_are_killed_and_replaced(
    seed: int, deterministic: bool, tmp_path: Path
) -> None:
    moments = drawn(random.Random(f"{seed} {deterministic}"))
    kill_and_replace(tmp_path, 8, moments, deterministic)
