"""Sums by NCCL of tensors on a device: on one that is none, with an NCCL that is none, and on GPUs.

The emulated NCCL sums over gloo, on a stream for each communicator, behind what is queued on the
stream of who calls it.  As NCCL does, it mixes sums up unless all ranks call it in one order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dsgd.devices import port_of
from lightning_dsgd.transport import PeerLost, Timeout, native, process_group
from lightning_dsgd.transport.process_group import ProcessGroupTransport
from tests.algorithms import test_slow_kernels
from tests.algorithms.test_on_device import NAMES, check
from tests.support import fake_device
from tests.support.fake_device import FakeDevice, FakeEvent, OnDevice
from tests.support.killed import kill_after
from tests.support.thorough import cases
from tests.support.worlds import AcceleratorWorld, FakeWorld, NCCLWorld
from tests.transport import test_native, test_pairs
from tests.transport.contract.test_in_order import run_in_order
from tests.transport.test_staging import hung

LARGE = 100_000


@dataclass
class FakeWork:
    ended: FakeEvent

    def wait(self) -> None:
        self.ended.hold()


@dataclass
class FakeNCCL:
    """Calls of it return at once."""

    fake: FakeDevice

    def __post_init__(self) -> None:
        self._streams: dict[Any, Any] = {}
        self._by_gloo = dist.all_reduce, dist.broadcast, dist.batch_isend_irecv

    def stream_of(self, group: Any) -> Any:
        return self._streams.setdefault(group, self.fake.new())

    def all_reduce(self, x: Tensor, group: Any, async_op: bool) -> FakeWork:
        return self._do(partial(self._by_gloo[0], group=group), x, group)

    def broadcast(self, x: Tensor, group: Any, async_op: bool, group_src: int) -> FakeWork:
        return self._do(partial(self._by_gloo[1], group=group, group_src=group_src), x, group)

    def batch_isend_irecv(self, calls: list[Any]) -> list[FakeWork]:
        hosts = [self.fake.pinned(len(call.tensor), call.tensor.dtype) for call in calls]
        ends = list(zip(calls, hosts, strict=True))

        def by_gloo() -> None:
            ops = [dist.P2POp(call.op, host, call.peer, call.group) for call, host in ends]
            for work in self._by_gloo[2](ops):
                work.wait()

        begun, stream = self.fake.mark(), self.stream_of(calls[0].group)
        with self.fake.using(stream):
            begun.hold()
            for call, host in ends:
                if call.op is dist.isend:
                    self.fake.copy(host, call.tensor)
            stream.queue.put(by_gloo)
            for call, host in ends:
                if call.op is dist.irecv:
                    self.fake.copy(call.tensor, host)
            return [FakeWork(self.fake.mark())]

    def _do(self, by_gloo: Callable[[Tensor], Any], x: Tensor, group: Any) -> FakeWork:
        host = self.fake.pinned(len(x), x.dtype)
        begun, stream = self.fake.mark(), self.stream_of(group)
        with self.fake.using(stream):
            begun.hold()
            self.fake.copy(host, x)
            stream.queue.put(lambda: by_gloo(host))
            self.fake.copy(x, host)
            return FakeWork(self.fake.mark())


def _group_of_gloo(_: torch.device, __: float) -> Any:
    return dist.new_group(backend="gloo")


@dataclass
class FakeNCCLWorld(FakeWorld):
    """P processes, each with an accelerator and an NCCL that are none.

    The process group has it for the accelerator alone: gloo goes by its name.
    """

    _backend = "cpu:gloo,fake:gloo"

    def _join(self, rank: int, world_size: int, store: str) -> None:
        fake_device.install()  # torch knows the type of device from then on
        super()._join(rank, world_size, store)

    def _open(self) -> ProcessGroupTransport:
        fake: Any = port_of(self._device)
        nccl = FakeNCCL(fake)
        dist.all_reduce = nccl.all_reduce  # type: ignore[assignment]
        dist.broadcast = nccl.broadcast  # type: ignore[assignment]
        dist.batch_isend_irecv = nccl.batch_isend_irecv  # type: ignore[assignment]
        for module in (process_group, native):
            module.make_group = _group_of_gloo  # type: ignore[attr-defined]
        net = ProcessGroupTransport(
            self.timeout_s, self.heartbeat_timeout_s, ("fake",), device=self._device
        )
        assert net._native is not None, net.engines()
        return net


def contract(net: Any, fake: FakeDevice) -> None:
    run_in_order(OnDevice(net, fake.device))  # type: ignore[arg-type]


@pytest.mark.exhaustive
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_contract_holds_on_a_device(world_size: int) -> None:
    FakeNCCLWorld().run(world_size, contract)


@cases("names", now=[["allreduce", "hpsgd", "dpsgd", "sgp", "popsgd_blocking"]], later=[NAMES])
def test_algorithms_train_on_a_device(names: list[str]) -> None:
    """With two ranks, to the bit as with messages."""
    check(FakeNCCLWorld(), names, 2, to_the_bit=True)


@cases(
    "spec",
    now=[*("wagma", "popsgd", "adpsgd", f"sgp:overlap={test_slow_kernels.STEPS - 1}")],
    later=[
        *("wagma:overlap=true", "wagma:node_size=2:group_size=2"),
        "wagma:node_size=2:group_size=2:overlap=true",
        "wagma:node_size=2:group_size=2:overlap=true:num_buckets=4",
        *("eager_sgd:quorum=solo", "hpsgd", "popsgd:wire_dtype=int8", "wagma:wire_dtype=int8"),
    ],
)
def test_sums_and_pairs_wait_for_no_slow_kernel_of_another_rank(spec: str) -> None:
    test_slow_kernels.check(FakeNCCLWorld(timeout_s=20.0), spec)


def sum_up(net: Any, fake: FakeDevice) -> bool:
    """Sums of what has just been made, read at once, by two threads; whether they are right."""
    right = []

    def run(end: Any) -> None:
        for number, dtype in enumerate((torch.float32, torch.bfloat16) * 3):
            x = torch.zeros(LARGE, dtype=dtype, device=fake.device)
            for _ in range(5):
                x.add_(1)
            end.all_reduce(x.add_(net.rank + number)).wait()
            expected = net.world_size * (5 + number) + sum(range(net.world_size))
            right.append(bool((x.clone().cpu() == expected).all()))

    lane = net.spawn_lane(run, "sums")
    run(net.sub("own"))
    lane.join()
    return all(right)


def test_a_sum_is_of_what_was_made_before_and_there_for_what_reads_it() -> None:
    assert FakeNCCLWorld().run(2, sum_up) == [True, True]


def exchange_beside_another(net: Any, fake: FakeDevice) -> float:
    """Rank 1's pair with rank 2 ends while its pair with rank 0, launched before, is held up."""
    x, goes_on = torch.full((LARGE,), float(net.rank), device=fake.device), threading.Event()
    word = torch.empty(0)
    if net.rank != 1:
        if net.rank == 2:
            net.recv(word, 1).wait()
        return float(net.exchange(x, 1).wait().cpu()[-1])
    nccl: Any = dist.batch_isend_irecv.__self__  # type: ignore[attr-defined]
    nccl.stream_of(net._native._groups[0]).queue.put(lambda: goes_on.wait(60))
    with_0 = net.exchange(x, 0)
    assert with_0.arrived.wait(60), "the pair is not launched"
    net.send(word, 2)
    theirs = net.exchange(x, 2).wait()
    assert not with_0.done()
    goes_on.set()
    return float(theirs.cpu()[-1]) + float(with_0.wait().cpu()[-1])


def test_pairs_of_two_colours_run_beside_each_other() -> None:
    assert FakeNCCLWorld(timeout_s=20.0).run(3, exchange_beside_another) == [1.0, 2.0, 1.0]


# ---- a device that does not come to it ----
def sum_on_a_hung_device(net: Any, fake: FakeDevice) -> float:
    x, begin = torch.zeros(10, device=fake.device), time.monotonic()

    def serve(end: Any) -> None:
        end.all_reduce(torch.ones(10, device=fake.device)).wait()

    with hung(fake):
        work = net.all_reduce(x.add_(1))
        assert work.arrived.wait(60), "the sum is not launched"
        with pytest.raises(Timeout, match=r"0.5 s for all_reduce number 0 .* to end on fake:\d"):
            work.wait(0.5)
        assert not work.done()
        lane = net.spawn_lane(serve)
        net.sub("both").barrier().wait()
        lane.stop(20)
    work.wait()
    assert x.tolist() == [2.0] * 10
    net.sub("end").barrier().wait()
    return time.monotonic() - begin


def test_a_hung_device_ends_in_a_timeout_and_holds_up_no_lanes_end() -> None:
    FakeNCCLWorld().run(2, sum_on_a_hung_device)


# ---- NCCL itself ----
def sum_for_ever(net: Any, x: Tensor) -> None:
    while True:
        net.all_reduce(x).wait()


def exchange_for_ever(net: Any, x: Tensor) -> None:
    while net.rank < 2:
        net.exchange(x, 1 - net.rank).wait()
    net.recv(x, 1).wait()


def sum_on_gpus(net: Any, device: torch.device, ends: Callable[..., None] | None) -> None:
    x = torch.full((LARGE,), net.rank + 1.0, device=device)

    def serve(end: Any) -> None:
        for _ in range(20):
            end.all_reduce(torch.ones(LARGE, device=device)).wait()

    lane = net.spawn_lane(serve)
    for _ in range(20):
        y = net.all_reduce(x.clone()).wait()
        assert float(y[-1]) == sum(range(1, net.world_size + 1))
    lane.join()
    for dtype in sorted(native.TAKEN, key=str):
        total = net.all_reduce(torch.ones(LARGE, dtype=dtype, device=device)).wait()
        assert float(total[-1]) == net.world_size, dtype
    if ends is not None:
        if net.rank == 1:
            kill_after(0.5)
        with pytest.raises(PeerLost, match="rank 1"):
            ends(net, x)


@pytest.mark.gpu("cuda")
@pytest.mark.parametrize("backend", ["nccl", None, "cpu:gloo,cuda:nccl"])
def test_nccl_sums_in_one_order(backend: str | None) -> None:
    NCCLWorld(backend=backend).run(4, sum_on_gpus, None)


@pytest.mark.gpu("cuda")
@pytest.mark.parametrize("ends", [sum_for_ever, exchange_for_ever])
def test_a_lost_rank_ends_what_nccl_does(ends: Any) -> None:
    world = NCCLWorld(heartbeat_timeout_s=60.0)
    for rank, outcome in enumerate(world.outcomes(4, sum_on_gpus, ends, limit_s=60.0)):
        assert outcome.error == ("died" if rank == 1 else ""), rank


@pytest.mark.gpu("cuda")
def test_groups_sum_by_nccl() -> None:
    test_native.check_groups(NCCLWorld().run(4, test_native.in_groups))


@pytest.mark.gpu("cuda")
def test_nccl_makes_of_pairs_what_messages_make() -> None:
    test_pairs.check(*(w.run(4, test_pairs.train) for w in (AcceleratorWorld(), NCCLWorld())))
