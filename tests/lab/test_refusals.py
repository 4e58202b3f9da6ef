"""What the lab's commands cannot do is refused before a rank starts, with what to try."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from lightning_dsgd.cli import main
from lightning_dsgd.lab.bench import target
from lightning_dsgd.lab.results import write_result
from lightning_dsgd.lab.simulate.machines import MACHINES
from lightning_dsgd.lab.simulate.model import run
from tests.lab.probe.test_measure import everything, measure

REFUSED = {
    "bench throughput --strategies ddp,wagmaa": "got 'wagmaa'; did you mean wagma?",
    "bench throughput --strategies wagma:group_sizes=2": "has no option group_sizes, got "
    "group_sizes=2",
    "bench throughput --strategies wagma:overlap=no": "must be True or False, got overlap='no'",
    "bench throughput --strategies wagma:group_size=8": "got group_size=8 with world_size=4",
    "bench throughput --ranks 0": "--ranks must be at least 1, got --ranks 0",
    "bench throughput --ranks 1 --delayed-ranks 2": "got --delayed-ranks 2 with --ranks 1",
    "bench throughput --network fast": "got 'fast'; try 1gbit or 10gbit,1ms",
    "bench throughput --strategies ddp,hivemind:period=2": "which is not installed; install it",
    "bench throughput --delay-on device": "--delay-on device needs --device cuda, got --device cpu",
    "bench convergence --strategies ddp,wagmaa": "got 'wagmaa'; did you mean wagma?",
    "bench convergence --wandb project": "--wandb needs the package wandb, which is not installed",
    "bench target --strategies wagma": "must have allreduce",
    "bench target --strategies allreduce,popsgdd": "did you mean popsgd?",
    "bench target --situations rain": "--situations must be of slow-link",
    "bench target --seeds 0": "at least 1",
    "bench target --tuning-seeds -1": "at least 0",
    "bench target --data claimed": "must be equal or equal,claimed",
    "bench target --data equal,claimed": "got it with one endless epoch; try --epoch-steps 30",
    "bench target --epoch-steps 0": "--epoch-steps must be at least 1",
    "bench target --baseline sgp:overlap=1 --strategies allreduce": "must have sgp:overlap=1",
    "bench target --lrs much": "0.1,0.2,0.4",
    "bench target --stretch 0.5,2": "--stretch must hold 1",
    "bench target --jobs 0": "--jobs must be at least 1",
    "bench target --jobs 2 --real-ms 200": "1 with --real-ms",
    "bench target --real-ms 0": "--real-ms must be positive, got --real-ms 0.0; try 200",
    "bench target --real-ms 200 --task resnet": "--real-ms needs a network without BatchNorm",
    "bench report none.json": "none.json",
    "bench report cluster.json": "cluster.json is another kind of file",
    "simulate --strategies wagmas": "must be one of wagma, eager_sgd",
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
if not torch.cuda.is_available():
    REFUSED["bench throughput --device cuda"] = "cuda needs a GPU, got none that torch"


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
    monkeypatch.setattr(target, "why_not", lambda: "")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit) as end:
        main(command.split())
    assert end.value.code == 2
    assert REFUSED[command] in capsys.readouterr().err
