"""What all transports promise to ranks that leave the network in order.

One function per promise, `fn(net)`, called on every rank.  They run one after another in the same
world, as starting processes is what takes the time.
"""

from __future__ import annotations

import traceback

import pytest
import torch

from lightning_dsgd.transport import Transport
from tests.support.thorough import cases
from tests.transport.contract import collectives, counting, lanes, messages
from tests.transport.contract.counting import traffic
from tests.transport.contract.helpers import Simulated

IN_ORDER = (
    messages.messages_of_a_pair_and_tag_stay_in_order,
    messages.receives_are_served_in_the_order_in_which_they_began,
    messages.any_source_takes_each_message_once,
    messages.messages_have_any_length_and_dtype,
    messages.a_sent_tensor_may_change_at_once,
    messages.a_tensor_sent_without_a_copy_may_change_once_it_is_sent,
    messages.pairs_exchange_push_and_pull,
    messages.sub_transports_are_independent,
    collectives.all_reduce_is_exact_where_sums_are,
    collectives.all_reduce_is_the_same_to_the_bit_everywhere,
    collectives.all_reduce_sums_bfloat16_in_float32_where_it_sends_that,
    collectives.all_gather_takes_any_lengths,
    collectives.gather_into_puts_all_in_order,
    collectives.all_to_all_gives_each_its_part,
    collectives.broadcast_comes_from_each_root,
    collectives.nobody_leaves_a_barrier_before_the_last_has_come,
    collectives.groups_are_independent,
    collectives.many_collectives_may_be_under_way,
    collectives.done_becomes_true_without_wait,
    lanes.lanes_do_not_disturb_each_other,
    lanes.threads_of_a_rank_talk_by_messages_to_it,
    lanes.lanes_that_wait_or_poll_can_be_stopped,
    lanes.a_lane_may_be_stopped_at_once,
    counting.waiting_is_counted,
    counting.all_reduces_send_no_more_than_they_must,
    counting.lanes_count_for_their_rank,
)


def run_in_order(net: Transport) -> None:
    for check in IN_ORDER:
        net.barrier().wait()
        try:
            check(net)
        except Exception as error:
            traceback.print_exc()
            raise AssertionError(f"{check.__name__}: {type(error).__name__}: {error}") from error


@cases("world_size", now=[3], later=[1, 2, 4])
def test_all_that_leaves_the_network_in_order(world, world_size):
    world.run(world_size, run_in_order)


TRAFFIC = {
    "all_reduce": [(72, 4)] * 4,
    "all_reduce bf16": [(54, 4)] * 4,  # half of it in float32
    "all_gather": [(16, 3), (28, 3), (40, 3), (36, 3)],  # also those of others
    "broadcast": [(40, 2), (20, 1), (0, 0), (0, 0)],
    "barrier": [(0, 2)] * 4,
    "send": [(56, 1)] * 4,
    "push": [(24, 1)] * 4,
}
"""The bytes and messages that each of four ranks sends in an operation."""


def test_traffic_is_the_same_on_all_transports(world):
    ranks = world.run(4, traffic)
    assert {name: [rank[name] for rank in ranks] for name in ranks[0]} == TRAFFIC


def messages_of_a_gather(net: Transport) -> tuple[list[int], int]:
    before = net.counters.messages_sent
    gathered = net.all_gather(torch.tensor([net.rank])).wait()
    return [int(x) for x in gathered], net.counters.messages_sent - before


def test_a_gather_sends_a_message_for_each_other_rank_whatever_their_number():
    for world_size in (1, 2, 3, 5, 6, 7):
        expected = [*range(world_size)], world_size - 1
        assert Simulated().run(world_size, messages_of_a_gather) == [expected] * world_size


def sum_of_a_large_and_small_ones(net: Transport, dtype: torch.dtype, large: float) -> float:
    x = torch.full((9,), 1.0 if net.rank else large, dtype=dtype)
    net.all_reduce(x).wait()
    assert x.dtype == dtype
    assert len(x.unique()) == 1
    return float(x[0])


@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 2048.0), (torch.bfloat16, 256.0)])
def test_sums_of_halves_lose_nothing_until_they_are_rounded_once(dtype, large):
    """To the large number a half cannot add 1, and so would lose one rank's share after another."""
    for world_size in (4, 7, 8):
        expected = float(torch.tensor(large + world_size - 1).to(dtype))
        assert expected != large
        sums = Simulated().run(world_size, sum_of_a_large_and_small_ones, dtype, large)
        assert sums == [expected] * world_size


def name_all_ranks_or_none(net: Transport) -> list[float]:
    sums = []
    for call in range(4):
        named = [*range(net.world_size)] if (net.rank + call) % 2 else None
        sums.append(float(net.all_reduce(torch.tensor([float(call)]), named).wait()))
    return sums


def test_a_list_of_all_ranks_and_none_are_one_group():
    assert Simulated().run(2, name_all_ranks_or_none) == [[0.0, 2.0, 4.0, 6.0]] * 2
