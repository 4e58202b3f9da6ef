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
time.  It does so as often as its algorithm exchanges weights, at least every eighth step.  It waits
for nobody: it compares what has come by then with its own step.  So what is compared may be some
steps apart, which matters little: with momentum, steps change slowly.  Both sums forget 5% with
each message.  They begin as if the ranks agreed, so f begins at 1.

**Nothing waits, nothing is left.**  Ranks stand still together (`settle`): they count what was sent
to whom, and take what is still under way.

Sends |x| / 30 of fp32 weights each time.  Memory: |x| and 1/16 of it.

In no paper that this package implements.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.hyperparameters import setting
from lightning_dsgd.primitives.rounding import decode, encode
from lightning_dsgd.transport import ANY, Receipt, Transport

BLOCK: Final = 32
"""Entries that are scaled alike."""
EVERY: Final = 4
"""One of so many is sent."""
KEPT: Final = 0.95
"""What a sum keeps with each message."""
WIRE: Final = "int4"
LONGEST_PERIOD: Final = 8
"""In steps, from one message to the next."""


def scale_steps() -> Any:
    """The hyperparameter of an algorithm that averages weights."""
    return setting(
        default=False,
        doc="if True, steps are scaled so that their mean over the ranks is as large as one of "
        "them, for Adam, AdamW and other optimizers that divide by a second moment; takes |x| more "
        "memory, and |x| / 30 more is sent",
    )


def made_for(algorithm: Algorithm, net: Transport, x: Tensor) -> Unscaled:
    """What who drives this algorithm tells of every step that an optimizer makes on x.

    Args:
        algorithm: whose hyperparameter says whether steps are scaled
        net: the network, with channels of its own
        x: the weights
    """
    if not algorithm.scales_steps:
        return Unscaled()
    return StepScaling(net, x, min(algorithm.exchange_period, LONGEST_PERIOD))


class Unscaled:
    """Steps stay as the optimizer has made them."""

    def update_begins(self, x: Tensor) -> None:
        """The optimizer is about to step."""

    def update_ends(self, x: Tensor) -> None:
        """It has."""

    def settle(self) -> None:
        """All ranks stand still."""

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave."""

    def metrics(self) -> dict[str, float]:
        """Figures to be logged as `dsgd/...`."""
        return {}


class StepScaling(Unscaled):
    """One rank's steps on one flat tensor of weights.

    Args:
        net: the network, with channels of its own
        x: the weights
        period: number of steps from one message to the next
    """

    def __init__(self, net: Transport, x: Tensor, period: int = 1) -> None:
        num_blocks = -(-len(x) // BLOCK)
        self._net = net
        self._u = x.new_zeros(num_blocks * BLOCK)  # x before the step, and then the step
        wide = torch.promote_types(x.dtype, torch.float32)
        self._own = torch.zeros(num_blocks, dtype=wide, device=x.device)  # sums of u_i u_i
        self._shared = torch.zeros_like(self._own)  # of u_i u_j
        self._is_known = False
        self._period = period
        self._num_steps = 0
        self._num_told = 0
        self._num_sent = [0] * net.world_size
        self._num_heard = [0] * net.world_size
        self._incoming: Receipt | None = None

    def update_begins(self, x: Tensor) -> None:
        self._u[: len(x)].copy_(x)

    def update_ends(self, x: Tensor) -> None:
        """Scales the step."""
        if self._net.world_size == 1:
            return
        u = self._u[: len(x)]
        torch.sub(x, u, out=u)
        while (receipt := self._expect()).done():
            self._compare(*self._take(receipt))
        if self._num_steps % self._period == 0:
            self._tell()
        self._num_steps += 1
        self._u.view(-1, BLOCK).mul_((self.factors() - 1).to(x.dtype)[:, None])
        x += u

    def settle(self) -> None:
        """All ranks stand still; takes what is still under way."""
        sent = self._net.all_gather(torch.tensor(self._num_sent)).wait()
        due = int(sum(each[self._net.rank] for each in sent))
        while sum(self._num_heard) < due:
            self._take(self._expect())

    def factors(self) -> Tensor:
        """Of each block."""
        agreement = (self._shared / self._own).nan_to_num_(1.0).clamp_(0, 1)
        return (agreement + (1 - agreement) / self._net.world_size).rsqrt_()

    def metrics(self) -> dict[str, float]:
        return {"step_scale": float(self.factors().mean())}

    def state_dict(self) -> dict[str, Any]:
        return {"own": self._own.clone(), "shared": self._shared.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._own.copy_(state["own"])
        self._shared.copy_(state["shared"])
        self._is_known = True

    def _tell(self) -> None:
        """Sends a part of this step to a rank that is another one each time."""
        distance = 1 + self._num_told % (self._net.world_size - 1)
        partner = (self._net.rank + distance) % self._net.world_size
        self._net.send(encode(self._part(self._num_told), WIRE), partner)
        self._num_sent[partner] += 1
        self._num_told += 1

    def _expect(self) -> Receipt:
        """The next message, of whichever rank."""
        if self._incoming is None:
            self._incoming = self._net.recv(self._own.new_empty(0, dtype=torch.int8), ANY)
        return self._incoming

    def _take(self, receipt: Receipt) -> tuple[Tensor, int]:
        """A message, and how many its sender had told before: follows from those it told here."""
        code = receipt.wait()
        self._incoming = None
        net, source = self._net, receipt.source
        distance = (net.rank - source) % net.world_size
        number = self._num_heard[source] * (net.world_size - 1) + distance - 1
        self._num_heard[source] += 1
        return code, number

    def _compare(self, code: Tensor, number: int) -> None:
        """Adds what another rank's step has told to the sums; both are rounded alike."""
        part = self._part(number)
        wide = part.to(self._own.dtype)  # squares of fp16 are too small for it
        mine, theirs = (decode(each, like=wide) for each in (encode(part, WIRE), code))
        own, shared = ((mine * other).view(-1, BLOCK // EVERY).sum(1) for other in (mine, theirs))
        if not self._is_known:
            self._own.copy_(own)
            self._shared.copy_(own)
            self._is_known = True
        self._own.mul_(KEPT).add_(own)
        self._shared.mul_(KEPT).add_(shared)

    def _part(self, number: int) -> Tensor:
        """Every fourth entry of this rank's step, from another one on in each message."""
        return self._u.view(-1, EVERY)[:, number % EVERY].contiguous()
