"""MPI's wire and the end of an MPI job, with an MPI that is none: no process is started."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_dsgd.mpi import job, wire
from lightning_dsgd.mpi.job import Job
from lightning_dsgd.mpi.wire import InFlight, Leaving, MPIWire, chunks_of
from lightning_dsgd.transport.mailboxes import Expected
from lightning_dsgd.transport.mesh import Mesh
from lightning_dsgd.transport.messages import CODES, HEADER


class MPI:
    """The module and the communicator of MPI, which keeps what is sent as it lies in memory."""

    BYTE = object()
    Status = Request = None

    def __init__(self) -> None:
        self.sent: list[tuple[memoryview, int, int]] = []
        self.done: list[int] = []

    def Get_size(self) -> int:
        return 2

    def Get_rank(self) -> int:
        return 0

    def Isend(self, what: list[Any], dst: int, tag: int) -> object:
        self.sent.append((memoryview(what[0]), dst, tag))
        return object()

    def Testsome(self, requests: list[object]) -> list[int]:
        return self.done


@pytest.fixture
def mpi(monkeypatch: pytest.MonkeyPatch) -> MPI:
    mpi = MPI()
    mpi.Status = lambda: None  # type: ignore[assignment]
    mpi.Request = mpi  # type: ignore[assignment]
    monkeypatch.setattr(wire, "load_mpi", lambda: mpi)
    return mpi


def wire_over(mpi: MPI) -> MPIWire:
    made = MPIWire(mpi)
    made._mesh, made._communicator = Mesh(0, 2, 60.0, 20.0), mpi
    return made


def header_of(x: torch.Tensor) -> bytes:
    return HEADER.pack(5, 6, x.nbytes, 0, CODES[x.dtype])


@pytest.mark.parametrize("numel", [10, 10_000])
def test_a_tensor_that_is_sent_with_a_copy_may_change_at_once(mpi: MPI, numel: int) -> None:
    x = torch.arange(float(numel))
    expected = header_of(x) + x.numpy().tobytes()
    assert wire_over(mpi).send_now(1, header_of(x), x, copy=True).done()
    x.zero_()
    assert b"".join(memory for memory, _, _ in mpi.sent) == expected
    assert {dst for _, dst, _ in mpi.sent} == {1}


def test_a_lent_tensor_is_sent_from_where_it_lies_in_parts_that_mpi_takes(
    mpi: MPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_CHUNK_BYTES", 16_000)
    x, over = torch.arange(10_000.0), wire_over(mpi)
    sending = over.send_now(1, header_of(x), x, copy=False)
    assert [len(memory) for memory, _, _ in mpi.sent] == [HEADER.size, 16_000, 16_000, 8_000]
    assert [tag for _, _, tag in mpi.sent] == [wire._FRAME, *[wire._PAYLOAD] * 3]
    x.add_(1)
    assert b"".join(memory for memory, *_ in mpi.sent[1:]) == x.numpy().tobytes()
    in_flight = InFlight()
    while over._new:
        in_flight.add(*over._new.popleft())
    for done in ([0], [1, 2], []):  # the header and two of three chunks have left
        mpi.done = done
        assert not in_flight.take_done()
    assert not sending.done()
    mpi.done = [0]
    (leaving,) = in_flight.take_done()
    assert isinstance(leaving, Leaving)
    assert leaving.sending is sending
    assert in_flight.take_done() == []


def test_what_is_left_in_flight_stays_with_its_message(mpi: MPI) -> None:
    long, short = Leaving([], 2), Leaving([], 1)
    in_flight = InFlight()
    for owner in (long, long, short):
        in_flight.add(object(), owner)
    mpi.done = [0]
    assert in_flight.take_done() == []
    mpi.done = [1]  # of the two that are left
    assert in_flight.take_done() == [short]
    mpi.done = [0]
    assert in_flight.take_done() == [long]


def test_chunks_hold_all_bytes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_CHUNK_BYTES", 4)
    for text in (b"", b"abcd", b"abcdefghi"):
        chunks = chunks_of(memoryview(text))
        assert b"".join(chunks) == text
        assert all(0 < len(chunk) <= 4 for chunk in chunks)


def test_a_receive_belongs_to_the_first_message_of_its_mailbox(mpi: MPI) -> None:
    """The second is not read into the tensor of a receive that comes between the two."""
    over = wire_over(mpi)
    messages = [torch.full((4,), value) for value in (1.0, 2.0)]
    frames = [bytearray(header_of(x) + x.numpy().tobytes()) for x in messages]
    over._begin_message(1, frames[0])
    receives = [Expected(1, (5, 6), torch.empty(4)) for _ in messages]
    for expected in receives:
        over._mesh.mailboxes.collect(expected)
    over._begin_message(1, frames[1])
    over._deliver()
    for expected, x in zip(receives, messages, strict=True):
        assert expected.into is not None
        assert expected.payload is not None
        expected.into.copy_(expected.payload)  # as its wait does
        assert torch.equal(expected.into, x)


class Ending:
    """A communicator on which another rank has ended, after so many questions."""

    def __init__(self, after: int) -> None:
        self.left, self.aborted = after, 0

    def Ibarrier(self) -> Ending:
        return self

    def Test(self) -> bool:
        self.left -= 1
        return self.left < 0

    def Get_rank(self) -> int:
        return 3

    def Abort(self, code: int) -> None:
        assert code == 1
        self.aborted, self.left = self.aborted + 1, 0


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_job_waits_for_all_ranks_and_aborts_where_one_was_lost(
    is_broken: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seconds in (("_END_WITHIN_S", -1.0), ("_HEARD_WITHIN_S", 0), ("_SAY_AFTER_S", -1.0)):
        monkeypatch.setattr(job, name, seconds)
    ending, ended = Ending(after=5), Job()
    ended._world, ended.is_broken = ending, is_broken
    ended.end()
    said = capsys.readouterr().err
    assert ending.aborted == is_broken
    assert ("aborting the MPI job" in said) == is_broken
    assert said.count("[rank 3] waits for every other rank to end") == 1


def test_the_ranks_of_mpi_must_be_those_of_the_process_group(mpi: MPI) -> None:
    over = wire_over(mpi)
    over.check_names(["mpi as rank 0 of 2", "mpi as rank 1 of 2"])
    for names in (["mpi as rank 1 of 2", "mpi as rank 0 of 2"], ["mpi as rank 0 of 1"] * 2):
        with pytest.raises(wire.TransportError, match="needs the ranks of MPI_COMM_WORLD, got mpi"):
            over.check_names(names)
