"""The ranks of a probe: how they meet, and what they measure one after the other.

Lightning knows every launcher, so a strategy of this package opens the network, as for a training.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import lightning as L
import torch.distributed as dist

from lightning_dsgd.lab.probe import measure
from lightning_dsgd.trainer.named import STRATEGIES

NUM_RANKS: Final = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_ON_THIS_NODE: Final = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


_TIMEOUT_S: Final = 120.0


def launched() -> int:
    """Returns how many ranks a launcher has started; 0 if none has."""
    for name in NUM_RANKS:
        if name in os.environ:
            return int(os.environ[name])
    return 0


def _on_this_node(num_ranks: int) -> int:
    for name in _ON_THIS_NODE:
        if name in os.environ:
            return int(os.environ[name])
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    return num_ranks // nodes


@cache
def join(num_ranks: int, accelerator: str) -> Any:
    """Returns the strategy whose network is open; once for a process."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    devices = max(1, _on_this_node(num_ranks))
    strategy: Any = STRATEGIES["no_sync"]
    trainer = L.Trainer(
        strategy=strategy(timeout_s=_TIMEOUT_S),
        accelerator=accelerator,
        devices=devices,
        num_nodes=max(1, num_ranks // devices),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.strategy.setup_environment()
    return trainer.strategy


def stages(num_ranks: int, accelerator: str) -> Iterator[tuple[str, measure.Found]]:
    """Measures, and yields the name of the next stage with what was found last."""
    yield "joining", {}
    strategy = join(num_ranks, accelerator)
    net, device = strategy.session.net.sub("probe"), strategy.root_device
    yield "places", {}
    found = measure.places(net, device) | {"transport": net.wire.name.split()[0]}
    spots = found["places"]
    yield "adding and selecting", found
    found = measure.selection(net, device)
    yield "processor", found
    found = measure.processor(net)
    pairs = []
    for a, b in measure.pairs_of(spots):
        yield f"ranks {a} and {b}", found
        found = measure.pair(net, a, b)
        pairs.append(found)
    for shift in sorted({1, measure.shift_between(spots)}):
        if shift < num_ranks:
            yield "all at once", found
            found = measure.together(net, shift, min(p["bandwidth_bytes_s"] for p in pairs))
    yield "all-reduce", found
    found = measure.all_reduce(net, device)
    yield "strategies", found
    found = measure.steps(net, device, min((p["bandwidth_bytes_s"] for p in pairs), default=0.0))
    yield "", found
    strategy.session.leave()


def leave() -> None:
    """Ends the process group that joined the processes."""
    if dist.is_initialized():
        dist.destroy_process_group()


def run(cell: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Runs all stages, on a rank that `bench.job` has started; returns what rank 0 has found."""
    from lightning_dsgd.lab.progress import of_stages

    found = of_stages(stages(settings["ranks"], "cpu"), is_shown=os.environ["RANK"] == "0")
    return {"found": found}
