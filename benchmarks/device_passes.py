"""How many bytes of a device's memory each strategy reads and writes for a weight in a step.

    python benchmarks/device_passes.py

Each rank has the emulated device of `tests/support/fake_device.py`, and an emulated NCCL, so that
the strategies' own code for devices runs, in all of their threads.  Every operation that is queued
counts what it reads and what it writes.  Not counted: what goes between host and device, what NCCL
does, and the training itself with its optimizer.  Weights are fp32.

The ranks step together, and nobody begins a step before all threads of all ranks are idle, as in a
training whose steps are long: else the count would depend on time.  Counted are `LEAST` steps or
more, in whole periods of a strategy that exchanges more seldom; a global average counts if it comes
every `LONGEST` steps or more often.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.utils._pytree import tree_flatten

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import script
from lightning_dsgd.algorithm import Conditions
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.algorithms.balanced import Balanced
from lightning_dsgd.data.units.balancing import USUAL_PARTS
from lightning_dsgd.lab.diagnose.passes import BYTES
from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.primitives.own_device import await_step
from lightning_dsgd.replica import flat
from tests.support.fake_device import FakeDevice, FakeTensor, parameters_allowed
from tests.transport.test_native_device import FakeNCCLWorld

RANKS: Final = 4
NUM_WEIGHTS: Final = 1 << 14
WARM_UP, LEAST, LONGEST = 3, 12, 20
_LOOK_S, _QUIET_LOOKS = 0.02, 5
"""Threads that have queued nothing in so many looks, all ranks together, are idle."""
_READS_NOTHING: Final = ("copy_", "fill_", "zero_")
"""How operations are called that do not read what they write to."""


def bytes_of(func: Any, args: Any, kwargs: dict[str, Any], made: list[Tensor]) -> int:
    """What an operation reads and writes of the device's memory."""
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    given = [
        *zip(schema.arguments, args, strict=False),
        *((spec, kwargs[spec.name]) for spec in schema.arguments if spec.name in kwargs),
    ]
    tensors = [x for _, value in given for x in tree_flatten(value)[0] if isinstance(x, Tensor)]
    comes_or_goes = name == "copy_" and not all(isinstance(x, FakeTensor) for x in tensors)
    is_in_place = name == "copy_" and args[0] is args[1]  # where torch does nothing
    if comes_or_goes or is_in_place or name.startswith("empty"):
        return 0
    moved = sum(map(_nbytes, made))
    for spec, value in given:
        is_written = spec.alias_info is not None and spec.alias_info.is_write
        is_read = not is_written or not (spec.kwarg_only or name.endswith(_READS_NOTHING))
        size = sum(_nbytes(x) for x in tree_flatten(value)[0] if isinstance(x, FakeTensor))
        moved += size * (is_written + is_read)
    return moved


def _nbytes(x: Tensor) -> int:
    """The bytes that a tensor has in memory: an expanded dimension has no others."""
    numel = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        numel *= size if stride else min(size, 1)
    return numel * x.itemsize


class Passes:
    """Counts what the threads of a rank queue, but for the training itself.

    Attributes:
        num_bytes: what was read and written so far
    """

    def __init__(self, fake: FakeDevice) -> None:
        self.num_bytes = 0
        self._trains = True
        self._trainer = threading.get_ident()
        self._note, self._lock = fake._note, threading.Lock()
        fake._note = self._count  # type: ignore[method-assign]

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any], made: list[Any]) -> None:
        if not (self._trains and threading.get_ident() == self._trainer):
            with self._lock:
                self.num_bytes += bytes_of(func, args, kwargs, made)
        self._note(func, args, kwargs, made)

    @contextlib.contextmanager
    def of_strategy(self) -> Iterator[None]:
        """Counts what the training thread queues meanwhile."""
        self._trains = False
        yield
        self._trains = True


class Replica:
    """One rank's weights, and the steps that a strategy makes of them.

    Args:
        net: the rank's transport
        fake: its device
        spec: the strategy
    """

    def __init__(self, net: Any, fake: FakeDevice, spec: str) -> None:
        self._net, self._fake = net, fake
        fake.longest_pause_s = 0.0  # its work is done as soon as it can be
        with parameters_allowed():
            self._parameter = Parameter(torch.zeros(NUM_WEIGHTS, device=fake.device))
            [self._weights] = flat.flatten([("weights", self._parameter)])
        self.algorithm: Any = make_algorithm(spec)
        counts = torch.ones(1, dtype=torch.int64)  # the one parameter has a gradient on all ranks
        self._counts = counts if self.algorithm.traits.counts_gradients else None
        conditions = Conditions(gradient_counts=self._counts)
        self.algorithm.start(net.sub(spec), self._weights.x, conditions)
        self.passes = Passes(fake)

    def step(self, number: int) -> None:
        """Makes a step, and waits until all ranks are idle."""
        if isinstance(self.algorithm, Balanced):
            self._sum_units(number)
        else:
            self._exchange()
        await_step(self._net, self._weights.x)
        queued, num_quiet = torch.tensor([-1]), 0
        while num_quiet < _QUIET_LOOKS:
            time.sleep(_LOOK_S)
            now = self._net.all_reduce(torch.tensor([self._fake.num_queued])).wait()
            num_quiet = num_quiet + 1 if now.equal(queued) else 0
            queued = now

    def _exchange(self) -> None:
        x, weights = self._weights.x, self._weights
        self._parameter.grad = torch.full_like(x, 1e-3)
        with self.passes.of_strategy():
            g = x[:0]
            if self.algorithm.traits.uses_gradient:
                g = weights.gather()
                if self._counts is not None:
                    self._counts.fill_(1)
                weights.scatter()
            self.algorithm.before_update(x, g)
        x.sub_(self._parameter.grad)
        with self.passes.of_strategy():
            self.algorithm.after_update(x)
        self._parameter.grad = None

    def _sum_units(self, number: int) -> None:
        num_units = self.algorithm.micro_batches or USUAL_PARTS
        # A batch that is not split is one of several that are accumulated.
        weights, scale = self._weights, 1 / max(2, num_units)
        for unit in range(num_units):
            gradient = torch.full_like(weights.x, 1e-3)
            with self.passes.of_strategy():
                self.algorithm.add(number, unit, weights.views, [gradient], scale)
        with self.passes.of_strategy():
            self.algorithm.close_step(number)
            weights.show(*self.algorithm.take_sum(number))
        weights.x.sub_(self._parameter.grad)
        self._parameter.grad = None

    def finish(self) -> None:
        """Ends the training."""
        self.algorithm.settle(self._weights.x)
        self.algorithm.finish(self._weights.x)


def steps_of(algorithm: Any) -> int:
    """How many steps are counted: whole periods."""
    period = getattr(algorithm, "sync_period", None) or 1
    if period > LONGEST:
        period = algorithm.traits.exchange_period
    return -(-LEAST // period) * period


def count(net: Any, fake: FakeDevice, specs: list[str]) -> list[float]:
    """Bytes a weight and step on this rank, of each strategy."""
    found = []
    for spec in specs:
        replica = Replica(net, fake, spec)
        steps = steps_of(replica.algorithm)
        warm_up = -(-WARM_UP // steps) * steps if steps > LEAST else WARM_UP
        for number in range(warm_up):
            replica.step(number)
        before = replica.passes.num_bytes
        for number in range(warm_up, warm_up + steps):
            replica.step(number)
        found.append((replica.passes.num_bytes - before) / steps / NUM_WEIGHTS)
        replica.finish()
        fake._note = replica.passes._note  # type: ignore[method-assign]
    return found


def counted(specs: list[str], ranks: int = RANKS) -> dict[str, float]:
    """Bytes a weight and step of each strategy, in the mean of the ranks."""
    of_ranks = FakeNCCLWorld(timeout_s=60.0).run(ranks, count, specs)
    return {
        spec: statistics.mean(of_rank[place] for of_rank in of_ranks)
        for place, spec in enumerate(specs)
    }


def ranks_for(spec: str) -> int:
    """How many ranks have several groups: where all are in one, NCCL sums."""
    return max(RANKS, 2 * (getattr(make_algorithm(spec), "group_size", None) or 0))


def main() -> None:
    args = script.parser(__doc__, "docs/results/gpus/device_passes.json").parse_args()
    rows = []
    for spec in BYTES:
        ranks = ranks_for(spec)
        found = round(counted([spec], ranks)[spec], 1)
        rows.append({"strategy": spec, "ranks": ranks, "bytes_a_weight": found})
        print(f'    "{spec}": {found},  # before: {BYTES[spec]}', flush=True)
    report = provenance() | {"kind": "count", "device": "emulated", "weights": NUM_WEIGHTS}
    report["hyperparameters"] = in_force(BYTES, [RANKS])
    write_result(report | {"rows": rows}, args.output)


if __name__ == "__main__":
    main()
