"""Exchanges and pushes by torch's own calls, over gloo: what they make, and what ends them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.transport import PeerLost, Timeout, TransportError
from lightning_dsgd.transport.native_sends import Pair, Parts
from lightning_dsgd.transport.processes import CPU
from lightning_dsgd.transport.view import View
from tests.support.rank import Rank
from tests.support.worlds import NativeWorld, ProcessWorld
from tests.transport.helpers import died

WORLD = NativeWorld(heartbeat_timeout_s=60.0)
P, N = 4, 1040
SPECS = [
    *("dpsgd", "popsgd:blocking=true", "popsgd:blocking=true:wire_dtype=int8"),
    *("sgp:topology=complete:num_peers=2:wire_dtype=int8", "sgp:topology=bipartite_exponential"),
    *("sgp:topology=random", "sgp:node_size=2"),
]
IN_TIME = [
    *("sgp", "sgp:overlap=2", "sgp:overlap=1:topology=random:num_peers=2", "popsgd"),
    *("adpsgd", "adpsgd:wire_dtype=int8"),
]
"""What they make follows time, and whether a neighbour has stopped yet; no update is lost."""


Found = dict[str, tuple[Tensor, int, Tensor, Tensor]]


def train(net: Any, device: torch.device = CPU) -> Found:
    """A rank's own weights, its bytes, its updates, and the consensus; ranks stop one by one."""
    found = {}
    for spec in SPECS + IN_TIME:
        x = torch.randn(N, generator=torch.Generator().manual_seed(net.rank)).double().to(device)
        made, before = x.clone(), net.counters.bytes_sent
        rank = Rank(net.sub(spec), make_algorithm(spec), x)
        for phase in range(2):
            more = (net.rank + phase) % 3 if spec in IN_TIME or not spec.startswith("sgp") else 0
            for step in range(3 + more):
                update = torch.full_like(x, 0.1 * (step + net.rank))
                made += update
                rank.descend(-update)
            own, sent = rank.settle(), net.counters.bytes_sent - before
        found[spec] = own.cpu(), sent, made.cpu(), rank.finish().cpu()
    return found


def check(by_messages: list[Found], by_torch: list[Found]) -> None:
    """The weights are those of messages to the bit, or no update is lost."""
    for mine, theirs in zip(by_messages, by_torch, strict=True):
        for spec in SPECS:
            assert mine[spec][0].equal(theirs[spec][0]), spec
            assert mine[spec][1] == theirs[spec][1], spec
    for spec in IN_TIME:
        mean = sum(rank[spec][2] for rank in by_torch) / P
        for rank in by_torch:
            torch.testing.assert_close(rank[spec][3], mean, msg=spec)


def test_the_weights_are_those_of_messages_to_the_bit() -> None:
    check(*(world.run(P, train) for world in (ProcessWorld(), WORLD)))


def ask_neighbours(net: Any) -> tuple[int, dict[str, int]]:
    """How many exchanges this rank has made, and how many bytes each engine has carried for it."""
    algorithm = make_algorithm("adpsgd")
    rank = Rank(net, algorithm, torch.randn(N))
    for _ in range(20):
        rank.step(0.1)
    rank.settle()
    sent = {name: traffic.bytes for name, traffic in net.counters.sent.items()}
    algorithm.stop()
    return algorithm.num_exchanges, sent  # type: ignore[attr-defined]


def test_no_weights_of_adpsgd_travel_over_tcp() -> None:
    found = WORLD.run(P, ask_neighbours)
    assert sum(num_exchanges for num_exchanges, _ in found)
    for num_exchanges, sent in found:
        assert sent == {"TCP": 0} | ({"gloo": 4 * N * num_exchanges} if num_exchanges else {})


def wait_for_pairs(net: Any) -> list[str]:
    """Rank 1 comes late, then rank 0 asks for something else, then rank 3 dies."""
    errors: list[str] = []

    def fails(work: Any, error: type[Exception], limit_s: float | None = None) -> None:
        with pytest.raises(error) as info:
            work.wait(limit_s)
        errors.append(str(info.value))

    x = torch.full((3,), float(net.rank))
    if net.rank < 2:
        by_messages = View(net.sub("some"), [0, 1]).exchange(x, 1 - net.rank)  # not of all ranks
        assert by_messages.wait().tolist() == [1.0 - net.rank] * 3
        assert not isinstance(by_messages, Pair)
        if net.rank == 0:
            work, net.counters.watch = net.exchange(x, 1), mock.Mock()
            fails(work, Timeout, 0.2)
            [told] = net.counters.watch.waited.call_args_list
            assert (told.args[2], told.kwargs) == (1, {"in_lane": False})
            net.counters.watch = None
        net.sub("late").barrier([0, 1]).wait()
        if net.rank == 1:
            work = net.exchange(x, 0)
        assert work.wait().tolist() == [1.0 - net.rank] * 3  # may be waited for again
        assert work.done()
        fails(net.exchange(x.long() if net.rank else x, 1 - net.rank), TransportError)
    net.barrier().wait()
    last = net.exchange(x, net.rank ^ 1) if net.rank < 3 else None
    push = net.push(x, 3) if net.rank < 3 else None
    if last is None:
        for other in range(3):
            net.recv(x, other).wait()
        died(3)
    if net.rank < 2:
        last.wait()
    net.send(x, 3)
    fails(net.pull(x, 3) if net.rank < 2 else last, PeerLost)
    fails(push, PeerLost)
    net.fail("has nothing left to do")
    return errors


def test_errors_name_the_pair_and_who_is_lost() -> None:
    zero, one, two, three = (outcome.result for outcome in WORLD.outcomes(P, wait_for_pairs))
    assert three is None
    assert zero[0] == (
        "rank 0 has waited 0.2 s for all to call exchange number 0 of ranks 0, 1; it knows of "
        "calls of ranks 0"
    )
    assert zero[1] == one[0]
    assert "exchange number 1 of ranks 0, 1, but rank 0 has 3 of torch.float32" in one[0]
    died_in = "rank 3 died (its connection ended without a farewell); noticed in: "
    assert two[0] == died_in + "exchange number 0 of ranks 2, 3"
    for errors, rank in ((zero, 0), (one, 1)):
        assert errors[-2] == died_in + f"push number 0 of ranks 3, {rank}"
        assert errors[-1] == died_in + f"push number 0 of ranks {rank}, 3"


def exchange_parts(net: Any) -> None:
    """What they make is in the contract; they are torch's own, and end with a lost rank."""
    me = net.rank
    gather = net.gather_into(torch.empty(3), torch.tensor([float(me)]), [1] * 3)
    swap = net.all_to_all(torch.empty(3), torch.full((3,), float(me)), [1] * 3, [1] * 3)
    for work in (swap, gather):
        assert isinstance(work, Parts)
        assert work.wait().tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(TransportError, match=r"has \d of torch.float32 to gather"):
        net.gather_into(torch.empty(3 + me % 2), torch.ones(1), [1, 1, 1 + me % 2]).wait()
    net.sub("end").barrier().wait()
    if me == 2:
        died(2)
    with pytest.raises(PeerLost, match="rank 2 died"):
        net.all_to_all(torch.empty(3), torch.empty(3), [1] * 3, [1] * 3).wait()


def test_parts_travel_by_torch_and_a_lost_rank_ends_the_wait() -> None:
    assert [outcome.error for outcome in WORLD.outcomes(3, exchange_parts)[:2]] == ["", ""]
