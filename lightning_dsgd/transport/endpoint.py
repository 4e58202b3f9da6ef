"""What all transports share: arguments are checked, groups known, and collectives begun, here.

A transport brings two verbs, `post` and `collect`, on which messages and collectives stand, and
what the contract says of life and death.

**Threads.**  An endpoint belongs to one thread, the training thread or a lane's, which alone
calls collectives and `recv` on it: so its groups need no lock.  Any thread of the rank may `send`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_dsgd.transport import collectives
from lightning_dsgd.transport.collectives import Call, Collective, Group, Verbs
from lightning_dsgd.transport.contract import ANY, Lane, Receipt, Transport, Views, Work
from lightning_dsgd.transport.counters import Counters
from lightning_dsgd.transport.messages import channel_id


class Endpoint(Verbs, Transport):
    """One rank's end of a network; subclasses bring the wire.

    Args:
        rank: this rank
        world_size: P of the whole network
        timeout_s: how long a wait may take
        counters: where sending and waiting is counted
        path: names this endpoint's channels; equal on all the ranks that talk through it
    """

    ends_with_peers = False
    sum_engine = ""

    def __init__(
        self, rank: int, world_size: int, timeout_s: float, counters: Counters, path: str = ""
    ) -> None:
        self.rank = self.job_rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.counters = counters
        self.path = path
        self._messages = channel_id(path, "messages")
        self._groups: dict[tuple[int, ...] | None, Group] = {}
        self._num_lanes = 0

    @property
    def views(self) -> Views:
        """Who trains, and who goes on after a loss; by default, a loss is final."""
        return Views()

    @abstractmethod
    def sub(self, name: str) -> Endpoint: ...

    @abstractmethod
    def start_lane(self, fn: Callable[[Any], None], name: str) -> Lane:
        """Starts a lane that runs `fn` with an endpoint of the path `name`."""

    def spawn_lane(self, fn: Callable[[Any], None], name: str = "lane") -> Lane:
        self._num_lanes += 1
        return self.start_lane(fn, f"{self.path}/{name}-{self._num_lanes}")

    def send(self, x: Tensor, dst: int, tag: int = 0, *, copy: bool = True) -> Work[None]:
        _check_tensor(x)
        self._check_rank("dst", dst)
        return self.post(x, dst, self._messages, tag, 0, copy=copy)

    def recv(self, like: Tensor, src: int, tag: int = 0) -> Receipt:
        if src != ANY:
            self._check_rank("src", src)
        return self.collect(like, src, self._messages, tag, 0)

    def all_reduce(self, x: Tensor, group: Sequence[int] | None = None) -> Work[Tensor]:
        _check_tensor(x)
        call = self._call(group, "all_reduce")
        return self.sum_natively(call, x) or Collective(collectives.all_reduce(x, call))

    def all_gather(self, x: Tensor, group: Sequence[int] | None = None) -> Work[list[Tensor]]:
        _check_tensor(x)
        return Collective(collectives.all_gather(x, self._call(group, "all_gather")))

    def gather_into(
        self, into: Tensor, x: Tensor, sizes: Sequence[int], group: Sequence[int] | None = None
    ) -> Work[Tensor]:
        call = self._call(group, "all_gather")
        _check_parts(into, "into", sizes, call.size)
        _check_tensor(x)
        work = self.spread_natively(call, into, sizes, x, None)
        return work or Collective(collectives.gather_into(into, x, sizes, call))

    def all_to_all(
        self,
        into: Tensor,
        x: Tensor,
        from_each: Sequence[int],
        to_each: Sequence[int],
        group: Sequence[int] | None = None,
    ) -> Work[Tensor]:
        call = self._call(group, "all_to_all")
        _check_parts(into, "into", from_each, call.size)
        _check_parts(x, "x", to_each, call.size)
        work = self.spread_natively(call, into, from_each, x, to_each)
        return work or Collective(collectives.all_to_all(into, x, from_each, to_each, call))

    def broadcast(self, x: Tensor, src: int, group: Sequence[int] | None = None) -> Work[Tensor]:
        _check_tensor(x)
        call = self._call(group, "broadcast")
        if src not in call.members:
            raise ValueError(f"src must be in the group, got src={src} and group={call.members}")
        place = call.members.index(src)
        work = self.broadcast_natively(call, x, place)
        return work or Collective(collectives.broadcast(x, call, place))

    def barrier(self, group: Sequence[int] | None = None) -> Work[None]:
        return Collective(collectives.barrier(self._call(group, "barrier")))

    def exchange(self, x: Tensor, peer: int) -> Work[Tensor]:
        _check_tensor(x)
        call = self._call(sorted((self.rank, peer)), "exchange")
        return self.pair_natively(call, x) or Collective(collectives.exchange(x, call))

    def push(self, x: Tensor, dst: int) -> Work[None]:
        _check_tensor(x)
        call = self._call((self.rank, dst), "push")
        return self.pair_natively(call, x) or call.send(x, 1)

    def pull(self, like: Tensor, src: int) -> Work[Tensor]:
        call = self._call((src, self.rank), "push")
        return self.pair_natively(call, like[:0]) or call.receive(like, 0)

    def expect_at_most(self, nbytes: int) -> None:
        """Does nothing: all ranks are in this process."""

    # ---- by an engine of this network's; None where the network needs messages ----

    def sum_natively(self, call: Call, x: Tensor) -> Work[Tensor] | None:
        """Begins a sum.

        Args:
            call: who takes part, in what, and which call it is; of all four
            x: what this rank adds, and then the sum
        """
        return None

    def broadcast_natively(self, call: Call, x: Tensor, place: int) -> Work[Tensor] | None:
        """Begins a broadcast.

        Args:
            call: who takes part
            x: what the source sends, and the others get
            place: the source's place in the group
        """
        return None

    def spread_natively(
        self,
        call: Call,
        into: Tensor,
        from_each: Sequence[int],
        x: Tensor,
        to_each: Sequence[int] | None,
    ) -> Work[Tensor] | None:
        """Begins to send a part to each member, and to take one from each.

        Args:
            call: who takes part
            into: what will hold the parts that come
            from_each: how many elements come from each member
            x: what leaves
            to_each: how many elements leave for each member; None: all of x for each
        """
        return None

    def pair_natively(self, call: Call, x: Tensor) -> Work[Any] | None:
        """Begins what two ranks do: exchange, or push and pull.

        Args:
            call: the two ranks
            x: what this rank sends; empty if it pulls
        """
        return None

    def _call(self, ranks: Sequence[int] | None, kind: str) -> Call:
        return Call(self, self._group(ranks), kind)

    def _group(self, ranks: Sequence[int] | None) -> Group:
        """Returns the group of these ranks; None gives the same group as a list of all ranks."""
        key = None if ranks is None else tuple(ranks)
        if key not in self._groups:
            members = tuple(range(self.world_size)) if key is None else key
            _check_group(members, self.rank, self.world_size)
            group = Group(members, members.index(self.rank), channel_id(self.path, members))
            self._groups[key] = self._groups.setdefault(members, group)
        return self._groups[key]

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"{name} must be a rank of 0 to {self.world_size - 1}, "
                f"got {name}={rank} on rank {self.rank}"
            )


def _check_tensor(x: Tensor) -> None:
    if x.dim() != 1 or not x.is_contiguous():
        raise ValueError(
            f"tensors on the wire must be one-dimensional and contiguous, got the shape "
            f"{tuple(x.shape)} with the strides {x.stride()}; try x.contiguous().view(-1)"
        )


def _check_parts(x: Tensor, name: str, sizes: Sequence[int], num_members: int) -> None:
    _check_tensor(x)
    if len(sizes) != num_members or sum(sizes) != len(x):
        raise ValueError(
            f"{name} must have a part for each of {num_members} members, of {len(x)} elements "
            f"together, got parts of {list(sizes)}"
        )


def _check_group(members: tuple[int, ...], rank: int, world_size: int) -> None:
    if (
        rank not in members
        or len(set(members)) != len(members)
        or min(members) < 0
        or max(members) >= world_size
    ):
        raise ValueError(
            f"a group must hold this rank, no rank twice and only ranks of 0 to "
            f"{world_size - 1}, got group={members} on rank {rank}"
        )
