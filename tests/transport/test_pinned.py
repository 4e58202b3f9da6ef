"""The pool of pinned memory keeps what a later message can take, up to so many bytes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from lightning_dsgd.devices import HOST
from lightning_dsgd.transport.pinned import Pinned

MOST_BYTES = 1024


def kept(given: Sequence[int]) -> list[int]:
    pool = Pinned(MOST_BYTES)
    for nbytes in given:
        pool.give(HOST.pinned(nbytes, torch.uint8))
    found = []
    for size in sorted({*given}):
        while (piece := pool.take(size, torch.uint8)) is not None:
            found.append(piece.untyped_storage().nbytes())
    return found


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ([256] * 3, [256] * 3),
        ([512] + [1] * 100, [1] * 100 + [512]),  # many small pieces drive out no large one
        ([256] * 5, [256] * 4),
        ([512, 256, 256, 128], [128, 256, 256]),  # the size that was given back longest ago goes
        ([512, 256, 512, 256], [256, 512]),
        ([1024, 2048], [1024]),  # one that is too large drives out nothing
        ([2048], []),
        ([1024, 1000], [1024]),  # no message asks for such a size
    ],
)
def test_what_is_kept_has_a_limit_in_bytes(given: list[int], left: list[int]) -> None:
    assert kept(given) == left


def test_a_piece_is_used_again_by_messages_of_about_its_size() -> None:
    pool = Pinned(MOST_BYTES)
    x = pool.make(HOST, 200, torch.float32)
    assert (len(x), x.untyped_storage().nbytes()) == (200, 1024)
    pool.give(x)
    assert pool.take(100, torch.float32) is None
    again = pool.make(HOST, 100, torch.float64)
    assert (len(again), again.dtype, again.data_ptr()) == (100, torch.float64, x.data_ptr())
    assert pool.take(200, torch.float32) is None, "it is in use"
