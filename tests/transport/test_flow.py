"""What nobody has asked for has a bound, and nobody waits for ever: `transport/memory.py`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_dsgd.transport import ANY, memory
from lightning_dsgd.transport.memory import Window
from tests.support.fake_device import FakeDevice
from tests.support.mpi import MPIJob, MPIWorld, every_mpi
from tests.support.thorough import cases, tries
from tests.support.worlds import FakeWorld, ProcessWorld
from tests.transport.contract.test_in_order import run_in_order
from tests.transport.helpers import until

KIB = 1 << 10
SMALL = mock.patch.multiple(memory, WINDOW_BYTES=256 * KIB, CREDIT_BYTES=32 * KIB)
FOR_TWO = mock.patch.multiple(memory, WINDOW_BYTES=0, CREDIT_BYTES=0)
NO_ROOM = mock.patch.object(Window, "admit", return_value=False)


def test_a_window_has_room_for_what_is_not_taken_yet_and_for_what_was_asked_for() -> None:
    window, small, mailbox = Window(), 8 * KIB, b"mailbox"
    with SMALL:
        admitted = sum(window.admit(1, small) for _ in range(100))
        assert admitted * small == (256 + 32) * KIB
        assert not window.admit(1, small)
        assert window.admit(1, 100)  # a short one has more room
        assert window.admit(2, small), "each rank has a window of its own"
        assert not window.admit_if_asked(1, mailbox, small)
        window.hear_asked(1, mailbox)
        assert window.admit_if_asked(1, mailbox, small)
        assert not window.admit_if_asked(1, mailbox, small), "it was asked for once"
        window.hear_taken(1, 100 + small)
        assert not window.admit(1, small), "what was asked for takes room too"
        window.hear_taken(1, small)
        assert window.admit(1, small)
        # Two of the largest message have room, whatever its size.
        assert [window.admit(3, 1000 * KIB) for _ in range(3)] == [True, True, False]


def lying(net: Any) -> int:
    """The bytes that lie here unasked."""
    queues = list(net.mesh.mailboxes._arrived.values())
    return sum(payload.nbytes for queue in queues for _, _, payload, *_ in list(queue))


def send_to_one_that_does_not_receive(net: Any, device: torch.device) -> int:
    """Returns how much lay there, once all that had room had come, and takes all of it then."""
    xs = [torch.full((8 * KIB,), float(i), device=device) for i in range(40)]  # of 32 KiB
    word = torch.zeros(1)
    with SMALL:
        if not net.rank:
            lent = [net.send(x, 1, copy=False) for x in xs[:20]]
            for x in xs[20:]:
                net.send(x, 1)
            net.recv(word, 1).wait()
            net.send(word, 1, tag=1)  # a short one has room, and comes behind the others
            assert not lent[-1].done(), "the receiver has no room, and has not asked"
            net.recv(word, 1, tag=1).wait()
            return all(work.done() for work in lent)
        assert until(lambda: bool(net.mesh.mailboxes._held))
        net.send(word, 0)
        net.recv(word, 0, tag=1).wait()
        most = lying(net)
        for i in range(40):
            assert net.recv(xs[0], 0).wait().tolist()[::4096] == [i, i]
            most = max(most, lying(net))
        net.send(word, 0, tag=1)
        assert not net.mesh.mailboxes._held
        return most


def from_the_cpu(net: Any) -> int:
    return send_to_one_that_does_not_receive(net, torch.device("cpu"))


def from_a_device(net: Any, fake: FakeDevice) -> int:
    return send_to_one_that_does_not_receive(net, fake.device)


def test_a_rank_that_does_not_receive_is_not_filled() -> None:
    for world, fn in ((ProcessWorld(), from_the_cpu), (FakeWorld(), from_a_device)):
        all_left, most = world.run(2, fn)
        assert all_left
        assert 256 * KIB <= most <= (256 + 32) * KIB


def exchange_at_random(net: Any, seed: int) -> None:
    """What comes through without any bound: each message is sent before a receive waits for it."""
    draw, events = random.Random(seed), []
    for number in range(150):
        src, dst = draw.sample(range(net.world_size), 2)
        tag = draw.choice([0, 1, 2, 3])
        events.append((number, src, dst, tag, True))
        events.append((number + draw.expovariate(0.05), src, dst, tag, False))
    sent: dict[Any, list[float]] = {}
    found: dict[Any, list[float]] = {}
    lent, asked = [], []
    for at, src, dst, tag, is_send in sorted(events):
        box = ANY if tag == 3 else src, dst, tag
        if is_send:
            sent.setdefault(box, []).append(at)
            if net.rank == src:
                x = torch.full((draw.choice([1, 10, 20_000]),), float(at))
                lent.append(net.send(x, dst, tag, copy=at % 2 == 0))
        elif net.rank == dst:
            asked.append((box, net.recv(torch.empty(0), box[0], tag)))
            if at % 1 < 0.5:
                asked[-1][1].wait()
    for box, receipt in asked:
        found.setdefault(box, []).append(float(receipt.wait()[-1]))
    for work in lent:
        work.wait()
    for box, values in found.items():
        assert (sorted(values) if box[0] == ANY else values) == sent[box], box


def exchange_with_little_room(net: Any, seed: int) -> None:
    with NO_ROOM if seed % 2 else SMALL:
        exchange_at_random(net, seed)
        net.barrier().wait()


@pytest.mark.parametrize("seed", tries(8, fast=2))
def test_nobody_waits_for_ever_with_little_room(seed: int) -> None:
    ProcessWorld().run(3, exchange_with_little_room, seed)


def keep_the_contract(net: Any) -> None:
    with FOR_TWO:
        run_in_order(net)
        net.barrier().wait()


@cases("world_size", now=[3], later=[2, 4])
def test_the_contract_holds_with_little_room(world_size: int) -> None:
    ProcessWorld().run(world_size, keep_the_contract)


@pytest.mark.exhaustive
@every_mpi
def test_the_contract_holds_over_mpi(python: str, mpi_jobs: Callable[[str], MPIJob]) -> None:
    MPIWorld(job=mpi_jobs(python)).run(3, keep_the_contract)
