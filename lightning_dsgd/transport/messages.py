"""What marks a message, whether it is the one that its receiver means, and its form as bytes.

    kind       a message of `send`, the collective that it is a part of, or which news
    channel    which endpoint, or which group of which endpoint: a number made from its name
    tag        the caller's, or the number of the collective among its group's collectives

A receive names the channel and tag, which are a mailbox; the kind that comes tells whether the
ranks agree.  This holds on every transport.

Between processes a message is a header, with these three and what the payload is (dtype, nbytes),
and the payload.  News are the mesh's: heartbeat, farewell (the sender needs nobody any more), the
loss of a rank, the agreement on who goes on after one, and what may lie at a rank (`memory`).

What a lane tells another is the payload of a message; its kinds stand beside the lane.
"""

from __future__ import annotations

import os
import struct
from hashlib import blake2b
from typing import Final

import torch
from torch import Tensor

from lightning_dsgd.transport.contract import ANY, TransportError

KINDS: Final = (
    "message", "all_reduce", "all_gather", "broadcast", "barrier", "exchange", "push", "all_to_all"
)  # fmt: skip
HEADER: Final = struct.Struct("<qqQBB")  # channel, tag, nbytes, kind, code of the dtype
HELD, ASKED, TAKEN, AGREEMENT, HEARTBEAT, FAREWELL, LOST = range(249, 256)  # kinds of news
_FIRST_NEWS: Final = HELD
MAILBOX: Final = struct.Struct("<qq")  # the first two of them
DTYPES: Final = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
CODES: Final = {dtype: code for code, dtype in enumerate(DTYPES)}
FROM_DEVICE: Final = 128
"""Marks, with the code of the dtype, a message of MPI's from a device, most likely to another."""
_LONGEST_NEWS: Final = 1 << 20
MEMORY_BYTES: Final = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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


def from_device(header: bytes) -> bytes:
    """Returns the header, marked as that of a message from a device's memory."""
    return header[:-1] + bytes([header[-1] | FROM_DEVICE])


def is_news(kind: int) -> bool:
    """Returns whether a message of this kind is for the mesh, and not for a mailbox."""
    return kind >= _FIRST_NEWS


def why_no_message(nbytes: int, kind: int, code: int, most: int) -> str:
    """Returns why a header announces no message; an empty text if it announces one.

    Asked before memory is taken: the sender may be another version, or its memory damaged.

    Args:
        nbytes: the length that the header tells
        kind: the message's kind
        code: the code of its dtype
        most: how many bytes a message to this rank may have
    """
    is_known = is_news(kind) or (kind < len(KINDS) and code < len(DTYPES))
    itemsize = DTYPES[code].itemsize if is_known and not is_news(kind) else 1
    most = _LONGEST_NEWS if is_news(kind) else most
    if is_known and nbytes <= most and nbytes % itemsize == 0:
        return ""
    return (
        f"sent what is no message here: kind {kind}, dtype {code}, {nbytes} bytes (known are "
        f"kinds below {len(KINDS)} and from {_FIRST_NEWS}, dtypes below {len(DTYPES)}, whole "
        f"numbers of elements, {most} bytes at most); all ranks must run the same version of "
        "lightning_dsgd"
    )


def bytes_of(x: Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor."""
    return memoryview(x.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]
