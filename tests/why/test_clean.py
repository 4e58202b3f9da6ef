"""Clean runs give no alarm."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.why.jobs import ROOT


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_no_clean_run_is_called_stuck() -> None:
    """`python -m tests.why.clean` tries all kinds with more ranks too."""
    command = [sys.executable, "-m", "tests.why.clean", "", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    counts = re.search(r"^(\d+) clean runs, 0 with an alarm, 0 failed", done.stdout, re.MULTILINE)
    assert counts is not None, done.stdout + done.stderr
    assert int(counts[1]) >= 30
