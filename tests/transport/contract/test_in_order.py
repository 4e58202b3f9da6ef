"""What all transports promise to ranks that leave the network in order.

One function per promise, `fn(net)`, called on every rank.  They run one after another in the same
world, as starting processes is what takes the time.
"""

from __future__ import annotations

import traceback

from lightning_dsgd.transport import Transport
from tests.support.thorough import cases
from tests.transport.contract import collectives, counting, lanes, messages
from tests.transport.contract.counting import traffic

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
    collectives.groups_that_are_fixed_do_the_same,
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
