"""What values are rounded to on the wire, and the message that holds them.

    "bfloat16"   rounded to bfloat16
    "int8"       k of -127 to 127, one byte, for k * 2^e; one byte with e for every 32 values
    "int4"       k of -7 to 7, half a byte; else the same

As 2^e is a power of two, k * 2^e is exact, and so is what is rounded off, which a sender keeps.
(The formats are those of the OCP Microscaling specification, but for the four bits, which are whole
numbers here.)
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_dsgd.hyperparameters import one_of
from lightning_dsgd.transport import TransportError

BLOCK: Final = 32
"""The number of values that share an exponent."""
_BITS: Final = {"int8": 8, "int4": 4}
_NOT_FINITE: Final = 255
"""The exponent of infinity and NaN, as fp32 stores it, biased by 127."""


def wire_dtype(rest: str = "is sent the next time", of: str = "weight") -> Any:
    """Makes the hyperparameter of an algorithm that rounds what it sends."""
    return one_of(
        "float32",
        "bfloat16",
        "int8",
        "int4",
        default="float32",
        doc='data type of what is sent; "float32" does not round, "int8" and "int4" send a byte '
        f"and half a byte per {of}; what is rounded off {rest}",
    )


def encode(x: Tensor, wire_dtype: str) -> Tensor:
    """Encodes x: x itself, bfloat16, or bytes with all exponents and then all values."""
    if wire_dtype == "float32":
        return x
    if wire_dtype == "bfloat16":
        return x.to(torch.bfloat16)
    bits = _BITS[wire_dtype]
    blocks = pad(x, (0, -len(x) % BLOCK)).view(_num_blocks(len(x)), BLOCK)
    largest = blocks.abs().amax(1).float()
    exponents = (largest.view(torch.int32) >> 23).bitwise_and_(_NOT_FINITE)
    limit = 2 ** (bits - 1) - 1
    values = (blocks / _scales(exponents, bits)).round_().clamp_(-limit, limit)
    codes = values.nan_to_num_(0.0).to(torch.int8)
    if bits == 4:
        half = BLOCK // 2
        codes = (codes[:, :half] & 15) | (codes[:, half:] << 4)
    return torch.cat([exponents.to(torch.uint8).view(torch.int8), codes.reshape(-1)])


def decode(code: Tensor, like: Tensor) -> Tensor:
    """Decodes a message into the length and the dtype of `like`."""
    if code.dtype == like.dtype:
        return code
    if code.dtype == torch.bfloat16:
        _check_length(code, len(like), len(like))
        return code.to(like.dtype)
    num_blocks = _num_blocks(len(like))
    bits = 4 if len(code) == num_blocks * (1 + BLOCK // 2) else 8
    _check_length(code, num_blocks * (1 + BLOCK * bits // 8), len(like))
    exponents = code[:num_blocks].view(torch.uint8).to(torch.int32)
    codes = code[num_blocks:].view(num_blocks, BLOCK * bits // 8)
    if bits == 4:
        codes = torch.cat([(codes << 4) >> 4, codes >> 4], 1)
    values = codes.to(like.dtype) * _scales(exponents, bits).to(like.dtype)
    return values.view(-1)[: len(like)]


def planes(count: int, wire_dtype: str, dtype: torch.dtype) -> list[int]:
    """Returns the bytes of what stands for so many values of this dtype: exponents, then values."""
    if wire_dtype in _BITS:
        num_blocks = _num_blocks(count)
        return [num_blocks, num_blocks * BLOCK * _BITS[wire_dtype] // 8]
    return [count * (torch.bfloat16 if wire_dtype == "bfloat16" else dtype).itemsize]


def padding(count: int, wire_dtype: str) -> int:
    """Returns how many values are missing in the last block."""
    return -count % BLOCK if wire_dtype in _BITS else 0


def _num_blocks(num_values: int) -> int:
    return -(-num_values // BLOCK)


def _scales(exponents: Tensor, bits: int) -> Tensor:
    """Returns a block's scale, 2^e, with which its largest value becomes one of the two largest k.

    The scale is made of its bits, as a power computed by a device may be off by one.
    """
    stored = (exponents - (bits - 2)).clamp_(min=1)  # the smallest normal number, for tiny blocks
    scales = (stored << 23).view(torch.float32)
    return scales.masked_fill(exponents == _NOT_FINITE, torch.nan)[:, None]


def _check_length(code: Tensor, expected: int, num_values: int) -> None:
    if len(code) != expected:
        raise TransportError(
            f"expected {expected} elements for {num_values} rounded values, got {len(code)}; "
            "wire_dtype must be the same on all ranks"
        )
