"""What every rank of a job does: all cells of the plan, one after the other.

Started as a file, and imports no more than the cells need: a rank that does not need torch is there
at once.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    """Measures, and leaves the results in the folder."""
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    rank = rank_of_this_process()
    plan = json.loads((folder / "plan.json").read_text())
    function = load(plan["function"])
    for index, cell in enumerate(plan["cells"]):
        result = function(cell, plan["settings"])
        part = folder / f"{index}.{rank}.json"
        new = part.with_suffix(".new")
        new.write_text(json.dumps(result))
        new.replace(part)
    dist = sys.modules.get("torch.distributed")  # not there unless a cell has needed torch
    if dist is not None and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def rank_of_this_process() -> int:
    """Returns this process's rank, as the launcher has numbered it."""
    for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        if name in os.environ:
            return int(os.environ[name])
    raise SystemExit("this process is no rank: its launcher has set no rank")


def load(reference: str) -> Any:
    """Returns what "module:name" or "file.py:name" stands for."""
    module, _, name = reference.rpartition(":")
    if not module.endswith(".py"):
        return getattr(importlib.import_module(module), name)
    spec = importlib.util.spec_from_file_location(Path(module).stem, module)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return getattr(loaded, name)


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules have common names
    main(Path(sys.argv[1]))
