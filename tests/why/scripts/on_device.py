"""A loop in plain PyTorch with kernels and sums of an emulated device; SLOW names what is slow.

The weights are the CPU's, as torch's DDP takes no others here.  All that takes time is queued on
the device of `tests/support/fake_device.py`: kernels on its default stream, sums on another one, as
NCCL's.  The host waits for a copy alone, as for one from memory that is not pinned, and so for
the kernels before it.

kernel  rank 1's forward pass has a slow kernel
copies  rank 1's batches take long to come to the device
loader  rank 1's loader takes its time
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_dsgd.lab.timeline import unasked_loop
from tests.support import fake_device

SLOW = os.environ.get("SLOW", "")
STEPS, LONG_S = 40, 0.06
BACKWARD_S = 0.1 if SLOW == "nothing" else 0.025
"""Long, so that the 3 ms that a copy takes on a busy machine are no cause."""
FAKE = fake_device.install(longest_pause_s=0.0)
unasked_loop.device_of = lambda _: FAKE.device
SUMS = FAKE.new()


def long_s(what: str) -> float:
    """How much longer a rank takes for this."""
    return LONG_S if what == SLOW and dist.get_rank() == 1 else 0.0


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return STEPS * dist.get_world_size()

    def __getitem__(self, row: int) -> Tensor:
        time.sleep(long_s("loader"))
        return torch.ones(32)


class Kernels(torch.autograd.Function):
    """What a layer has the device do in its two passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        FAKE.spin(0.01 + long_s("kernel"))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        FAKE.spin(BACKWARD_S)
        return given[0]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return Kernels.apply(self.layer(x))


class Optimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        FAKE.spin(0.01)


class Over:
    """A future as NCCL's: it is there at once, and what follows is queued behind the sum."""

    def __init__(self, made: Tensor) -> None:
        self._made = made

    def value(self) -> Tensor:
        return self._made

    def then(self, follows: Any) -> Any:
        future: Any = torch.futures.Future()
        with FAKE.using(SUMS):
            future.set_result(follows(self))
        return future


def summed(_: Any, bucket: Any) -> Any:
    """A comm hook: the only piece is summed on a stream of its own, and the next kernels wait."""
    ready, piece = FAKE.mark(), bucket.buffer().clone()
    with FAKE.using(SUMS):
        ready.hold()
        SUMS.queue.put(lambda: dist.all_reduce(piece))
        over = FAKE.mark()
    over.hold()
    return Over(bucket.buffer())


def on_device(x: Tensor) -> Tensor:
    """Copies a batch, as from memory that is not pinned."""
    FAKE.spin(1e-3 + long_s("copies"))
    FAKE.synchronise("a copy")
    return x


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Model())
    model.register_comm_hook(None, summed)
    optimizer = Optimizer(model.parameters(), 0.01)
    for x in DataLoader(Rows(), sampler=DistributedSampler(Rows())):
        optimizer.zero_grad()
        model(on_device(x)).square().mean().backward()
        optimizer.step()
    FAKE.finish()
    assert not FAKE.failures, FAKE.failures[0]


main()
