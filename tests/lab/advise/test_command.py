"""The command, from files to the advice, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_dsgd.lab.advise import verify
from lightning_dsgd.lab.advise.accuracy import Cost
from lightning_dsgd.lab.advise.candidates import Candidate
from lightning_dsgd.lab.advise.command import main
from lightning_dsgd.lab.advise.ranking import Ranking, Row
from lightning_dsgd.lab.results import write_result
from lightning_dsgd.lab.simulate.machines import MACHINES, Machine
from lightning_dsgd.lab.simulate.model import run
from lightning_dsgd.lab.simulate.recorded import Recorded
from tests.lab.probe.test_measure import everything, measure


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    write_result(measure.cluster(everything("abcd")).to_json(), tmp_path / "cluster.json")
    machine = MACHINES["emulated-1gbit"]
    run("wagma", 4, machine, 12, trace=tmp_path / "run", epoch_steps=12)
    return [str(tmp_path / "cluster.json"), "--trace", str(tmp_path / "run")]


@pytest.mark.parametrize(
    ("chosen", "epoch_steps", "said"),
    [
        ([], 6, "So many samples has an epoch of the trace: 12 steps of 4 ranks."),
        (["--epoch-steps", "endless"], None, "One endless epoch"),
    ],
)
def test_the_advice_comes_with_what_to_paste(
    chosen: list[str],
    epoch_steps: int | None,
    said: str,
    files: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "advice.json"
    some = ["--strategies", "wagma", "--steps", "10", *chosen]
    main([*files, "--params", "1e6", "--ranks", "8", *some, "--output", str(output)])
    text = capsys.readouterr().out
    assert "8 ranks, 1,000,000 parameters" in text
    assert said in text
    assert "extrapolated: 8 ranks are more than the 4 that were probed" in text
    report = json.loads(output.read_text())
    claimed = set() if epoch_steps is None else {"no_sync, claimed", "wagma, claimed"}
    assert {row["strategy"] for row in report["rows"]} == {
        "no_sync", "allreduce", "wagma", *claimed,
    }  # fmt: skip
    assert report["settings"]["epoch_steps"] == epoch_steps
    assert f"Advice: {report['advised']}." in text
    assert report["advised"].startswith("wagma")
    assert ('WAGMAStrategy(data="claimed")' in text) == ("claimed" in report["advised"])


def test_predictions_are_compared_with_what_no_sync_shows_besides() -> None:
    machine = Machine(0.0, 1e12, 0.0, 1000, recorded=Recorded(((0.1,) * 9, (0.2,) * 9)))
    rates = {"no_sync": [4.0] * 3, "allreduce": [3.9, 4.0, 4.1]}
    for core_s in (0.0, 0.02):
        rows = verify.compare(["no_sync", "allreduce"], machine, 2, rates, core_s)
        assert [row["predicted"] for row in rows] == pytest.approx([4.0, 4.0])
        assert rows[0]["besides_s"] == pytest.approx(0.05 - core_s)
    assert "besides" not in verify.table(rows)
    assert "20.0 ms of a core, and 30.0 ms" in verify.table(rows)


def test_the_advised_one_is_verified_with_the_bound_and_all_reduce() -> None:
    names = ["no_sync", "adpsgd", "hpsgd", "sgp", "wagma", "allreduce"]
    rows = [Row(Candidate(n), 0.5 + i / 10, 1, 1, 1, None) for i, n in enumerate(names)]
    rows[3] = Row(Candidate("sgp", "claimed"), 0.6, 1, 1, 1, Cost(-0.1, 10, 10, 0.9))
    assert verify.specs_of(Ranking(rows, "random", {})) == [
        "no_sync", "allreduce", "sgp:data=claimed", "adpsgd", "hpsgd",
    ]  # fmt: skip
