"""What tests of the benchmark harness share."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

from lightning_dsgd.lab.jobs import job
from tests.support.ports import free_port


def run_bench(what: Any, output: Path, options: str) -> dict[str, Any]:
    """At ports that no other worker of pytest takes before the ranks do."""
    with mock.patch.object(job, "_free_port", free_port):
        what.main([*options.split(), "--output", str(output)])
    return dict(json.loads(output.read_text()))


def namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"dsgd{pid}-")]
