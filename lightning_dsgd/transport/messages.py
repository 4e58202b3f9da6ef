"""What marks a message, on every transport, and whether it is the one that its receiver means.

    kind       a message of `send`, or the collective that it is a part of
    channel    which endpoint, or which group of which endpoint: a number made from its name
    tag        the caller's, or the number of the collective among its group's collectives

A receive names the channel and tag; the kind that comes tells whether the ranks agree.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import torch
from torch import Tensor

from lightning_dsgd.transport.contract import ANY, TransportError

KINDS: Final = (
    "message", "all_reduce", "all_gather", "broadcast", "barrier", "exchange", "push", "all_to_all"
)  # fmt: skip


def channel_id(*names: object) -> int:
    """Returns a number of 64 bits that is the same on every rank for the same names."""
    return int.from_bytes(
        blake2b(repr(names).encode(), digest_size=8).digest(), "little", signed=True
    )


def describe(path: str, src: int, tag: int, kind: int) -> str:
    """Says in words, for errors, what a receive waits for."""
    what = f"a message with tag {tag}" if kind == 0 else f"{KINDS[kind]} number {tag}"
    whom = "any rank" if src == ANY else f"rank {src}"
    return f"{what} from {whom}" + (f" [{path.strip('/')}]" if path else "")


def check_message(
    like: Tensor,
    into: Tensor | None,
    dtype: torch.dtype,
    numel: int,
    src: int,
    kinds: tuple[int, int],
) -> None:
    """Raises unless a message is what its receiver expects; `kinds` are (the message's, ours)."""
    if kinds[0] != kinds[1]:
        raise TransportError(
            f"the ranks disagree on what comes next: rank {src} calls {KINDS[kinds[0]]} "
            f"where this rank calls {KINDS[kinds[1]]}"
        )
    if dtype != like.dtype:
        raise TransportError(f"expected {like.dtype} from rank {src}, got {dtype}")
    if into is not None and numel != len(into):
        raise TransportError(
            f"expected {len(into)} elements from rank {src} in {KINDS[kinds[1]]}, got {numel}"
        )
