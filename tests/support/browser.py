"""A browser without a screen, where the machine has one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

OPTIONS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--virtual-time-budget=10000", "--allow-file-access-from-files",
]  # fmt: skip


def chromium(profile: Path, *args: str) -> subprocess.CompletedProcess[str]:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    return subprocess.run(
        [browser, *OPTIONS, f"--user-data-dir={profile}", *args],
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
