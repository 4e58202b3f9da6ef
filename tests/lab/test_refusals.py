"""What the lab's commands cannot do is refused before a rank starts, with what to try."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dsgd.cli import main
from lightning_dsgd.lab.results import write_result
from lightning_dsgd.lab.simulate.machines import MACHINES
from lightning_dsgd.lab.simulate.model import run
from tests.lab.probe.test_measure import everything, measure

REFUSED = {
    "simulate --strategies wagmas": "must be one of balanced, wagma, eager_sgd",
    "simulate --strategies oktopk:density=2": "density must be None or a number above 0",
    "simulate --steps 0": "the number of ranks and of steps must be at least 1",
    "simulate --ranks 4 --delayed-ranks 5": "at most the number of ranks",
    "simulate --delay-ms -1": "delay_s must not be negative, got delay_s=-0.001",
    "simulate --epoch-steps 0": "--epoch-steps must be at least 1",
    "simulate --data claimed": "got it with one endless epoch; try --epoch-steps 30",
    "simulate --check missing.json": "No such file",
    "probe --ranks 1": "--ranks must be at least 2, got 1",
    "probe --ranks 2 --accelerator cuda": "--accelerator must be cpu with --ranks",
    "probe --network fast": "network must be a rate",
    "advise cluster.json --trace trace": "--params must be given where the trace does not say",
    "advise cluster.json --trace trace --params 1e6 --ranks 1": "--ranks must be at least 2",
    "advise cluster.json --trace trace --params 1e6 --epoch-steps 0": "--epoch-steps must be at ",
    "advise cluster.json --trace trace --params 1e6 --strategies wagam": "--strategies must be "
    "among adpsgd",
    "advise none.json --trace trace": "none.json must be a file of `lightning-dsgd probe "
    "--output`, got none; `lightning-dsgd probe --ranks 4 --output none.json` writes one",
    "timeline trace --output x.pdf": "--output must end with",
    "timeline trace --steps 5": "--steps must be two numbers",
    "timeline trace --steps 30:40": "--steps must be among those recorded, 1 to 12",
    "timeline trace --seconds 3:1": "--seconds must be two numbers",
    "timeline .": "record them with StepTrace",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a file of the probe, and a trace."""
    made = tmp_path_factory.mktemp("lab")
    write_result(measure.cluster(everything("abcd")).to_json(), made / "cluster.json")
    run("wagma", 4, MACHINES["emulated-1gbit"], 12, trace=made / "trace")
    return made


@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_be_done_is_refused(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as end:
        main(command.split())
    assert end.value.code == 2
    assert REFUSED[command] in capsys.readouterr().err
