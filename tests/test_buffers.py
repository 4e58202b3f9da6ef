"""Memory for messages is handed out again, and never while somebody uses it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch

from lightning_dsgd import buffers
from lightning_dsgd.buffers import buffer

LARGE = 3_000_000


def test_memory_is_used_again_once_no_tensor_uses_it() -> None:
    x = buffer(LARGE, torch.float32)
    address = x.data_ptr()
    part = x[5:10].view(torch.int32)
    del x
    held = buffer(LARGE, torch.float32)
    assert held.data_ptr() != address
    del part
    assert buffer(LARGE - 1000, torch.float32).data_ptr() == address


def test_a_forked_process_has_memory_of_its_own() -> None:
    x = buffer(LARGE, torch.float32).fill_(1)
    child = os.fork()
    if not child:
        for piece in buffers._pieces:
            piece[:4] = b"\xff" * 4
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert bool((x == 1).all())


def test_threads_do_not_share_memory() -> None:
    def fill(value: int) -> bool:
        return all(
            bool((buffer(LARGE, torch.int32).fill_(value) == value).all()) for _ in range(10)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(fill, range(8)))
