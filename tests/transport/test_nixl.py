"""What is NIXL's own: which messages are read, in which order they arrive, and whose memory it is.

The promises of every transport are tested in contract/.  Functions that run on every rank come
before the tests that run them.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_dsgd import STRATEGIES
from lightning_dsgd.bench import network
from lightning_dsgd.transport import (
    PeerLost,
    Transport,
    TransportError,
    nixl,
    nixl_agent,
    nixl_reads,
)
from lightning_dsgd.transport.nixl import NIXLTransport
from lightning_dsgd.transport.nixl_agent import Memory
from lightning_dsgd.transport.nixl_ranks import Card, who_reads
from lightning_dsgd.transport.process_group import ProcessGroupTransport
from tests.support.doomed import Plan
from tests.support.models import Regression, loader, trainer, weights
from tests.support.nixl import NIXLFitWorld, NIXLNodeWorld, NIXLWorld, has_nixl
from tests.support.worlds import FitWorld, ProcessWorld, shaped
from tests.trainer import test_survival
from tests.transport import test_mesh
from tests.transport.helpers import BIG, died, our_threads, send_and_check, stopped, until

EMPTY = torch.empty(0)
NAMES = tuple(STRATEGIES)
DETERMINISTIC = tuple(
    name for name in NAMES if name not in ("hpsgd", "adpsgd", "eager_sgd", "popsgd", "wagma")
)


# ---- which ranks ----


def test_ranks_of_one_machine_read_each_other_and_those_with_rdma_all() -> None:
    here, there = Card("a", False, ""), Card("b", False, "")
    assert who_reads([here, here, there]) == ([{1}, {0}, set()], "")
    with_rdma = Card("c", True, "")
    assert who_reads([here, with_rdma, Card("d", True, "")]) == ([set(), {2}, {1}], "")
    readers, why_not = who_reads([here, there])
    assert readers == [set(), set()]
    assert why_not == "no two ranks share a machine, or have RDMA devices"


def test_a_rank_without_nixl_is_named() -> None:
    cards = [Card("a", False, ""), Card("a", False, "it is not installed")]
    assert who_reads(cards) == ([set(), set()], "rank 1 cannot use NIXL (it is not installed)")
    assert "rank 0" in who_reads([Card.read(""), cards[0]])[1]


def test_a_card_is_read_as_it_was_written() -> None:
    for card in (Card("a", True, ""), Card("a", False, "it is not installed"), Card.own("why")):
        assert Card.read(card.words) == card


def open_without_nixl(net: Transport) -> tuple[str, str]:
    """On rank 1 it is not installed."""
    if net.rank == 1:
        nixl.installed = lambda: ""
    with pytest.raises(TransportError) as info:
        NIXLTransport(timeout_s=20.0)
    maybe = NIXLTransport(timeout_s=20.0, required=False)
    x = maybe.all_reduce(torch.ones(BIG)).wait()
    assert torch.equal(x, torch.full((BIG,), 2.0))
    maybe.barrier().wait()
    maybe.close()
    return str(info.value), maybe.choice


@has_nixl
def test_where_a_rank_lacks_it_an_error_says_what_to_install() -> None:
    for text, choice in ProcessWorld().run(2, open_without_nixl):
        assert "rank 1 cannot use NIXL (it is not installed)" in text
        assert "pip install nixl-cu12" in text
        assert 'transport="process_group"' in text
        assert choice == "process_group, as rank 1 cannot use NIXL (it is not installed)"


def open_each_another(net: Transport) -> str:
    transport: Any = NIXLTransport if net.rank else ProcessGroupTransport
    with pytest.raises(TransportError) as info:
        transport(timeout_s=20.0)
    return str(info.value)


@has_nixl
def test_ranks_that_differ_in_their_transport_are_all_told() -> None:
    for text in ProcessWorld().run(2, open_each_another):
        assert "the transport must be the same on all ranks, got process_group on rank 0" in text


# ---- memory ----


class Registry:
    """What `Memory` asks an agent for."""

    def __init__(self) -> None:
        self.registered: list[tuple[int, int]] = []

    def register(self, address: int, nbytes: int) -> int:
        self.registered.append((address, nbytes))
        return len(self.registered)

    def introduce(self, registered: int) -> bytes:
        return b"region %d" % registered


def memory_and_registry() -> tuple[Memory, Registry]:
    registry = Registry()
    return Memory(registry), registry  # type: ignore[arg-type]


def test_a_piece_is_used_again_once_no_tensor_uses_it() -> None:
    memory, registry = memory_and_registry()
    first = memory.buffer(1000, torch.float32)
    second = memory.buffer(1000, torch.float32)
    assert len(registry.registered) == 2
    address, view = first.data_ptr(), first[10:]
    del first
    assert memory.buffer(10, torch.int64).data_ptr() not in (address, second.data_ptr())
    del view
    assert memory.buffer(10, torch.int64).data_ptr() == address


def test_what_is_sent_again_and_again_is_read_where_it_is() -> None:
    memory, _ = memory_and_registry()
    x = torch.arange(1 << 19)
    _, copy = memory.lend(x, copy=False)
    assert copy.data_ptr() != x.data_ptr()
    assert torch.equal(copy, x)
    region, itself = memory.lend(x[7:], copy=False)
    assert itself.data_ptr() == x[7:].data_ptr()
    assert (region.address, region.nbytes) == (x.data_ptr(), x.nbytes)
    _, copy = memory.lend(x, copy=True)  # it may change at once
    assert copy.data_ptr() != x.data_ptr()


def test_other_memory_at_the_same_address_is_not_taken_for_what_was_sent() -> None:
    memory, _ = memory_and_registry()
    storage = bytearray(1 << 21)
    for _ in range(3):
        x = torch.frombuffer(storage, dtype=torch.uint8)
        assert memory.lend(x, copy=False)[1].data_ptr() != x.data_ptr()
        del x


def test_small_and_empty_tensors_are_lent_too() -> None:
    memory, _ = memory_and_registry()
    for n in (0, 1, 5):
        x = torch.arange(n)
        assert torch.equal(memory.lend(x, copy=False)[1], x)


# ---- order ----


def messages_of_all_sizes(net: Transport) -> int:
    """Large ones, which are read, before small ones, which are not; two senders to one mailbox."""
    nixl._SMALLEST_BYTES = 5000  # type: ignore[misc]
    net.barrier().wait()
    sizes = [0, 1, 400_000, 5, 10_000, 100, 2_000_001, 3]
    send_and_check(net, sizes)
    x = torch.arange(300_000.0)
    for _ in range(3):
        net.all_reduce(x).wait()
    assert torch.equal(x, torch.arange(300_000.0) * net.world_size**3)
    net.barrier().wait()
    return len(net.wire._memory._held)  # type: ignore[attr-defined]


@has_nixl
def test_messages_of_all_sizes_arrive_in_order() -> None:
    assert all(num_held for num_held in NIXLWorld().run(3, messages_of_all_sizes))


def reads_that_take(num_looks: list[int]) -> str:
    """Offers as many messages at once, reads them all, and gives why they were refused."""
    agent = mock.Mock()
    agent.read.side_effect = [
        mock.Mock(
            was_immediate=not looks, done=mock.Mock(side_effect=[False] * looks + [True] * 99)
        )
        for looks in num_looks
    ]
    mesh = mock.Mock(mailboxes=mock.Mock(claim=mock.Mock(return_value=None)))
    memory = mock.Mock(buffer=mock.Mock(side_effect=lambda n, dtype: torch.empty(n, dtype=dtype)))
    reads, connection = nixl_reads.Reads(mesh, agent, memory, near={1}), mock.Mock(rank=1)
    reads.meet(1, b"")
    for number in range(len(num_looks)):
        code = nixl_reads.DTYPES.index(torch.uint8)
        reads.begin(connection, number, nixl_reads.OFFER_TEXT.pack(0, number, 0, 8, 0, code))
    while reads:
        reads.move_on()
    sent = [bytes(call.args[1].tolist()).decode() for call in connection.send.call_args_list]
    return next(filter(None, sent), "")


def test_reads_that_wait_for_their_connection_are_not_slow() -> None:
    assert reads_that_take([3] * 30) == ""
    assert reads_that_take([1] * 30 + [0] * 5) == ""
    assert "no copy from process to process" in reads_that_take([0] + [1] * 30)


def refuse_on_rank_one(net: Transport) -> list[str]:
    """There a read fails in the midst of messages for one mailbox."""
    agent, count = net.wire._agent, 0  # type: ignore[attr-defined]
    read = agent.read

    def read_some(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count > 3:
            raise OSError("no such memory")
        return read(*args)

    if net.rank == 1:
        agent.read = read_some
    net.barrier().wait()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if net.rank == 0:
            for n in range(40):
                net.send(torch.full((n * 50,), float(n)), 1)
        else:
            for n in range(40):
                x = net.recv(EMPTY, 0).wait()
                assert torch.equal(x, torch.full((n * 50,), float(n))), n
        net.barrier().wait()
        return [str(warning.message) for warning in caught]


@has_nixl
def test_what_cannot_be_read_is_sent_by_tcp_in_order() -> None:
    zero, one = NIXLWorld().run(2, refuse_on_rank_one)
    assert len(zero) == 1
    assert "rank 1 cannot read the memory of rank 0 by NIXL: OSError: no such memory" in zero[0]
    assert "travel by TCP" in zero[0]
    assert not one


# ---- who is lost, and who leaves ----


@has_nixl
@pytest.mark.parametrize(
    ("how", "reason", "within_s"),
    [
        (died, "died (its connection ended without a farewell)", 30.0),
        (stopped, "has not answered for", 60.0),
    ],
)
def test_every_wait_ends_soon_and_names_the_rank_that_is_lost(
    how: Callable[[int], None], reason: str, within_s: float, tmp_path: Path
) -> None:
    world = NIXLWorld(heartbeat_timeout_s=12.0 if how is stopped else 40.0)
    outcomes = world.outcomes(4, test_mesh.wait_each_in_its_way, 1, how, str(tmp_path))
    gone = outcomes.pop(1)
    assert gone.exitcode == -signal.SIGKILL
    for outcome in outcomes:
        assert outcome.error == ""
        rank, why, seconds = outcome.result
        assert rank == 1
        assert why.startswith(reason)
        assert seconds < within_s


def send_thrice(net: Transport, x: torch.Tensor) -> None:
    for _ in range(3):
        net.send(x, 1, copy=False).wait()


def offer_to_one_that_stops(net: Transport) -> float:
    """Which never reads what it is offered."""
    pids = [int(pid) for pid in net.all_gather(torch.tensor([os.getpid()])).wait()]
    net.barrier().wait()
    if net.rank == 1:
        stopped(1)
    x = torch.zeros(BIG)
    begin = time.monotonic()
    try:
        with pytest.raises(PeerLost, match="rank 1 has not answered"):
            send_thrice(net, x)
        return time.monotonic() - begin
    finally:
        os.kill(pids[1], signal.SIGKILL)


@has_nixl
def test_a_sender_does_not_wait_for_ever_for_one_that_has_stopped() -> None:
    world = NIXLWorld(heartbeat_timeout_s=12.0)
    zero = world.outcomes(2, offer_to_one_that_stops)[0]
    assert zero.error == ""
    assert zero.result < 50.0


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def offer_and_stop(net: Any) -> float:
    """Rank 1 begins to read once rank 0, which has offered, is stopped."""
    pids = [int(pid) for pid in net.all_gather(torch.tensor([os.getpid()])).wait()]
    x, word = torch.full((BIG,), 1.0 + net.rank), torch.zeros(1)
    net.all_reduce(x.clone()).wait()  # both have a connection
    if net.rank == 0:
        net.recv(word, 1).wait()
        sending = net.send(x, 1, copy=False)
        stopped(0)
        sending.wait()
        return 0.0
    with net.wire._agent._lock:  # nothing is read
        net.send(word, 0)
        assert until(lambda: is_stopped(pids[0]))
    try:
        return float(net.recv(x, 0).wait().mean())
    finally:
        os.kill(pids[0], signal.SIGCONT)


@has_nixl
def test_what_a_rank_has_offered_is_read_without_its_help() -> None:
    assert NIXLWorld().run(2, offer_and_stop)[1] == 1.0


@has_nixl
@pytest.mark.parametrize("size", [1, BIG])
def test_what_a_rank_sent_before_it_left_arrives(size: int) -> None:
    heard, reason = NIXLWorld().run(2, test_mesh.leave_at_once, size)[0]
    assert heard == [size] * 4
    assert reason == "has left (its training is over)"


def open_and_close(net: Transport) -> None:
    """The first time, UCX opens what it keeps for the process."""
    for cycle in range(5):
        files, threads = test_mesh.open_files(), our_threads()
        inner = NIXLTransport(timeout_s=20.0)
        x = inner.all_reduce(torch.full((BIG,), 1.0)).wait()
        assert x[0] == net.world_size
        inner.barrier().wait()
        inner.close()
        inner.close()
        assert our_threads() == threads
        left = test_mesh.open_files() - files
        assert not (cycle and left), left


@has_nixl
def test_closing_leaves_no_thread_and_no_socket() -> None:
    NIXLWorld().run(2, open_and_close)


def bytes_sent() -> int:
    """By the interface of this node, as the kernel counts."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith(f"{network.INTERFACE}:"))
    return int(line.split(":")[1].split()[8])


def read_across_namespaces(net: Transport, nodes: Any) -> int:
    """The bytes on the link, of the 8 MB that each rank sends."""
    x = torch.full((BIG,), float(net.rank))
    before = bytes_sent()
    net.all_reduce(x).wait()
    assert torch.equal(x, torch.ones(BIG))
    return bytes_sent() - before


@shaped
@has_nixl
def test_ranks_in_network_namespaces_of_one_machine_read_each_other() -> None:
    with network.Network(2, network.Link(1e9)) as nodes:
        sent = NIXLNodeWorld(nodes=nodes).run(2, read_across_namespaces)
    assert max(sent) < BIG


# ---- training ----


def fit_each(names: tuple[str, ...], transport: str) -> dict[str, tuple[str, Tensor]]:
    """The transport of each strategy, and the weights that it ended with."""
    ended = {}
    for name in names:
        L.seed_everything(0, verbose=False)
        model = Regression()
        run = trainer(STRATEGIES[name](transport=transport, timeout_s=20.0), 2, max_epochs=2)
        kinds = []
        model.on_train_start = lambda run=run, kinds=kinds: kinds.append(  # type: ignore[method-assign,misc]
            type(run.strategy.session.net).__name__
        )
        run.fit(model, loader(48), loader(16))
        ended[name] = kinds[0], weights(model)
    return ended


@has_nixl
def test_every_strategy_trains_and_as_it_does_over_tcp() -> None:
    ranks = NIXLFitWorld().run(2, fit_each, NAMES, "nixl")
    over_tcp = FitWorld().run(2, fit_each, DETERMINISTIC, "process_group")[0]
    for name in NAMES:
        assert ranks[0][name][0] == "NIXLTransport"
        assert torch.equal(ranks[0][name][1], ranks[1][name][1]), name
        assert ranks[0][name][1].isfinite().all()
    automatic = NIXLFitWorld().run(2, fit_each, ("local_sgd",), "auto")[0]
    assert automatic["local_sgd"][0] == "NIXLTransport"
    for name in DETERMINISTIC:
        assert torch.equal(ranks[0][name][1], over_tcp[name][1]), name


@has_nixl
@pytest.mark.parametrize(("name", "lost"), [("local_sgd", 0), ("wagma", 2)])
def test_a_rank_is_killed_and_the_others_train_to_the_end(
    name: str, lost: int, tmp_path: Path
) -> None:
    """With `transport="auto"`, which takes NIXL here."""
    plan = Plan(lost, "SIGKILL", at=20)
    world = NIXLFitWorld(timeout_s=60.0)
    outcomes = world.outcomes(3, test_survival.fit, name, str(tmp_path), (plan,), 3)
    test_survival.check(outcomes, [lost], tmp_path)


def test_the_interface_is_found_under_each_of_its_names(monkeypatch: Any) -> None:
    for name in nixl_agent.PACKAGES:
        found = lambda asked, name=name: object() if asked == name else None  # noqa: E731
        monkeypatch.setattr(nixl_agent.importlib.util, "find_spec", found)
        assert nixl_agent.installed() == name
