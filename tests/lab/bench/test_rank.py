"""What a rank of a job does before it measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dsgd.lab.bench.rank import load, rank_of_this_process

LAUNCHERS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def test_a_reference_is_a_name_in_a_module_or_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "cells_of_a_test.py").write_text("answer = 42")
    assert load(f"{tmp_path}/cells_of_a_test.py:answer") == 42
    assert load("json:loads")("1") == 1


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_numbers_the_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in LAUNCHERS:
        monkeypatch.delenv(other, raising=False)
    with pytest.raises(SystemExit, match="its launcher has set no rank"):
        rank_of_this_process()
    monkeypatch.setenv(name, "3")
    assert rank_of_this_process() == 3
