"""Messages of tensors on a device, on one that is none: `tests/support/fake_device.py`."""

from __future__ import annotations

import contextlib
import itertools
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
from lightning_dsgd.devices import HOST, PASSED, Mark, until
from lightning_dsgd.primitives.published import Published
from lightning_dsgd.primitives.stream_lock import StreamLock
from lightning_dsgd.session.opening import Opening
from lightning_dsgd.session.options import Options, choose
from lightning_dsgd.transport import PeerLost, Timeout, staging
from lightning_dsgd.transport.connection import Connection
from lightning_dsgd.transport.lanes import Lane
from lightning_dsgd.transport.mailboxes import Mailboxes
from lightning_dsgd.transport.pinned import CHUNK_BYTES, NUM_CHUNKS, Pinned
from lightning_dsgd.transport.staging import Landing, Staging
from lightning_dsgd.transport.works import Done
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


def send_from_device_memory(net: Any, fake: FakeDevice) -> None:
    """To what takes the addresses of a device's memory, once what is there is complete."""
    taken: list[tuple[bytes, Tensor]] = []

    class Outlet:
        def begin(self, header: bytes) -> None:
            self.header = header

        def add(self, chunk: Tensor, *, is_last: bool) -> Done[None]:
            assert is_last
            assert isinstance(chunk, FakeTensor)
            taken.append((self.header, chunk.inner.view(torch.float32).clone()))
            return Done(None)

    stager = Staging(net.mesh, lambda dst: Outlet(), whole=True, direct=True)
    x = busy(torch.zeros(LARGE, device=fake.device)).fill_(7)
    stager.send(0, b"h" * 26, x, copy=True)
    x.zero_()
    stager.send(0, b"h" * 26, x, copy=False).wait()
    stager.close()
    assert [header for header, _ in taken] == [b"h" * 26] * 2
    assert [bool((chunk == value).all()) for (_, chunk), value in zip(taken, (7, 0), strict=True)]


def test_an_outlet_may_take_a_devices_memory() -> None:
    FakeWorld().run(1, send_from_device_memory)


class Late:
    def __init__(self) -> None:
        self.is_asked, self.has_read = threading.Event(), threading.Event()
        self.num_added = 0

    def begin(self, header: bytes) -> None:
        pass

    def add(self, chunk: Tensor, *, is_last: bool) -> Late:
        self.num_added += 1
        return self

    def done(self) -> bool:
        self.is_asked.set()
        return self.has_read.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        raise AssertionError("the stager waits for nobody")


def send_to_a_wire_that_is_late(net: Any, fake: FakeDevice, is_direct: bool, ends: str) -> None:
    """What is not copied: from a device's memory, or from the host's behind a device's message."""
    late, header = Late(), b"h" * 26
    stager = Staging(net.mesh, lambda dst: late, whole=is_direct, direct=is_direct)
    with hung(fake):
        sent = stager.send(0, header, torch.ones(10, device=fake.device), copy=not is_direct)
        if not is_direct:
            assert stager.takes(0, header, torch.ones(10))
            sent = stager.send(0, header, torch.ones(10), copy=False)
    assert until(lambda: late.num_added == 2 - is_direct, 60, lambda: None)
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


def send_to_wires_that_are_late(net: Any, fake: FakeDevice) -> None:
    for is_direct, ends in ((True, "read"), (False, "read"), (True, "closed"), (False, "lost")):
        send_to_a_wire_that_is_late(net, fake, is_direct, ends)


def test_a_send_is_done_once_the_wire_has_read_it() -> None:
    FakeWorld().run(1, send_to_wires_that_are_late)


# ---- what each wait is for ----
def busy(x: Tensor) -> Tensor:
    for _ in range(8):
        x += 0
    return x


def is_full_of(x: Tensor, value: float) -> bool:
    return bool((x.cpu() == value).all())


def exchange_messages(net: Any, fake: FakeDevice) -> bool:
    """Messages that are just made, overwritten as soon as that is allowed, and freed."""
    other = 1 - net.rank
    x, like = torch.zeros(LARGE, device=fake.device), torch.zeros(0, device=fake.device)
    total = torch.zeros(LARGE, device=fake.device)
    ramp = torch.arange(LARGE).float().to(fake.device)  # no chunk is like another
    for copy in (True, False):
        torch.add(ramp, net.rank, out=busy(x))
        sent = net.send(x, other, copy=copy)
        sent.wait()
        x.zero_()
        receipt = net.recv(like, other)
        receipt.wait()
        busy(total)
        total.add_(receipt.wait())
        del receipt
    return is_full_of(total - 2 * ramp, 2 * other)


class Held:
    def __init__(self, begin: Callable[[], Any], others: list[Held]) -> None:
        self._begin, self._others = begin, others
        self.sent: Any = None
        others.append(self)

    def done(self) -> bool:
        self.let_all_go(self._others)
        return bool(self.sent.done())

    @staticmethod
    def let_all_go(held: list[Held]) -> None:
        for chunk in held:
            chunk.sent = chunk._begin()
        held.clear()


def exchange_over_a_slow_wire(net: Any, fake: FakeDevice) -> bool:
    """A chunk begins to leave when it is asked whether it has left, and with the last one."""
    held: list[Held] = []
    add = Connection.add

    def add_late(connection: Connection, chunk: Tensor, *, is_last: bool) -> Held:
        late = Held(lambda: add(connection, chunk, is_last=is_last), held)
        if is_last:
            late.let_all_go(held)
        return late

    with mock.patch.object(Connection, "add", add_late):
        return exchange_messages(net, fake)


def exchange_on_a_slow_device(net: Any, fake: FakeDevice) -> bool:
    """The first and the last chunk of a message are copied to the device late."""
    take, numbers, num_chunks = Pinned.take, itertools.count(1), LARGE * 4 // CHUNK_BYTES

    def take_late(pool: Pinned, port: Any) -> Tensor | None:
        chunk = take(pool, port)
        if chunk is not None and next(numbers) % num_chunks in (0, 1):
            fake.spin(0.15)
        return chunk

    with mock.patch.object(Pinned, "take", take_late):
        return exchange_messages(net, fake)


def sum_up(net: Any, fake: FakeDevice) -> bool:
    x = busy(torch.zeros(700_000, device=fake.device))
    before = torch.zeros_like(x)
    for _ in range(3):
        busy(x)
        before.copy_(x.fill_(net.rank + 1))
        net.all_reduce(x).wait()
    return is_full_of(x, 3) and is_full_of(before, net.rank + 1)


def overwrite(net: Any, fake: FakeDevice) -> bool:
    x, before = torch.zeros(LARGE, device=fake.device), torch.zeros(LARGE, device=fake.device)
    right = True
    for _ in range(3):
        x.fill_(net.rank + 1)
        net.barrier().wait()
        if net.rank:
            busy(before)
        before.copy_(x)
        net.broadcast(x, src=0).wait()
        right &= is_full_of(before, net.rank + 1) and is_full_of(x, 1)
    return right


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


def hand_over(net: Any, fake: FakeDevice) -> bool:
    like, total = torch.zeros(0, device=fake.device), torch.zeros(1000, device=fake.device)
    home = net.sub("home")

    def fn(lane_net: Any) -> None:
        for k in range(8):
            home.send(busy(torch.zeros(1000, device=fake.device)).add_(k), net.rank)

    lane = net.spawn_lane(fn)
    for _ in range(8):
        receipt = home.recv(like, net.rank)
        busy(total).add_(receipt.wait())
        del receipt
    lane.join()
    return is_full_of(total, 28)


def no_mark(original: Callable[..., Any], at: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        place = {"job": 4, "landing": 4, "deliver": 5}[at]
        return original(*args[:place], PASSED, *args[place + 1 :], **kwargs)

    return call


def copies_count_as_done(original: Callable[..., Any]) -> Callable[..., Any]:
    def copy(self: Staging, job: Any, way: Any) -> bool:
        moved = original(self, job, way)
        for place, (slot, count, _) in enumerate(job.copied):
            job.copied[place] = slot, count, PASSED
        return bool(moved)

    return copy


def lands_at_once(original: Callable[..., bool]) -> Callable[..., bool]:
    return lambda landing, num: original(landing, num) or landing._copied is not None


def slots_are_free_at_once(way: Any) -> bool:
    way.free += [slot for _, slot, _ in way.leaving if slot is not None]
    way.leaving = [chunk for chunk in way.leaving if chunk[1] is None]
    return False


def never_passes(name: str) -> Any:
    return mock.patch.object(
        Lane, name, property(lambda _: PASSED, lambda _, value: None), create=True
    )


def forget(device: FakeDevice, x: Tensor) -> None:
    """Not a mock, which would keep x."""


def without_lock_mark(lock: StreamLock) -> None:
    lock._lock.acquire()


Use = Callable[[Any, FakeDevice], bool]
Patch = Callable[[], Any]


def waits() -> dict[str, tuple[Use, Patch]]:
    """For each wait of the package: what goes wrong without it, and how to leave it out."""
    job, give, patch = staging._Job, Pinned.give, mock.patch.object
    return {
        "stager: until x is made": (
            exchange_messages,
            lambda: patch(staging, "_Job", lambda *args: job(*args[:4], PASSED, *args[5:])),
        ),
        "stager: until a chunk is in host memory": (
            exchange_messages,
            lambda: patch(Staging, "_copy", copies_count_as_done(Staging._copy)),
        ),
        "stager: until a chunk has left": (
            exchange_over_a_slow_wire,
            lambda: patch(staging, "_take_back", slots_are_free_at_once),
        ),
        "landing: until the target is not read any more": (
            overwrite,
            lambda: patch(Landing, "__init__", no_mark(Landing.__init__, "landing")),
        ),
        "landing: until it is on the device": (
            exchange_on_a_slow_device,
            lambda: patch(Landing, "has_landed", lands_at_once(Landing.has_landed)),
        ),
        "landing: until a chunk is on the device": (
            exchange_on_a_slow_device,
            lambda: patch(Pinned, "give", lambda pool, chunk, _: give(pool, chunk, PASSED)),
        ),
        "memory: until another stream has used it": (
            hand_over,
            lambda: patch(FakeDevice, "keep", forget),
        ),
        "own message: until it is made": (
            hand_over,
            lambda: patch(Mailboxes, "deliver", no_mark(Mailboxes.deliver, "deliver")),
        ),
        "lock: until its last holder is done": (
            use_lanes,
            lambda: patch(StreamLock, "__enter__", without_lock_mark),
        ),
        "lane: until what is before it is done": (use_lanes, lambda: never_passes("_begun")),
        "lane: until what it has done is done": (use_lanes, lambda: never_passes("_ended")),
    }


def is_wrong(net: Any, fake: FakeDevice, use: Use) -> bool:
    wrong = not use(net, fake) or bool(fake.races)
    fake.races.clear()
    return bool(net.all_reduce(torch.tensor([int(wrong)])).wait())


def leave_each_out(net: Any, fake: FakeDevice) -> list[str]:
    """The waits that nobody has noticed the lack of."""
    uses = (
        exchange_messages,
        exchange_over_a_slow_wire,
        exchange_on_a_slow_device,
        sum_up,
        overwrite,
        use_lanes,
        hand_over,
    )
    for use in uses:
        assert not is_wrong(net.sub(f"whole {use.__name__}"), fake, use), use.__name__
    unnoticed = []
    for wait, (use, leaving_out) in waits().items():
        part = net.sub(wait)
        with leaving_out():
            if not is_wrong(part, fake, use):
                unnoticed.append(wait)
        net.barrier().wait()
    return unnoticed


def test_each_wait_is_needed() -> None:
    assert FakeWorld(finds_races=False).run(2, leave_each_out) == [[], []]


def exchange_at_rest(net: Any, fake: FakeDevice) -> tuple[set[str], int]:
    x, other = torch.ones(LARGE, device=fake.device), 1 - net.rank
    num_made = []
    for tag in range(4):
        net.send(x, other, tag)
        net.recv(x, other, tag).wait()
        net.barrier().wait()
        num_made.append(fake.pinned_by.count("MainThread"))
    return {*fake.pinned_by}, num_made[-1]


def test_no_memory_is_pinned_where_heartbeats_are_answered() -> None:
    """The thread that waits pins it, a few chunks for messages of any size and number."""
    for makers, num_made in FakeWorld().run(2, exchange_at_rest):
        assert makers == {"MainThread", "dsgd-staging"}
        assert num_made <= NUM_CHUNKS < LARGE * 4 // CHUNK_BYTES


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
            begun.set()
            y = torch.zeros(10, device=fake.device)
            lane_net.broadcast(y, src=other).wait()
            raise AssertionError("it came through")

    begun = threading.Event()
    lane = net.spawn_lane(fn)
    lane.net.broadcast(x, src=net.rank)
    assert begun.wait(20)
    lane.stop(20)
    net.barrier().wait()


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


def test_a_lane_is_stopped_while_the_device_hangs() -> None:
    FakeWorld().run(2, stop_while_the_device_hangs)


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
