"""A message as bytes: a header, and the payload.

    channel, tag     which mailbox               kind     message, which collective, or which news
    dtype, nbytes    what the payload is

News are the mesh's: heartbeat, farewell (the sender needs nobody any more), the loss of a rank, the
agreement on who goes on after one, and what may lie at a rank (`flow`).
"""

from __future__ import annotations

import os
import struct
from typing import Final

import torch
from torch import Tensor

from lightning_dsgd.transport.messages import KINDS

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
