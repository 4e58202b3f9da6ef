"""The help of the lab's commands."""

from __future__ import annotations

import pytest

from lightning_dsgd.cli import main

EXAMPLES = {
    "strategies": "    lightning-dsgd strategies wagma",
    "timeline": "    lightning-dsgd timeline run/ --output timeline.html",
    "why": "    lightning-dsgd why run/ --json",
}


@pytest.mark.parametrize("command", EXAMPLES)
def test_each_example_of_a_help_has_its_own_line(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert EXAMPLES[command] in capsys.readouterr().out.splitlines()
