"""Steps that an average does not shrink: for Adam, and whatever else divides by a second moment.

    u_i  <- f_b u_i                                       in each block b of entries, before u_i is
    f_b  =  1 / sqrt(c_b + (1 - c_b) / P)                 averaged with the others' steps
    c_b  =  mean of u_i u_j / mean of u_i u_i, from 0 to 1

Legend: u_i what rank i's optimizer has just added to its weights, j another rank, P ranks.

Adam makes steps of about the same size, whatever the gradient.  Where P ranks' gradients differ by
noise alone (c = 0), their steps differ too, and the mean of P of them is only 1 / sqrt(P) as large.
Adam that sees the mean gradient, as with DDP, makes its steps as large again.  So the same learning
rate learns more slowly where weights are averaged, and a larger one is too large where the ranks
agree (c = 1).  With f the mean of all steps is everywhere as large as a single one.

**What the ranks tell each other.**  After a step a rank sends every fourth entry of it, rounded to
4 bits, to another rank: to the next one, the one after that, and so on, from another entry on each
time.  It does so once per step, or as often as its algorithm exchanges weights if that is every so
many steps, at least every eighth.  It compares what has come by then with its own step.  So what is
compared may be some steps apart, which matters little: with momentum, steps change slowly.  Both
sums forget 5% with each message.  A block's begin as if the ranks agreed, so f begins at 1.

**Nothing waits, nothing piles up.**  A step takes up to two messages, if they are there, and sends
one.  A rank that two messages have gone to since the last one came back gets no more: it is slow,
or stands still.  Ranks stand still together (`settle`): they tell each other how many messages they
have sent to whom, take what is still under way, and begin to count again.  The n-th message between
two ranks holds the entries from n mod 4 on.

Sends at most |x| / 30 of fp32 weights each time.  Memory: |x|, and two numbers for each block.

**Exchanges that tell it.**  Ok-Topk exchanges the changes of one step and sends none of these
messages.  At the places that are chosen a rank has v of its own, accumulated, and learns T, the sum
over all ranks.  So c_b = sum v (T - v) / (o sum v v), in blocks of 1,024 entries.  Here o says how
much the others' changes count in T for each unit that the rank's own count: P - 1 where all count
alike, less for a rank with more samples, or where others have run out of data.  A rank with o = 0
learns nothing.  What is compared so has accumulated over several steps; a decay is a part of it.
Each rank has a c of its own, which needs no message and loses nothing: all that a rank's steps put
into its residual is applied, whatever f was.

A weight decay that torch's AdamW, NAdam or RAdam subtracts from the weights is no part of u_i: the
ranks agree on it already.  In no paper that this package implements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.hyperparameters import setting
from lightning_dsgd.primitives.rounding import decode, encode
from lightning_dsgd.transport import ANY, Receipt, Transport

BLOCK: Final = 32
"""The number of entries that are scaled alike."""
EXCHANGED_BLOCK: Final = 1024
"""The same where exchanges tell c: of a density of 3%, about 30 entries."""
EVERY: Final = 4
"""One entry of so many is sent, or compared in a dense exchange."""
KEPT: Final = 0.95
"""The share of a sum that stays with each message."""
WIRE: Final = "int4"
LONGEST_PERIOD: Final = 8
"""The most steps from one message to the next."""
MOST_AHEAD: Final = 2
"""The most messages to a rank that have no answer yet."""
MOST_TAKEN: Final = 2
"""The most messages that are compared after one step."""

Decay = tuple[Sequence[slice], float | Tensor]
"""Entries, and the share of them that the optimizer subtracts besides its step."""


def scale_steps(besides: str = "") -> Any:
    """Makes the hyperparameter of an algorithm that averages weights."""
    return setting(
        default=False,
        doc="if True, steps are scaled so that their mean over the ranks is as large as one of "
        "them, for Adam, AdamW and other optimizers that divide by a second moment; takes |x| more "
        f"memory, and |x| / 30 more is sent{besides}",
    )


def made_for(algorithm: Algorithm, net: Transport, x: Tensor) -> Unscaled:
    """Makes the object that learns of every step that an optimizer makes on x.

    Args:
        algorithm: has been started on x
        net: a network of all ranks for messages of its own
        x: the weights
    """
    if not algorithm.traits.scales_steps:
        return Unscaled()
    if algorithm.similarity is not None:
        return ScaledSteps(net, x, algorithm.similarity)
    return StepScaling(net, x, min(algorithm.traits.exchange_period, LONGEST_PERIOD))


class Unscaled:
    """Leaves steps as the optimizer has made them."""

    def update_begins(self, x: Tensor, decays: Sequence[Decay] = ()) -> None:
        """Notes x before a step; `decays` says which entries the step makes smaller besides."""

    def update_ends(self, x: Tensor) -> None:
        """Scales the step that the optimizer has just made."""

    def settle(self) -> None:
        """Ends a series of steps; all ranks stand still."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resume needs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned."""

    def metrics(self) -> dict[str, float]:
        """Returns figures to be logged as `dsgd/...`."""
        return {}


class Similarity:
    """How similar the ranks' steps are, as one rank knows it: c and f of each block."""

    def __init__(self, x: Tensor, world_size: int, block: int = BLOCK) -> None:
        self.block = block
        self._world_size = world_size
        wide = torch.promote_types(x.dtype, torch.float32)
        self.own = torch.zeros(-(-len(x) // block), dtype=wide, device=x.device)  # of u_i u_i
        self.shared = torch.zeros_like(self.own)  # of u_i u_j

    def add(self, own: Tensor, shared: Tensor, kept: float | Tensor = KEPT) -> None:
        """Adds each block's products of a comparison to the sums, which keep a share."""
        is_new = own * (self.own == 0)  # as if the other rank had made the same step
        for total, each in ((self.own, own), (self.shared, shared)):
            total.mul_(kept).add_(is_new).add_(each)

    def compare(self, places: Tensor, mine: Tensor, sums: Tensor, num_others: float) -> None:
        """Adds what this rank has at some places, and what all ranks have there in sum.

        Args:
            places: the places
            mine: what this rank has there
            sums: what all ranks have there
            num_others: how much the others count for each unit that this rank counts
        """
        if not num_others:
            return
        mine, blocks = mine.to(self.own), places // self.block
        own, shared = (
            torch.zeros_like(self.own).index_add_(0, blocks, mine * each)
            for each in (mine * num_others, sums.to(mine) - mine)
        )
        self.add(own, shared)

    def factors(self) -> Tensor:
        """Returns the factor of each block."""
        agreement = (self.shared / self.own).nan_to_num_(1.0).clamp_(0, 1)
        return (agreement + (1 - agreement) / self._world_size).rsqrt_()


class ScaledSteps(Unscaled):
    """Scales one rank's steps on one flat tensor of weights, by what exchanges tell of them."""

    def __init__(self, net: Transport, x: Tensor, similarity: Similarity) -> None:
        self._net = net
        self._len = len(x)
        self.similarity = similarity
        self._u = x.new_zeros(len(similarity.own) * similarity.block)  # x before it; then the step
        self._is_in_step = False
        self._decays: Sequence[Decay] = ()  # of the step that it is in

    def update_begins(self, x: Tensor, decays: Sequence[Decay] = ()) -> None:
        self._u[: len(x)].copy_(x)
        self._decays = decays
        self._is_in_step = True

    def update_ends(self, x: Tensor) -> None:
        """Scales the step, if `update_begins` was called before it."""
        if not self._is_in_step or self._net.world_size == 1:
            return
        self._is_in_step = False
        u = self._u[: len(x)]
        torch.sub(x, u, out=u)
        if self._decays:
            has_moved = _any(u).to(x.dtype)  # else the step was skipped, and the decay with it
        for spans, share in self._decays:
            if isinstance(share, Tensor):
                share = share.reshape(()).to(has_moved)
            weight = has_moved * share
            for span in spans:
                u[span].lerp_(x[span], weight)  # x - u is x as it was
        self._learn()
        more = (self.factors() - 1).to(x.dtype)
        self._u.view(-1, self.similarity.block).mul_(more[:, None])
        x += u

    def _learn(self) -> None:
        """Learns how similar the step is to those of others."""

    def factors(self) -> Tensor:
        """Returns the factor of each block."""
        return self.similarity.factors()

    def metrics(self) -> dict[str, float]:
        return {"step_scale": float(self.factors().mean())} if self._len else {}

    def state_dict(self) -> dict[str, Any]:
        own, shared = self.similarity.own, self.similarity.shared
        return {"len": self._len, "own": own.clone(), "shared": shared.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a state over, but begins anew if its layout of x or its blocks differ."""
        known = self.similarity
        if state["len"] == self._len and len(state["own"]) == len(known.own):
            known.own.copy_(state["own"])
            known.shared.copy_(state["shared"])


class StepScaling(ScaledSteps):
    """Scales steps by what the ranks tell each other of them."""

    def __init__(self, net: Transport, x: Tensor, period: int = 1) -> None:
        super().__init__(net, x, Similarity(x, net.world_size))
        self._period = period
        self._num_steps = 0
        self._num_sent = [0] * net.world_size
        self._num_taken = [0] * net.world_size
        self._incoming: Receipt | None = None

    def settle(self) -> None:
        """Takes the messages still under way; all ranks count from zero again."""
        sent = self._net.all_gather(torch.tensor(self._num_sent)).wait()
        due = int(sum(each[self._net.rank] for each in sent))
        while sum(self._num_taken) < due:
            self._take()
        self._num_sent = [0] * self._net.world_size
        self._num_taken = [0] * self._net.world_size

    def _learn(self) -> None:
        for _ in range(MOST_TAKEN):
            if self._expect().done():
                self._compare(*self._take())
        if self._num_steps % self._period == 0:
            self._tell()
        self._num_steps += 1

    def _tell(self) -> None:
        """Sends a part of this step to a rank, each time another, unless it lags behind."""
        distance = 1 + self._num_steps // self._period % (self._net.world_size - 1)
        partner = (self._net.rank + distance) % self._net.world_size
        if self._num_sent[partner] - self._num_taken[partner] < MOST_AHEAD:
            self._net.send(encode(self._part(self._num_sent[partner]), WIRE), partner)
            self._num_sent[partner] += 1

    def _expect(self) -> Receipt:
        """Posts a receive for the next message, from whichever rank."""
        if self._incoming is None:
            self._incoming = self._net.recv(self._u.new_empty(0, dtype=torch.int8), ANY)
        return self._incoming

    def _take(self) -> tuple[Tensor, int]:
        """Returns the next message, and how many its sender had sent here before."""
        receipt = self._expect()
        code = receipt.wait()
        self._incoming = None
        number = self._num_taken[receipt.source]
        self._num_taken[receipt.source] += 1
        return code, number

    def _compare(self, code: Tensor, number: int) -> None:
        """Adds a comparison with another rank's step to the sums; both steps are rounded alike."""
        part = self._part(number)
        wide = part.to(self.similarity.own.dtype)  # squares of fp16 are too small for it
        mine, theirs = (decode(each, like=wide) for each in (encode(part, WIRE), code))
        own, shared = ((mine * u).view(-1, BLOCK // EVERY).sum(1) for u in (mine, theirs))
        has_moved = _any(mine) & _any(theirs)  # a step of no size, or skipped, tells nothing
        counts = has_moved & (own + shared).isfinite()
        kept = torch.where(counts, KEPT, 1.0)
        own, shared = (torch.where(counts, each, 0.0) for each in (own, shared))
        self.similarity.add(own, shared, kept)

    def _part(self, number: int) -> Tensor:
        """Returns every fourth entry of this rank's step, from entry `number` mod 4 on."""
        return self._u.view(-1, EVERY)[:, number % EVERY].contiguous()


def _any(x: Tensor) -> Tensor:
    """Returns whether an entry is not zero; `x.any()` takes three to five times as long on CPUs."""
    norm: Tensor = torch.linalg.vector_norm(x)
    return norm != 0
