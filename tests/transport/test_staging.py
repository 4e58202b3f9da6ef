"""Messages of tensors on a device, on one that is none: `tests/support/fake_device.py`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from lightning_dsgd import devices
from lightning_dsgd.devices import HOST, Mark, until
from lightning_dsgd.primitives.published import Published
from lightning_dsgd.session.opening import Opening
from lightning_dsgd.session.options import Options, choose
from lightning_dsgd.transport import PeerLost, Timeout, staging
from lightning_dsgd.transport.connection import Connection
from lightning_dsgd.transport.memory import CHUNK_BYTES, NUM_CHUNKS, Pinned
from lightning_dsgd.transport.staging import Staging
from tests.support import fake_device
from tests.support.fake_device import FakeDevice, FakeTensor, OnDevice
from tests.support.mpi import FakeMPIWorld, MPIJob, every_mpi
from tests.support.thorough import cases
from tests.support.worlds import FakeWorld, FitWorld
from tests.transport.contract.test_in_order import run_in_order

LARGE = 10 * CHUNK_BYTES // 4
"""Elements that do not fit into the pinned memory for one rank."""


def contract(net: Any, fake: FakeDevice) -> None:
    run_in_order(OnDevice(net, fake.device))  # type: ignore[arg-type]


@cases("world_size", now=[2], later=[3])
def test_the_contract_holds_for_tensors_on_a_device(world_size: int) -> None:
    FakeWorld().run(world_size, contract)


@pytest.mark.exhaustive
@every_mpi
def test_the_contract_holds_over_mpi(python: str, mpi_jobs: Callable[[str], MPIJob]) -> None:
    FakeMPIWorld(job=mpi_jobs(python)).run(3, contract)


class Late:
    """A wire that takes messages, and has read them when it is told to."""

    def __init__(self) -> None:
        self.is_asked, self.has_read = threading.Event(), threading.Event()
        self.taken: list[tuple[bytes, Tensor]] = []

    def begin(self, header: bytes) -> None:
        self.header = header

    def add(self, chunk: Tensor, *, is_last: bool) -> Late:
        assert is_last
        inner = chunk.inner if isinstance(chunk, FakeTensor) else chunk
        self.taken.append((self.header, inner.view(torch.float32).clone()))
        return self

    def done(self) -> bool:
        self.is_asked.set()
        return self.has_read.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        raise AssertionError("the stager waits for nobody")


def send_from_device_memory(net: Any, fake: FakeDevice) -> None:
    """To what takes the addresses of a device's memory, once what is there is complete."""
    wire = Late()
    wire.has_read.set()
    stager = Staging(net.mesh, lambda dst: wire, whole=True, direct=True)
    x = busy(torch.zeros(LARGE, device=fake.device)).fill_(7)
    stager.send(0, b"h" * 26, x, copy=True)
    x.zero_()
    stager.send(0, b"h" * 26, x, copy=False).wait()
    stager.close()
    assert [header for header, _ in wire.taken] == [b"h" * 26] * 2
    for (_, chunk), value in zip(wire.taken, (7, 0), strict=True):
        assert (chunk == value).all()


def send_to_a_wire_that_is_late(net: Any, fake: FakeDevice, is_direct: bool, ends: str) -> None:
    """What is not copied: from a device's memory, or from the host's behind a device's message."""
    late, header = Late(), b"h" * 26
    stager = Staging(net.mesh, lambda dst: late, whole=is_direct, direct=is_direct)
    with hung(fake):
        sent = stager.send(0, header, torch.ones(10, device=fake.device), copy=not is_direct)
        if not is_direct:
            assert not stager.admit_past(0, header, torch.ones(10))
            sent = stager.send(0, header, torch.ones(10), copy=False)
    assert until(lambda: len(late.taken) == 2 - is_direct, 60, lambda: None)
    late.is_asked.clear()
    assert late.is_asked.wait(60)
    assert not sent.done(), "the wire still reads it"
    if ends == "read":
        late.has_read.set()
    elif ends == "lost":
        net.mesh.lose(1, "died")
        with pytest.raises(PeerLost, match="rank 1 died"):
            sent.wait(60)
    with mock.patch.object(staging, "CLOSE_TIMEOUT_S", 0.1):
        stager.close()
    assert sent.done()


def send_to_wires(net: Any, fake: FakeDevice) -> None:
    send_from_device_memory(net, fake)
    for is_direct, ends in ((True, "read"), (False, "read"), (True, "closed"), (False, "lost")):
        send_to_a_wire_that_is_late(net, fake, is_direct, ends)


def test_a_wire_may_take_a_devices_memory_and_a_send_is_done_once_it_has_read_it() -> None:
    FakeWorld().run(1, send_to_wires)


# ---- what the contract does not see: a lane, and what it shares with the training thread ----
def busy(x: Tensor) -> Tensor:
    for _ in range(8):
        x += 0
    return x


def is_full_of(x: Tensor, value: float) -> bool:
    return bool((x.cpu() == value).all())


def use_lanes(net: Any, fake: FakeDevice) -> bool:
    """A lane that corrects what the training thread publishes, as it is told by messages."""
    made, found = busy(torch.zeros(1000, device=fake.device)).fill_(3), []
    x = torch.zeros(1000, device=fake.device)
    published = Published(x)

    def fn(lane_net: Any) -> None:
        answer = made + 1  # made before the lane was started
        for _ in range(8):
            d = lane_net.recv(x[:0], net.rank).wait()
            published.correct(d)
            busy(answer)
            answer += d
            lane_net.send(answer, net.rank, tag=1)
            del d
        busy(answer)
        found.append(answer.add_(1))

    lane, total = net.spawn_lane(fn), torch.zeros_like(x)
    home = lane.net
    for k in range(8):
        d = busy(torch.zeros_like(x)).fill_(k)
        home.send(d, net.rank)
        d.zero_()
        x += 1
        published.publish(x)
    lane.join()
    total += found[0]
    published.publish(x)
    return is_full_of(x, 8 + 28) and is_full_of(total, 4 + 28 + 1)


def test_lanes_and_what_is_published_are_ordered_on_the_device() -> None:
    """All other waits are seen to be there by the contract."""
    assert FakeWorld().run(1, use_lanes) == [True]


def land_before_the_end(net: Any, fake: FakeDevice) -> None:
    """The last chunk leaves once all others have been copied to the device."""
    x, word, released, add = torch.ones(LARGE), torch.ones(1), threading.Event(), Connection.add
    x = x.to(fake.device)

    def add_last_late(connection: Connection, chunk: Tensor, *, is_last: bool) -> Any:
        assert not is_last or released.wait(60)
        return add(connection, chunk, is_last=is_last)

    def has_all_but_the_last() -> bool:
        assert not work.done()
        landing = work._landing
        return landing is not None and landing._num_queued == x.nbytes - CHUNK_BYTES

    if net.rank:
        work = net.recv(x, 0)
        assert until(has_all_but_the_last, 60, lambda: None)
        net.send(word, 0, tag=1)
        assert is_full_of(work.wait(), 1)
    else:
        with mock.patch.object(Connection, "add", add_last_late):
            net.send(x, 1)
            net.recv(word, 1, tag=1).wait()
            released.set()
    net.barrier().wait()


def test_a_message_lands_while_it_comes() -> None:
    FakeWorld().run(2, land_before_the_end)


# ---- which device ----
def use_a_device_that_nobody_has_entered() -> None:
    fake = fake_device.install(index=dist.get_rank() + 1)
    with pytest.raises(RuntimeError, match=r"MainThread calls fake:\d, but works on fake:0"):
        fake.mark()
    lines: list[str] = []
    with mock.patch.dict(devices.COLLECTIVES, {"fake": "nccl"}):
        opening = Opening(choose("a test", Options, {"timeout_s": 60.0}), lines.append)
        net = opening.open_network(2, fake.device)
    assert lines == [
        "Messages travel over TCP; sums are made of messages too, as the process group's backend "
        "for fake is none. Faster: an MPI library that reads the memory of fake, for messages; "
        "nccl in its place, for sums."
    ]
    thread = threading.Thread(target=net.send, args=(torch.ones(1), net.rank))
    thread.start()
    lane = net.spawn_lane(lambda end: end.all_reduce(torch.ones(3, device=fake.device)).wait())
    x = torch.ones(LARGE, device=fake.device)
    net.send(x, 1 - net.rank, tag=1, copy=False).wait()
    assert is_full_of(net.recv(x, 1 - net.rank, tag=1).wait(), 1)
    assert net.recv(torch.ones(1), net.rank).wait().tolist() == [1]
    lane.join()
    thread.join()
    net.close()
    fake.check()


def test_every_thread_chooses_its_device_first() -> None:
    FitWorld().run(2, use_a_device_that_nobody_has_entered)


# ---- a device that does not come to it ----
@contextlib.contextmanager
def hung(fake: FakeDevice) -> Iterator[None]:
    gate = threading.Event()
    fake.current().queue.put(gate.wait)
    try:
        yield
    finally:
        gate.set()


def wait_for_a_hung_device(net: Any, fake: FakeDevice) -> float:
    other, x = 1 - net.rank, torch.zeros(10, device=fake.device)
    syncs = len(fake.syncs)
    begin = time.monotonic()
    with hung(fake):
        x += 1
        sent = net.send(x, other, tag=1, copy=False)
        net.send(x, other, tag=1)
        assert not sent.done()
        with pytest.raises(Timeout, match=r"0.2 s for rank . to take a message"):
            sent.wait(0.2)
        assert len(fake.syncs) == syncs, "the caller waits for the device"

        net.send(torch.ones(3), other, tag=2)  # what has another tag is not held up
        assert net.recv(torch.empty(0), other, tag=2).wait(20).tolist() == [1, 1, 1]

        work = net.broadcast(x, src=0)
        if net.rank:
            text = r"0.2 s for broadcast.* to be copied to fake:1"
            assert until(work._pending.arrived.is_set, 60, lambda: None)
            with pytest.raises(Timeout, match=text):
                work.wait(0.2)
            assert not work.done()
    for _ in range(2):
        assert net.recv(x, other, tag=1).wait().tolist() == [1] * 10
    work.wait()
    assert x.tolist() == [1] * 10
    net.barrier().wait()
    return time.monotonic() - begin


def test_a_hung_device_ends_in_a_timeout_and_holds_up_nothing_else() -> None:
    FakeWorld().run(2, wait_for_a_hung_device)


def stop_while_the_device_hangs(net: Any, fake: FakeDevice) -> None:
    other, x = 1 - net.rank, torch.zeros(10, device=fake.device)

    def fn(lane_net: Any) -> None:
        with hung(fake):
            y = torch.zeros(
                10, device=fake.device
            )  # nothing is copied to it before the device ends
            receive = lane_net.collect(y, other, lane_net._messages, 0, 0, y)
            assert until(receive.arrived.is_set, 60, lambda: None)
            begun.set()
            receive.wait()  # for the device alone
            raise AssertionError("it came through")

    begun = threading.Event()
    lane = net.spawn_lane(fn)
    lane.net.send(x, other)
    assert begun.wait(60)
    lane.stop(20)
    net.barrier().wait()


def test_a_lane_is_stopped_while_the_device_hangs() -> None:
    FakeWorld().run(2, stop_while_the_device_hangs)


HAS_SENT = 7  # the tag of what overtakes a message that the hung device holds


def fail_while_the_device_hangs(net: Any, fake: FakeDevice) -> float:
    x = torch.zeros(10, device=fake.device)
    begin = time.monotonic()
    with hung(fake):
        x += 1
        if net.rank:
            net.send(x, 0)
            net.recv(torch.zeros(1), 0, tag=HAS_SENT).wait()
            net.fail("failed: ValueError: no such luck")  # before the device goes on
            raise ValueError("no such luck")
        sent = net.send(x, 1, copy=False)
        net.send(torch.zeros(1), 1, tag=HAS_SENT)
        with pytest.raises(PeerLost, match="rank 1 failed: ValueError: no such luck"):
            net.recv(x, 1).wait()
        with pytest.raises(PeerLost, match="rank 1 failed: ValueError: no such luck"):
            sent.wait()
    return time.monotonic() - begin


def test_a_lost_rank_ends_waits_for_a_hung_device() -> None:
    zero, one = FakeWorld().outcomes(2, fail_while_the_device_hangs)
    assert (zero.error, one.error) == ("", "ValueError: no such luck")
    assert zero.result < 20


# ---- the pinned chunks of a network: each is free once its mark has passed ----
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
