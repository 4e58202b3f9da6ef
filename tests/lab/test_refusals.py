"""What the lab's commands cannot do is refused before a rank starts, with what to try."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.machines import MACHINES
from lightning_dsgd.cli import main
from lightning_dsgd.lab.simulate.model import run
from tests.support.refused import refused

REFUSED = {
    "timeline trace --output x.pdf": "--output must end with",
    "timeline trace --steps 5": "--steps must be two numbers",
    "timeline trace --steps 30:40": "--steps must be among those recorded, 1 to 12",
    "timeline trace --seconds 3:1": "--seconds must be two numbers",
    "timeline .": "record them with StepTrace",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a trace."""
    made = tmp_path_factory.mktemp("lab")
    run("wagma", 4, MACHINES["emulated-1gbit"], 12, trace=made / "trace")
    return made


@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_be_done_is_refused(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert REFUSED[command] in refused(main, command.split(), capsys)
