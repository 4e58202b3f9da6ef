"""`lightning-dsgd bench report`."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dsgd.lab.bench import report


def test_a_report_of_a_file_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        report.main([str(tmp_path / "none.json"), "--output", str(tmp_path / "report")])
    assert end.value.code == 2
    assert "none.json" in capsys.readouterr().err
