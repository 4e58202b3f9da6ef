"""What a strategy's passes over a device's memory take of a step: copies, sums, publications.

    seconds = bytes a weight * weights / bytes a second

`BYTES` is counted on an emulated device (`benchmarks/device_passes.py`): what each strategy reads
and writes there, in all of its threads, where nobody is late.  The bytes a second are those of a
copy that each rank has timed on its own device when its trace began.  What NCCL does is no pass: it
belongs to the link.

**MODEL**, which has not run on a GPU: the passes make every step of a rank longer by their seconds.
Those of the training thread stand in the stream that trains; those of lanes run beside it, and take
memory from its kernels.  Kernels that leave memory alone would hide them: an interval's upper end
is for passes that cost nothing.

DDP's own passes, over its buckets, are in the recorded steps, and stay there.  On CPUs what the
strategies take is known in other figures (`in_ddps_place`, `Machine.costs`), and nothing is added.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.lab.diagnose.times import Times

BYTES: Final = {
    "balanced:micro_batches=4": 60.0,
    "balanced:micro_batches=8": 108.0,
    "balanced:micro_batches=1": 24.0,
    "allreduce": 16.0,
    "allreduce:overlap=true": 16.0,
    "allreduce:wire_dtype=int8": 167.6,
    "allreduce:wire_dtype=int8:overlap=true": 167.6,
    "wagma": 48.0,
    "wagma:overlap=true": 48.0,
    "wagma:overlap=true:group_period=2": 28.0,
    "wagma:overlap=true:group_period=4": 18.0,
    "wagma:overlap=true:group_size=8": 51.8,
    "wagma:overlap=true:sync_period=10:wire_dtype=int8": 258.5,
    "popsgd": 61.5,
    "adpsgd": 48.8,
    "hpsgd": 48.0,
    "hpsgd:wire_dtype=int8": 231.6,
    "sgp": 28.0,
    "sgp:overlap=1": 56.0,
    "dpsgd": 32.0,
    "eager_sgd": 56.0,
    "local_sgd": 4.0,
    "local_sgd:sync_period=8": 1.0,
}
"""For each strategy, with its options, the bytes that it reads and writes for a weight in fp32, in
a step.
"""


def seconds(times: Times, spec: str) -> Tensor | None:
    """Returns what a strategy's passes take of each rank's step: [P]; None: unknown.

    Args:
        times: of DDP
        spec: the strategy, with its options
    """
    if not times.is_on_device:
        return torch.zeros(times.num_ranks, dtype=torch.float64)
    num_bytes, rates = bytes_a_weight(spec), times.memory_bytes_s
    if num_bytes is None or rates is None:
        return None
    moved = num_bytes * times.num_parameters
    return torch.tensor(rates, dtype=torch.float64).reciprocal() * moved


def bytes_a_weight(spec: str) -> float | None:
    """Returns what is counted for a strategy with these options; None if nobody has counted."""
    asked = make_algorithm(spec)
    for counted, num_bytes in BYTES.items():
        algorithm = make_algorithm(counted)
        if (algorithm.name, algorithm.hyperparameters()) == (asked.name, asked.hyperparameters()):
            return num_bytes
    return None
