"""The doors to the wings: what the core loads by name, when a user asks for it.

A wing stands on the core.  The core imports none of them and works without each: this table is the
only place that names one, and `load` says what is missing where a wing has been left out.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final

WINGS: Final = {
    "simulated": "runs P ranks in one process on a virtual clock",
    "mpi": "carries messages by MPI",
    "why": "names the rank, the line and the cause where a job is stuck or slow",
    "lab": "measures, predicts and draws trainings",
    "sharded": "trains replicas that several ranks hold together",
    "elastic": "lets training go on where ranks are lost, join or leave",
}
"""Each wing, a folder of the package, and what it does."""
COMMANDS: Final = {
    "strategies": "lab.strategies",
    "doctor": "lab.doctor",
    "recipes": "lab.recipes",
    "timeline": "lab.drawing.command",
    "launch": "elastic.launch.command",
    "why": "why.command",
}
"""The commands of `lightning-dsgd` that a wing carries out, and the module whose `main` does."""


class WingMissing(ImportError):
    """This installation lacks the wing that was asked for."""


def load(module: str, asked_for: str) -> ModuleType:
    """Imports and returns a module of the package; an error names what the user has asked for."""
    try:
        return importlib.import_module(f"lightning_dsgd.{module}")
    except ModuleNotFoundError as error:
        wing = module.partition(".")[0]
        if wing not in WINGS or error.name != f"lightning_dsgd.{wing}":
            raise
        raise WingMissing(
            f"{asked_for} needs the folder lightning_dsgd/{wing}, which {WINGS[wing]}, and this "
            "installation lacks it; install the whole package"
        ) from error
