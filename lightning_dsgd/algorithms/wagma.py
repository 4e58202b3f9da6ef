"""WAGMA-SGD (Li et al., TPDS 2021, https://arxiv.org/abs/2005.00124), Algorithm 2.

    W' <- W + U(G(W))                              the optimizer's step
    sum <- wait_avoiding_group_allreduce(W', t)    t + 1 not a multiple of tau
    W <- sum / S            if this rank's W' is in the sum
    W <- W' + (sum / S - V)        if it came too late: V is what was in the sum in its place
    W <- (1/P) allreduce(W')                       t + 1 a multiple of tau

Legend: W weights (x), V the weights that a rank published last, with the corrections since; G
gradient, U the optimizer, t the step, P ranks, S group_size, tau sync_period, g group_period.

Differs from the paper: for every sum that a late rank has missed, it adds the difference between
the group's mean and its contribution, as a correction.  In a group these corrections add up to
zero, so the mean of the ranks is the start plus all updates of all ranks.  The paper's rule
(`paper=True`) uses the newest sum, once:

    W <- (sum + W') / (S + 1)

It pulls a late rank back towards its older weights: 30% of all updates is lost if two of eight
ranks are late at random.  The metric `updates_kept` is the share that is not.  `paper=True` is
Algorithm 2 as printed: that rule, no grace, and tau = 10 unless another period is set.

Also different: any P and S (`topology.groups`); tau is 100 by default and not 10, as ranks wait for
the slowest at global averages; a rank that has run out of data continues
to contribute its last W'; a round may wait a little for a rank before it contributes stale weights
(`grace_s`).

Not in the paper: with `overlap`, no rank waits for its group.  Every rank publishes at each of its
steps and adds the corrections that have arrived by then, those of a global average at the latest
when the next one is due.  A contribution is less than tau steps old.

Also not in the paper: `group_period`.  The sums are those of steps g, 2g, 3g, ...; the tau / g-th
of them is the global one.  In the steps between, a rank neither sends nor waits.

Nor is `node_size`: the ranks of a node average their gradients, and so hold the same weights.  P
and S count nodes then, and each rank runs all this for its own shard of x, with the ranks of its
place on other nodes.  So a node sends 2(S-1)/S |x| in all, whatever the number of its ranks.  With
`num_buckets` it averages its gradients in so many pieces, during the backward pass.

Nor is `wire_dtype`.  What is sent is the difference to the last global average, or to the start,
rounded; each rank keeps in its own weights what it has rounded off (`GroupSums` in
primitives/quantised.py).

A step counts once the device has made it: with `overlap` a thread is at most a step ahead of that.

Waits for the group's sum (`overlap=False`) and, every tau steps, for every rank.  Sends 2(S-1)/S
|x| every g steps, 2(P-1)/P |x| at a global average instead, and log2 P activations of 24 bytes
each time.  A `wire_dtype` divides the bytes by 2, 3.88 or 7.53.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_dsgd.agreement import largest
from lightning_dsgd.algorithm import ORDINARY, Algorithm, Conditions, Profile, Traits
from lightning_dsgd.devices import is_on_host, port_of
from lightning_dsgd.hyperparameters import at_least, setting
from lightning_dsgd.primitives import nodes, quantised, rounding, step_scaling, topology
from lightning_dsgd.primitives.own_device import await_mark
from lightning_dsgd.primitives.published import Contributed, ContributedAhead, InPlace
from lightning_dsgd.primitives.wait_avoiding import Grace, WaitAvoiding, exact
from lightning_dsgd.transport import Transport


@dataclass
class WAGMA(Algorithm):
    """Averages the weights in small, changing groups that do not wait for late ranks.

    Every `sync_period` steps all ranks average together.
    """

    name: ClassVar[str] = "wagma"
    profile: ClassVar[Profile] = Profile(
        when="every `group_period` steps; globally every `sync_period` steps",
        with_whom="a group of `group_size` ranks that changes every time",
        sends="2(S-1)/S |x| / `group_period`",
        memory="2 |x|; 3 |x| with `overlap`, on a device 4 |x|; none with an infinite grace and no "
        "`overlap`; 4 |x| more in a sum with a `wire_dtype`; that of a shard and |g| with a "
        "`node_size`",
    )

    printed: ClassVar[dict[str, Any]] = {
        "grace_s": 0,
        "overlap": False,
        "group_period": 1,
        "wire_dtype": "float32",
        "node_size": None,
        "scale_steps": False,
    }

    pieces_option = nodes.PIECES_OPTION

    group_size: int | None = at_least(
        1,
        default=None,
        doc="number of ranks in a group; None means the power of two nearest to sqrt(world_size): "
        "2 for 2 to 7 ranks, 4 for 8 to 31",
    )
    sync_period: int | None = at_least(
        1,
        default=None,
        doc="number of steps from one global average to the next; None means 100, or the paper's "
        "10 with `paper=True`",
    )
    grace_s: float | None = at_least(
        0,
        default=None,
        doc="seconds that a started round waits for this rank before it uses the rank's last "
        "published weights; None means an eighth of the duration of its last step; infinity waits "
        "for every rank of the group",
    )
    overlap: bool = setting(
        default=False, doc="if True, do not wait for the group's average; apply it when it arrives"
    )
    group_period: int = at_least(
        1,
        default=1,
        doc="number of steps from one average to the next, in groups or global; `sync_period` must "
        "be a multiple of it",
    )
    wire_dtype: str = rounding.wire_dtype("stays in the weights of the rank that has rounded")
    node_size: int | str | None = nodes.node_size(
        "average one shard of the weights each with the ranks of other nodes; groups are of nodes"
    )
    num_buckets: int | None = nodes.num_buckets()
    scale_steps: bool = step_scaling.scale_steps()
    paper: bool = setting(
        default=False,
        doc="if True, the algorithm is as printed: the paper's period, no grace, and the paper's "
        "rule, by which a late rank loses a part of its update",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sync_period is None:
            self.sync_period = 10 if self.paper else 100

    @property
    def period(self) -> int:
        """The number of steps from one global average to the next."""
        assert self.sync_period is not None
        return self.sync_period

    @property
    def hierarchical(self) -> bool:
        """Whether ranks of a node make their steps together."""
        return self.node_size is not None

    @property
    def team_size(self) -> int:
        """The number of ranks on a node, which hold the same weights."""
        return 1 if self.node is None else self.node.size

    @property
    def traits(self) -> Traits:
        return Traits(
            uses_gradient=self.hierarchical,  # of ranks of the same node
            exchange_period=self.group_period,
            could_overlap=not (self.overlap or self.paper or self.grace_s == math.inf),
            takes_pieces=self.hierarchical and self.num_buckets is not None,
            keeps_updates=not self.paper,
            scales_steps=self.scale_steps,
            looks_itself=True,
        )

    def num_copies(
        self, world_size: int, *, is_claimed: bool = False, on_device: bool = False
    ) -> float:
        copies = 0.0 if self.grace_s == math.inf else 2.0
        if self.overlap:
            copies = 4.0 if on_device else 3.0
        if self.wire_dtype != "float32":
            copies += 4  # in a sum
        if self.node_size is None:
            return copies
        return 1 + copies / (1 if isinstance(self.node_size, str) else self.node_size)

    def check_hyperparameters(self) -> None:
        super().check_hyperparameters()
        nodes.check_num_buckets(self.num_buckets, is_hierarchical=self.hierarchical)
        if self.period % self.group_period:
            num_averages = max(1, round(self.period / self.group_period))
            raise ValueError(
                "sync_period must be a multiple of group_period, got "
                f"sync_period={self.sync_period} with group_period={self.group_period}; try "
                f"sync_period={num_averages * self.group_period}"
            )

    def check(self, world_size: int, conditions: Conditions = ORDINARY) -> None:
        super().check(world_size, conditions)
        nodes.check_never_scaled(self.num_buckets, conditions)
        size, most, of_what = self.group_size, world_size, "world_size"
        if self.node_size is not None:
            nodes.check_node_size(self.node_size, world_size, conditions)
            most //= nodes.ranks_per_node(self.node_size, conditions)
            of_what = "the number of nodes"
        if size is not None and size > most:
            raise ValueError(
                f"group_size must be at least 1 and no larger than {of_what}, got "
                f"group_size={size} with {of_what}={most}; "
                f"try group_size={self.usual_size(most)}"
            )

    def usual_size(self, world_size: int) -> int:
        """Returns the number of ranks in a group if `group_size` is None."""
        return topology.near_sqrt(world_size)

    def start(self, net: Transport, x: Tensor, conditions: Conditions = ORDINARY) -> None:
        super().start(net, x, conditions)
        self.node: nodes.Node | None = None
        if self.node_size is not None:
            node_size = nodes.ranks_per_node(self.node_size, conditions)
            self.node = nodes.Node(net, node_size, x, self.num_buckets)
            net, x = self.node.across(net), self.node.shard(x)
        self.across = net  # where x is averaged: all of it among all, or a shard between nodes
        self.size = self.group_size or self.usual_size(net.world_size)
        self.step = 0  # of the rank that has made the most, where all stand still
        self.last_global = -1
        self.x = x
        self.groups = self.make_groups(net)
        self.grace = Grace(net, self.grace_s)
        self.mine = self._contribution(x)
        self.member = GroupMember(
            self.groups,
            x,
            self.mine,
            overlap=self.overlap,
            takes_last=not self.traits.keeps_updates,  # under the paper's rule
        )
        self.staleness = self.member.staleness
        self.sums = None  # in full
        if self.wire_dtype != "float32":
            self.sums = quantised.GroupSums(self.wire_dtype, reference=x.clone())
        self.engine = self._engine(net)

    def make_groups(self, net: Transport) -> Groups:
        """Returns which ranks sum up in each round."""
        return Groups(
            rank=net.rank,
            world_size=net.world_size,
            size=self.size,
            group_period=self.group_period,
            sync_period=self.period,
        )

    def _engine(self, net: Transport, first_version: int = 0) -> WaitAvoiding:
        all_reduce = exact if self.sums is None else self.sums.all_reduce
        return WaitAvoiding(net, self.member, self.grace, first_version, all_reduce)

    def _contribution(self, x: Tensor) -> Contributed | ContributedAhead | _Paper | InPlace:
        if not self.traits.keeps_updates:
            return _Paper(x)
        if self.grace.is_endless and not self.overlap:
            return InPlace(x)
        if self.overlap and not is_on_host(x):
            return ContributedAhead(self.net, x)
        return Contributed(x, while_summing=self.overlap)

    def gradient_made(self, g: Tensor, begin: int) -> None:
        assert self.node is not None
        self.node.gradient_made(g, begin)

    def before_update(self, x: Tensor, g: Tensor) -> None:
        if self.node is not None:
            self.num_active = self.node.average(g)

    def after_update(self, x: Tensor) -> None:
        if self.node is not None:
            self.node.give_to_idle(x, self.num_active)
        self.step += 1
        self._end_step(x)
        if self.step % self.group_period == 0:
            self._arrive(self._newest_version())
        if self.node is not None:
            self.node.gather(x)
        self.grace.step_begins()

    def _end_step(self, x: Tensor) -> None:
        """Ends a step; with overlap, the host may run a step ahead of the device."""
        if self.overlap:
            self.mine.publish(self.x, self._newest_version())
            self.grace.step_ends()
            return
        made = port_of(x.device).mark()
        if self.step % self.group_period == 0 and not made.has_passed():
            await_mark(self.net, made)
        self.grace.step_ends(made)

    def _newest_version(self) -> int:
        """Returns the round at which this rank has arrived last, or arrives now."""
        return self.step // self.group_period - 1

    def _arrive(self, version: int) -> None:
        if not self.overlap:
            self.engine.arrive(version)
        elif self.groups.is_global(version):
            self.engine.arrive(version, wait_for=self.last_global)
            self.last_global = version
        else:
            self.engine.arrive(version, wait_for=-1)

    def settle(self, x: Tensor) -> None:
        if self.node is not None:
            self._make_steps_of_the_node(x, self.node)
        version = self.engine.settle()
        if self.node is not None:
            self.node.gather(x)
        # All go on from the step of the rank that has made the most.
        [self.step] = [version] if self.group_period == 1 else largest(self.net, self.step)
        self.last_global = -1
        self.grace.stand_still()

    def _make_steps_of_the_node(self, x: Tensor, node: nodes.Node) -> None:
        """Makes steps with the node's other ranks until none of them makes a step."""
        while num_active := node.serve(x):
            self.num_active = num_active
            self.after_update(x)

    def stop(self) -> None:
        if self.node is not None:
            self.node.stop()
        self.engine.stop()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"step": self.step}
        if self.sums is not None and self.sums.reference is not None:
            state["reference"] = self.sums.reference.clone()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.engine.stop()
        self.step = state["step"]
        newest, net = self._newest_version(), self.across.sub("resumed")
        self.mine.restart(self.x, newest)
        reference = state.get("reference")
        if self.sums is not None:
            self.sums.reference = None if reference is None else reference.to(self.x, copy=True)
        self.engine = self._engine(net, newest + 1)

    def metrics(self) -> dict[str, float]:
        counts = dict(self.staleness)  # at once: the lane goes on counting
        contributions = sum(counts.values())
        if not contributions:
            return {}
        return {
            "staleness": sum(k * n for k, n in counts.items()) / contributions,
            "staleness_max": float(max(counts)),
            "late_share": 1 - counts.get(0, 0) / contributions,
        }


@dataclass(frozen=True)
class Groups:
    """Says which ranks sum up in each round.

    Args:
        rank: this rank
        world_size: P
        size: S
        group_period: how many steps there are from one round to the next
        sync_period: how many steps there are from one global average to the next
    """

    rank: int
    world_size: int
    size: int
    group_period: int
    sync_period: int

    def of(self, version: int) -> Sequence[int]:
        """Returns the ranks with which this one sums up in a round."""
        if self.is_global(version):
            return range(self.world_size)
        return topology.group_of(self.rank, version, self.world_size, self.size)

    def is_global(self, version: int) -> bool:
        """Returns whether all ranks average together in a round."""
        return (version + 1) * self.group_period % self.sync_period == 0


class GroupMember:
    """Brings this rank's weights to the sums in its groups: a `wait_avoiding.Member`.

    The collective's lane calls it, between sums.  Without overlap the training thread waits while
    x is read or written here; with overlap, `mine` guards what both threads use.

    Attributes:
        staleness: how many contributions were so many rounds old

    Args:
        groups: which ranks sum up in each round
        x: the weights
        mine: what this rank contributes, and how it takes a sum over
        overlap: whether the training thread goes on during a sum
        takes_last: whether a rank that is late at a global average takes the mean as it is
    """

    def __init__(
        self,
        groups: Groups,
        x: Tensor,
        mine: Contributed | ContributedAhead | _Paper | InPlace,
        *,
        overlap: bool,
        takes_last: bool,
    ) -> None:
        self.staleness: Counter[int] = Counter()
        self._groups = groups
        self._x = x
        self._mine = mine
        self._overlap = overlap
        self._takes_last = takes_last

    def group(self, version: int) -> Sequence[int]:
        return self._groups.of(version)

    def is_global(self, version: int) -> bool:
        return self._groups.is_global(version)

    def activator(self, version: int) -> int | None:
        return None

    def arrived(self, version: int) -> None:
        if not self._overlap:
            self._mine.publish(self._x, version)

    def late(self, version: int) -> None:
        self.arrived(version)

    def contribute(self, version: int) -> Tensor:
        contribution = self._mine.contribution()
        # With overlap, a rank may be ahead of the version that its lane is at.
        self.staleness[max(0, version - self._mine.contributed_at)] += 1
        return contribution

    def reduced(self, version: int, group_size: int) -> None:
        self._mine.reduced(group_size)
        in_time = self._mine.contributed_at == version
        is_last = self._takes_last and self.is_global(version)
        if not self._overlap and (in_time or is_last):
            self._mine.take(self._x)

    def settled(self, version: int) -> None:
        self._mine.publish(self._x, version)


class _Paper:
    """Applies the paper's rule in place of `Contributed`: W <- (sum + W') / (S + 1) if late.

    Each newest sum is applied once.  A sum of this rank alone is left out.
    """

    contributed_at = -1

    def __init__(self, x: Tensor) -> None:
        self._published, self._sum = x.clone(), torch.empty_like(x)
        self._published_at = -1
        self._num_summed = 0  # ranks in the sum that has not been worked in yet

    def publish(self, x: Tensor, step: int) -> None:
        self._published.copy_(x)
        self._published_at = step
        if self._num_summed > 1:
            x.add_(self._sum).div_(self._num_summed + 1)
        self._num_summed = 0

    def restart(self, x: Tensor, step: int) -> None:
        self._num_summed = 0
        self.publish(x, step)

    def contribution(self) -> Tensor:
        self.contributed_at = self._published_at
        return self._sum.copy_(self._published)

    def reduced(self, group_size: int) -> None:
        self._num_summed = group_size

    def take(self, x: Tensor) -> None:
        torch.div(self._sum, self._num_summed, out=x)
        self._num_summed = 0
