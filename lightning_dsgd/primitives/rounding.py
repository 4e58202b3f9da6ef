"""What values are rounded to on the wire, and the message that holds them.

    "bfloat16"   rounded to bfloat16
    "int8"       k of -127 to 127, one byte, for k * 2^e; one byte with e for every 32 values
    "int4"       k of -7 to 7, half a byte; else the same
    "e3m0"       0 or a sign and one of 2^e, 2^(e-1), ... 2^(e-6), half a byte; else the same
    "2bit"       a sign and one of two magnitudes, 8 bytes for every 256 values: the means of those
                 magnitudes that are below their mean, and of the others

As 2^e is a power of two, k * 2^e is exact, and so is what is rounded off, which a sender keeps.
(The first formats are those of the OCP Microscaling specification, but for the whole numbers of
four bits.)  As means, the two magnitudes are a projection: |x|^2 = |Q(x)|^2 + |x - Q(x)|^2,
for whole blocks: the zeros that fill a last one count in its means.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_dsgd.hyperparameters import one_of
from lightning_dsgd.transport import TransportError

BLOCKS: Final = {"int8": 32, "int4": 32, "e3m0": 32, "2bit": 256}
"""The number of values that share an exponent, or two magnitudes."""
_BITS: Final = {"int8": 8, "int4": 4, "e3m0": 4, "2bit": 2}
_HEADS: Final = {"int8": 1, "int4": 1, "e3m0": 1, "2bit": 8}
"""The bytes for each block besides its values."""
_NOT_FINITE: Final = 255
"""The exponent of infinity and NaN, as fp32 stores it, biased by 127."""


def wire_dtype(
    rest: str = "is sent the next time",
    of: str = "weight",
    default: str = "float32",
    least_bits: int = 2,
) -> Any:
    """Makes the hyperparameter of an algorithm that rounds what it sends.

    Args:
        rest: what becomes of what is rounded off
        of: what a value is, in words
        default: the format by default
        least_bits: the bits of a value in the coarsest format with which the algorithm trains well
    """
    quarter = ' and "2bit" a quarter' if least_bits <= _BITS["2bit"] else ""
    return one_of(
        "float32",
        "bfloat16",
        *(kind for kind, bits in _BITS.items() if bits >= least_bits),
        default=default,
        doc='data type of what is sent; "float32" does not round, "int8" sends a byte, "int4" and '
        f'"e3m0" (powers of two) half a byte{quarter} per {of}; what is rounded off {rest}',
    )


def encode(x: Tensor, wire_dtype: str) -> Tensor:
    """Encodes x: x itself, bfloat16, or bytes with all exponents and then all values."""
    if wire_dtype == "float32":
        return x
    if wire_dtype == "bfloat16":
        return x.to(torch.bfloat16)
    bits, padded = _BITS[wire_dtype], pad(x, (0, padding(len(x), wire_dtype)))
    blocks = padded.view(-(-len(x) // BLOCKS[wire_dtype]), BLOCKS[wire_dtype])
    if wire_dtype == "2bit":
        sizes = blocks.abs()
        is_large = sizes >= sizes.mean(1, True, dtype=torch.float64)
        kinds = [~is_large, is_large]
        sums = [(sizes * kind).sum(1, dtype=torch.float64) for kind in kinds]  # of equal ones exact
        means = [a / kind.sum(1).clamp_(min=1) for a, kind in zip(sums, kinds, strict=True)]
        signed = is_large.to(torch.uint8) << 1 | (blocks < 0)
        heads = torch.stack(means, 1).float().view(torch.uint8).view(-1)
        return torch.cat([heads, _packed(signed, bits).view(-1)])
    largest = blocks.abs().amax(1).float()
    exponents = (largest.view(torch.int32) >> 23).bitwise_and_(_NOT_FINITE)
    limit = 2 ** (bits - 1) - 1
    if wire_dtype == "e3m0":
        blocks = blocks / _scales(exponents, 2)
        part, power = torch.frexp(blocks.abs())
        powers = (power + (part >= 0.75) + (limit - 1)).clamp_(1, limit)  # the nearest one
        values = powers * (blocks.abs() >= 0.5**limit) * blocks.sign()
    else:
        values = (blocks / _scales(exponents, bits)).round_().clamp_(-limit, limit)
    codes = _packed(values.nan_to_num_(0.0).to(torch.int8), bits)
    code = torch.cat([exponents.to(torch.uint8).view(torch.int8), codes.view(-1)])
    return code.view(torch.uint8) if wire_dtype == "e3m0" else code


def decode(code: Tensor, like: Tensor) -> Tensor:
    """Decodes a message into the length and the dtype of `like`."""
    if code.dtype == like.dtype:
        return code
    if code.dtype == torch.bfloat16:
        _check_length(code, len(like), len(like))
        return code.to(like.dtype)
    kinds = ("int8", "int4") if code.dtype == torch.int8 else ("e3m0", "2bit")
    sizes = {kind: planes(len(like), kind, like.dtype) for kind in kinds}
    wire_dtype = next((kind for kind in kinds if sum(sizes[kind]) == len(code)), kinds[0])
    _check_length(code, sum(sizes[wire_dtype]), len(like))
    bits, (heads, codes) = _BITS[wire_dtype], torch.split(code, sizes[wire_dtype])
    codes = codes.view(-(-len(like) // BLOCKS[wire_dtype]), BLOCKS[wire_dtype] * bits // 8)
    if wire_dtype == "2bit":
        means = heads.clone().view(torch.float32).view(-1, 2).to(like.dtype)
        levels = torch.stack([means, -means], 2).view(-1, 4)
        kinds_of = torch.cat([codes >> shift & 3 for shift in (0, 2, 4, 6)], 1)
        return levels.gather(1, kinds_of.long()).view(-1)[: len(like)]
    exponents, codes = heads.view(torch.uint8).to(torch.int32), codes.view(torch.int8)
    if bits == 4:
        codes = torch.cat([(codes << 4) >> 4, codes >> 4], 1)
    values = codes.to(like.dtype)
    if wire_dtype == "e3m0":
        values = values.sign() * torch.ldexp(torch.ones_like(values), codes.abs().int() - 7)
        bits = 2
    values *= _scales(exponents, bits).to(like.dtype)
    return values.view(-1)[: len(like)]


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Packs rows of codes into bytes: the first share of a row into the lowest bits."""
    first, *others = codes.chunk(8 // bits, 1)
    packed = first & 2**bits - 1 if others else first
    for place, share in enumerate(others, 1):
        packed = packed | share << place * bits
    return packed


def planes(count: int, wire_dtype: str, dtype: torch.dtype) -> list[int]:
    """Returns the bytes of what stands for so many values of this dtype: exponents, then values."""
    if wire_dtype in _BITS:
        num_blocks = -(-count // BLOCKS[wire_dtype])
        of_values = num_blocks * BLOCKS[wire_dtype] * _BITS[wire_dtype] // 8
        return [_HEADS[wire_dtype] * num_blocks, of_values]
    return [count * (torch.bfloat16 if wire_dtype == "bfloat16" else dtype).itemsize]


def padding(count: int, wire_dtype: str) -> int:
    """Returns how many values are missing in the last block."""
    return -count % BLOCKS.get(wire_dtype, 1)


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
