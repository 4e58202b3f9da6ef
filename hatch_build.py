"""Has the build write what editors and type checkers see of the strategies: see docs/stub.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Stubs(BuildHookInterface):  # type: ignore[type-arg]
    """For wheels, and for installations that are editable."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Writes the stubs, and has the wheel carry them; git does not keep them."""
        # Without site-packages: what is installed where the package is built changes nothing.
        command = [sys.executable, "-S", str(Path(self.root, "docs", "stub.py"))]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            self.app.display_warning(f"editors will not see the strategies' options: {done.stdout}")
        else:
            build_data["artifacts"] += done.stdout.split()
