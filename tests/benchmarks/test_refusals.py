"""What the measurements of strategies side by side refuse, and their list."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import COMPARE, main, scripts
from benchmarks.compare import target
from lightning_dsgd.lab.results import write_result
from tests.support.refused import refused

REFUSED = {
    "thruput": "got 'thruput'; did you mean throughput?",
    "throughput --strategies ddp,wagmaa": "got 'wagmaa'; did you mean wagma?",
    "throughput --strategies wagma:group_sizes=2": "has no option group_sizes, got group_sizes=2",
    "throughput --strategies wagma:overlap=no": "must be True or False, got overlap='no'",
    "throughput --strategies wagma:group_size=8": "got group_size=8 with world_size=4",
    "throughput --ranks 0": "--ranks must be at least 1, got --ranks 0",
    "throughput --ranks 1 --delayed-ranks 2": "got --delayed-ranks 2 with --ranks 1",
    "throughput --network fast": "got 'fast'; try 1gbit or 10gbit,1ms",
    "throughput --strategies ddp,hivemind:period=2": "which is not installed; install it",
    "throughput --delay-on device": "--delay-on device needs --device cuda, got --device cpu",
    "convergence --strategies ddp,wagmaa": "got 'wagmaa'; did you mean wagma?",
    "convergence --wandb project": "--wandb needs the package wandb, which is not installed",
    "target --strategies wagma": "must have allreduce",
    "target --strategies allreduce,popsgdd": "did you mean popsgd?",
    "target --situations rain": "--situations must be of slow-link",
    "target --seeds 0": "at least 1",
    "target --tuning-seeds -1": "at least 0",
    "target --data claimed": "must be equal or equal,claimed",
    "target --data equal,claimed": "got it with one endless epoch; try --epoch-steps 30",
    "target --epoch-steps 0": "--epoch-steps must be at least 1",
    "target --baseline sgp:overlap=1 --strategies allreduce": "must have sgp:overlap=1",
    "target --lrs much": "0.1,0.2,0.4",
    "target --stretch 0.5,2": "--stretch must hold 1",
    "target --jobs 0": "--jobs must be at least 1",
    "target --jobs 2 --real-ms 200": "1 with --real-ms",
    "target --real-ms 0": "--real-ms must be positive, got --real-ms 0.0; try 200",
    "target --real-ms 200 --task resnet": "--real-ms needs a network without BatchNorm",
    "report none.json": "none.json",
    "report other.json": "other.json is another kind of file",
}
if not torch.cuda.is_available():
    REFUSED["throughput --device cuda"] = "cuda needs a GPU, got none that torch"


@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_be_done_is_refused(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_result({"format": "of another program"}, tmp_path / "other.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(target, "why_not", lambda: "")
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert REFUSED[command] in refused(main, command.split(), capsys)


def test_the_list_names_every_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in [*COMPARE, *scripts()])
    assert "storm" in scripts()
