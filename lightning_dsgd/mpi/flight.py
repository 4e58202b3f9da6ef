"""Messages that MPI has begun to carry and not ended: their memory, and the requests for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from lightning_dsgd.devices import is_on_host
from lightning_dsgd.transport.messages import bytes_of
from lightning_dsgd.transport.mpi_job import load_mpi
from lightning_dsgd.transport.works import Sending

_CHUNK_BYTES: Final = 1 << 30
"""The most bytes of a chunk: counts of MPI before version 4 end at 2^31 - 1."""


@dataclass
class Arriving:
    """A message whose payload is on its way."""

    kind: int
    payload: Tensor
    is_claimed: bool
    num_chunks: int


@dataclass
class Leaving:
    """A message that MPI may still read, and its memory."""

    memory: list[Any]
    num_chunks: int
    sending: Sending | None = None


@dataclass
class InFlight:
    """The requests under way, and each one's message; only the wire's thread may touch them."""

    requests: list[Any] = field(default_factory=list)
    owners: list[Any] = field(default_factory=list)

    def add(self, request: Any, owner: Any) -> None:
        """Adds a request, which is one chunk of its owner, a message."""
        self.requests.append(request)
        self.owners.append(owner)

    def take_done(self) -> list[Any]:
        """Takes out and returns the messages whose last chunk is complete."""
        if not self.requests:
            return []
        done = load_mpi().Request.Testsome(self.requests)
        if not done:
            return []
        finished = []
        for index in done:
            self.owners[index].num_chunks -= 1
            if not self.owners[index].num_chunks:
                finished.append(self.owners[index])
        left = sorted(set(range(len(self.requests))).difference(done))
        self.requests = [self.requests[index] for index in left]
        self.owners = [self.owners[index] for index in left]
        return finished


def memory_of(x: Tensor) -> Any:
    """Returns the memory of a contiguous tensor, as mpi4py takes it."""
    return bytes_of(x) if is_on_host(x) else x.detach().view(torch.uint8)


def chunks_of(memory: Any) -> list[Any]:
    """Returns memory in pieces that MPI can count."""
    return [memory[at : at + _CHUNK_BYTES] for at in range(0, len(memory), _CHUNK_BYTES)]
