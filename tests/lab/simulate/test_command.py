"""`lightning-dsgd simulate`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_dsgd import cli


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--algorithms wagmas", "must be one of wagma, eager_sgd"),
        (
            "--algorithms wagma:group_size=8 --ranks 4",
            "group_size must be at least 1 and no larger",
        ),
        ("--algorithms oktopk:density=2", "density must be None or a number above 0"),
        ("--ranks 0", "the number of ranks and of steps must be at least 1"),
        ("--steps 0", "the number of ranks and of steps must be at least 1"),
        ("--ranks four", "invalid literal"),
        ("--ranks 4 --delayed-ranks 5", "at most the number of ranks"),
        ("--delay-ms -1", "delay_s must not be negative, got delay_s=-0.001"),
        ("--epoch-steps 0", "--epoch-steps must be at least 1"),
        ("--data claimed", "got it with one endless epoch; try --epoch-steps 30"),
        ("--profile cray", "invalid choice: 'cray'"),
        ("--check missing.json", "No such file"),
    ],
)
def test_bad_input(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["simulate", *arguments.split()])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_nothing_that_simulates_imports_lightning(tmp_path: Path) -> None:
    """A console script, whose package loads nothing by itself."""
    code = f"""
import sys
sys.argv[0] = "/somewhere/bin/lightning-dsgd"
from lightning_dsgd.cli import main
main("simulate --algorithms wagma --ranks 2 --steps 2 --output {tmp_path}/r.json".split())
loaded = {{"lightning", "pytorch_lightning", "lightning_dsgd.trainer"}} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250, capture_output=True)
    assert json.loads((tmp_path / "r.json").read_text())["rows"][0]["algorithm"] == "wagma"
