"""What ranks measure that share a GPU, each with NCCL as if on a node of its own (`NCCL_HOSTID`).

    added        what each strategy adds to a step of DDP's, with few weights
    straggler    steps of the others while one rank's products of matrices fill the device
    memory       the peak of a rank with many weights, beside what `num_copies` says; what a
                 communicator takes

**What must not be concluded.**  NCCL sends by a socket here, and the ranks' kernels take turns on
one device.  So figures of `added` are fixed costs and passes over memory, and those of `straggler`
say who waits for whom.  No ratio of bandwidths, and no step time, is that of ranks with a GPU each.

One job of lasting ranks measures all strategies, one after another.  Where one fails, new ranks go
on with the next.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.sharedctypes import RawValue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.on_gpu.apart import Row, tell
from benchmarks.on_gpu.place import LONGEST_S, Busy, Place, finish
from lightning_dsgd import decentralized, devices
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.lab import accelerators

ADDED = (
    "balanced",
    "ddp",
    "wagma:overlap=true",
    "wagma",
    "popsgd",
    "allreduce",
    "local_sgd",
    "diloco",
    "allreduce:overlap=true",
    "sgp:overlap=1",
    "sgp",
    "hpsgd",
    "adpsgd",
    "dpsgd",
    "oktopk",
)
LATE = ("balanced", "wagma:sync_period=1000", "popsgd", "allreduce", "wagma:overlap=true")
MEMORY = (
    "no_sync",
    "balanced",
    "allreduce",
    "wagma",
    "wagma:overlap=true",
    "popsgd",
    "sgp",
    "diloco",
)
QUEUES = (32, 1, 8)
"""Hardware queues of a process."""
WARM_UP = 4


@dataclass(frozen=True)
class Work:
    """What a rank does in a training.

    Args:
        width: of each layer
        depth: the number of layers
        products: how many products of matrices a micro-batch has beside its layers
        steps: how many steps
        units: micro-batches of a step
        slower: how many times as many products the last rank's micro-batches have
        side: of the matrices
        what: "time" or "memory", which is told
    """

    width: int
    depth: int
    products: int
    steps: int
    units: int = 1
    slower: int = 1
    side: int = 4096
    what: str = "time"


# ---- parts ----


def added(place: Place) -> Iterator[Row]:
    """Two ranks; 3 million weights, of which a sum takes little, and much computing."""
    work = place.size(Work(1024, 3, 60, 40), Work(16, 3, 2, 6, side=32))
    yield from measured(place, 2, place.size(ADDED, ADDED[:4]), work)


def straggler(place: Place) -> Iterator[Row]:
    """Four ranks, of which the last has eight times as many products."""
    work = Work(1024, 3, 10, 20, units=4, slower=8)
    work = place.size(work, Work(16, 3, 2, 6, units=2, slower=8, side=32))
    for queues in place.size(QUEUES, QUEUES[:1]):
        os.environ[devices.CONNECTIONS] = str(queues)
        for row in measured(place, 4, place.size(LATE, LATE[:2]), work):
            yield {"connections": queues, **row}


def memory(place: Place) -> Iterator[Row]:
    """Two ranks, 100 million weights; `copies` is the peak above what was there, in weights."""
    work = Work(4096, 6, 0, 8, what="memory")
    work = place.size(work, Work(16, 3, 0, 6, side=32, what="memory"))
    yield from measured(place, 2, place.size(MEMORY, MEMORY[:3]), work)
    yield from run(place, 2, communicators, place)


# ---- jobs ----


def measured(place: Place, num_ranks: int, specs: Sequence[str], work: Work) -> Iterator[Row]:
    """Has ranks train with each strategy; they tell rows, and errors are yielded."""
    while specs:
        num_done = RawValue("i", 0)
        failed = list(run(place, num_ranks, train_all, place, specs, work, num_done))
        for row in failed:
            yield {"strategy": specs[min(num_done.value, len(specs) - 1)], **row}
        specs = specs[num_done.value + 1 :] if failed else []


def run(place: Place, num_ranks: int, fn: Callable[..., None], *args: Any) -> Iterator[Row]:
    """Runs a function on ranks; yields the error of each that fails."""
    for rank, outcome in enumerate(place.faces().outcomes(num_ranks, fn, *args)):
        if outcome.error:
            yield {"rank": rank, "error": outcome.error}


def train_all(place: Place, specs: Sequence[str], work: Work, num_done: Any) -> None:
    """What a rank does: it trains with one strategy after another."""
    device = place.device()
    rank = dist.get_rank()
    for number, spec in enumerate(specs):
        row = {"strategy": spec, "rank": rank, **trained(spec, work, device)}
        if work.what == "time" or rank == 0:
            tell(row)
        dist.barrier()
        if rank == 0:
            num_done.value = number + 1
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def trained(spec: str, work: Work, device: torch.device) -> Row:
    """Trains with one strategy."""
    torch.manual_seed(0)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    products = work.products * (work.slower if rank == world_size - 1 else 1)
    model = Network(work, products, device).to(device)
    num_weights = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    times = accelerators.times_of(device)
    marks = []
    before = Peak(device)

    def step(batches: Iterable[Tensor], computed: nn.Module) -> None:
        optimizer.zero_grad()
        for x in batches:
            computed(x).square().mean().backward()
        optimizer.step()
        marks.append(times.mark())

    loop(spec, work, model, optimizer, device, step)
    finish(device)
    if work.what == "memory":
        said = make_algorithm(spec).num_copies(world_size, on_device=True)
        told = {"said": said if math.isfinite(said) else None}
        return {"weights": num_weights, **told, **before.grown(4 * num_weights)}
    ends = times.seconds(marks)
    assert ends is not None
    took_ms = [1e3 * (b - a) for a, b in pairwise(ends[WARM_UP - 1 :])]
    return {
        "median_ms": statistics.median(took_ms),
        "mean_ms": statistics.mean(took_ms),
        "worst_ms": max(took_ms),
        "steps": len(marks),
        "all_s": ends[-1] - ends[0],
    }


def loop(
    spec: str,
    work: Work,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    step: Callable[[Iterable[Tensor], nn.Module], None],
) -> None:
    """A user's loop, in DDP or in `decentralized`."""
    x = torch.randn(16, work.width, device=device)
    if spec == "ddp":
        computed = nn.parallel.DistributedDataParallel(model)
        for _ in range(work.steps):
            step([x] * work.units, computed)
        return
    with decentralized(model, optimizer, make_algorithm(spec), timeout_s=LONGEST_S) as replica:
        if spec.startswith("balanced"):
            batches = torch.utils.data.DataLoader(Same(x, work.steps * work.units), None)
            for some in replica.steps(batches, accumulate=work.units):
                step(some, model)
        else:
            for _ in replica.batches(range(work.steps)):
                step([x] * work.units, model)


class Same(torch.utils.data.Dataset[Tensor]):
    """So many times the same batch, which is on its device already."""

    def __init__(self, x: Tensor, length: int) -> None:
        self._x, self._length = x, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tensor:
        if index >= self._length:
            raise IndexError(index)
        return self._x


class Network(nn.Module):
    """Layers, with products of matrices between them: a third forward, the others backward."""

    def __init__(self, work: Work, products: int, device: torch.device) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(work.width, work.width) for _ in range(work.depth))
        self.busy = Busy(device, work.side) if products else None
        self.forward_products = math.ceil(products / 3 / work.depth)
        self.backward_products = math.ceil(2 * products / 3 / work.depth)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.busy is not None:
                x = _Products.apply(x, self.busy, self.forward_products, self.backward_products)
        return x


class _Products(torch.autograd.Function):
    """Is the identity; its passes queue products of matrices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, busy: Busy, forward: int, backward: int) -> Tensor:
        ctx.busy, ctx.products = busy, backward
        busy(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Any:
        ctx.busy(ctx.products)
        return (*g, None, None, None)


# ---- memory ----


class Peak:
    """How much memory of the device this process has taken since; nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_told = device.type == "cuda"
        if self._is_told:
            torch.cuda.reset_peak_memory_stats()
            self._allocated = torch.cuda.memory_allocated()
            self._reserved = torch.cuda.memory_reserved()

    def grown(self, unit: int) -> Row:
        """Returns the growth, in bytes, and in units of so many."""
        if not self._is_told:
            return {}
        allocated = torch.cuda.max_memory_allocated() - self._allocated
        reserved = torch.cuda.max_memory_reserved() - self._reserved
        return {
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
            "copies": allocated / unit,
            "reserved_copies": reserved / unit,
        }


def communicators(place: Place) -> None:
    """Tells what all ranks together take of the device for sums, a second communicator, pairs."""
    device, rank = place.device(), dist.get_rank()
    x = torch.ones(1 << 20, device=device)

    def free() -> int:
        finish(device)
        dist.barrier()
        return torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0

    def exchange() -> None:
        peer = 1 - rank
        calls = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, x.clone(), peer)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()

    dist.all_reduce(x)
    kinds: dict[str, Callable[[], object]] = {
        "a second communicator": lambda: dist.all_reduce(x, group=dist.new_group([0, 1])),
        "a third communicator": lambda: dist.all_reduce(x, group=dist.new_group([0, 1])),
        "exchanges of a pair": exchange,
    }
    for name, make in kinds.items():
        before = free()
        make()
        if rank == 0:
            tell({"what": name, "bytes_of_all_ranks": before - free()})
        else:
            free()
