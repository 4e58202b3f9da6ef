"""What a remedy is: what it does, the line to paste, and how many times as fast the job would be.

The interval has 90% of what other stretches of the run give (blocks of steps are drawn again, 200
times), and 3% on both sides for what a model leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from lightning_dsgd.algorithms.allreduce import AllReduce
from lightning_dsgd.lab import decisions
from lightning_dsgd.lab.decisions import Choice
from lightning_dsgd.lab.diagnose.times import Times

MOST_PIECES: Final = AllReduce.num_buckets
_BLOCK: Final = 10
_DRAWS: Final = 200
MODEL: Final = 0.03
STRATEGIES: Final = {
    "balanced": "slow",
    "claimed": "slow",
    "wagma": "random",
    "int8": "network",
}
"""The remedies that take DDP's place, and the causes whose choice in `decisions` they are."""
_WHAT: Final = {
    "workers": "more loader workers",
    "ahead": "have loader workers do what hands a batch over to the device",
    "pinned": "copy batches from pinned memory, unless you do already, and let no host wait for it",
    "shared": "let all ranks validate equal shares",
    "freeze": "collect no garbage while training",
    "sorted": "put batches of like length into one step",
    "lighter": "do less between batches on the late ranks",
    "mended": "mend what makes these ranks slow, such as heat, other programs, or more work",
    "cores": "give each rank a core of its own",
}
"""What the remedies do that keep DDP, or FSDP."""


@dataclass(frozen=True)
class Remedy:
    """Tells what a remedy would gain.

    Args:
        name: its name, as at the heads of `remedies` and `in_ddps_place`
        what: what to do
        paste: the line to paste; empty where there is none
        gain: how many times as fast the job would be
        low: the lower end of the interval
        high: its upper end
        passes_s: what a strategy's passes over the slowest device's memory take; None: unknown
        is_asked: whether it is a strategy of which the user has asked
    """

    name: str
    what: str
    paste: str
    gain: float
    low: float
    high: float
    passes_s: float | None = 0.0
    is_asked: bool = False

    @property
    def is_strategy(self) -> bool:
        """Whether it is a strategy in DDP's place."""
        return self.name not in _WHAT


def chosen(name: str, num_ranks: int) -> Choice:
    """Returns the strategy that a remedy puts in DDP's place."""
    same_loss = name == decisions.BALANCED
    found = decisions.of_cause(STRATEGIES[name], num_ranks, same_loss=same_loss)
    assert found is not None
    return found


def spec_of(name: str, num_ranks: int, pieces: int = MOST_PIECES) -> str:
    """Returns the strategy that a remedy puts in DDP's place, with its settings."""
    spec = chosen(name, num_ranks).strategy
    if name != "int8" or pieces >= MOST_PIECES:
        return spec
    return spec.replace(":overlap=true", "") if pieces < 2 else f"{spec}:num_buckets={pieces}"


def paste_of(
    name: str, num_ranks: int, workers: int = 2, pieces: int = MOST_PIECES, units: int = 0
) -> str:
    """Returns the line to paste for a remedy; empty where there is none.

    Args:
        name: the remedy
        num_ranks: how many ranks there are
        workers: how many workers a loader needs
        pieces: in how many pieces a gradient is worth being sent
        units: into how many micro-batches a batch is split; 0: as the strategy has it
    """
    if name in STRATEGIES:
        spec, data = spec_of(name, num_ranks, pieces), chosen(name, num_ranks).data
        spec += f":micro_batches={units}" if units else ""
        return f"L.Trainer(strategy={decisions.code(spec, data)}, ...)"
    return {
        "workers": f"DataLoader(..., num_workers={workers}, persistent_workers=True)",
        "ahead": "DataLoader(..., collate_fn=..., num_workers=2)    # and collate_fn does it",
        "pinned": "DataLoader(..., pin_memory=True)",
        "shared": "val_dataloaders with a DistributedSampler; none with work for rank 0 alone",
        "freeze": "gc.collect(); gc.freeze(); gc.disable()    # before trainer.fit",
        "sorted": "DataLoader(..., batch_sampler=...)    # that draws batches of like length",
        "lighter": "L.Trainer(log_every_n_steps=500, ...)    # and callbacks that do less",
        "mended": "",
        "cores": "",
    }[name]


def what_of(name: str, num_ranks: int, pieces: int = MOST_PIECES) -> str:
    """Says what a remedy does."""
    if name == "int8" and pieces < 2:
        return "send one byte per entry, in one piece: the gradient is small"
    if name in STRATEGIES:
        why = chosen(name, num_ranks).why.rstrip(".")
        return why[0].lower() + why[1:]
    return _WHAT[name]


def drawn(name: str, times: Times, ddp: Tensor, other: Tensor, **pasted: int) -> Remedy:
    """Compares two times of each step, and draws blocks of steps anew for the interval."""
    num_steps, source = len(ddp), torch.Generator().manual_seed(0)
    long = min(_BLOCK, num_steps)
    begins = torch.randint(num_steps, (_DRAWS, -(-num_steps // long), 1), generator=source)
    steps = ((begins + torch.arange(long)) % num_steps).flatten(1)[:, :num_steps]
    ratios = ddp[steps].mean(-1) / other[steps].mean(-1)
    low, high = ratios.quantile(torch.tensor([0.05, 0.95], dtype=torch.float64)).tolist()
    gain = float(ddp.mean() / other.mean())
    return Remedy(
        name,
        what_of(name, times.num_ranks, pasted.get("pieces", MOST_PIECES)),
        paste_of(name, times.num_ranks, **pasted),
        gain,
        low * (1 - MODEL),
        high * (1 + MODEL),
    )
