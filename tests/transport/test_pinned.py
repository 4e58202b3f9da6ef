"""The pinned chunks of a network: as many as there may be, each free once its mark has passed."""

from __future__ import annotations

from lightning_dsgd.devices import HOST, Mark
from lightning_dsgd.transport.pinned import CHUNK_BYTES, NUM_CHUNKS, Pinned


class Later(Mark):
    """A mark that passes when it is told to."""

    is_passed = False

    def has_passed(self) -> bool:
        return self.is_passed

    def hold(self) -> None:
        raise AssertionError("no stream waits for a chunk")


def test_a_chunk_is_free_once_the_device_has_it() -> None:
    pool, marks = Pinned(), [Later() for _ in range(NUM_CHUNKS)]
    chunks = [pool.take(HOST) for _ in marks]
    assert pool.take(HOST) is None
    for chunk, mark in zip(chunks, marks, strict=True):
        assert chunk is not None
        assert len(chunk) == CHUNK_BYTES
        pool.give(chunk, mark)
    assert pool.take(HOST) is None
    marks[3].is_passed = True
    assert pool.take(HOST) is chunks[3]
    assert pool.take(HOST) is None
