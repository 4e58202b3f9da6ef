"""What sparse all-reduces share: the largest entries are sent, the rest is kept for later.

    acc_i <- e_i + g_i
    u, I_i <- sparse_allreduce(acc)         I_i: the entries of acc_i that are in u
    e_i <- acc_i - acc_i[I_i]
    g_i <- u / P

Legend: e the residual, g the gradient, acc what has been accumulated (in the memory of e), u the
sum that all ranks get, n elements, k of them to be selected, P ranks that are still stepping.

Nothing is lost and nothing counted twice: over all ranks, what was accumulated = what was applied +
the residuals.

A rank that has run out of data goes on with a gradient of zero: its residual is sent like the
others', and the sum is divided by the number of ranks that have a gradient, as in `allreduce`.  It
takes over the weights of those that went on once all have stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from lightning_dsgd import sparse
from lightning_dsgd.algorithm import Algorithm, num_active, take_over_newest
from lightning_dsgd.transport import Transport

Selected = tuple[Tensor, Tensor]
"""Values and their ascending indices."""

SPLIT: Final = 1
BALANCE: Final = 2
GATHER: Final = 3
BYTES: Final = torch.empty(0, dtype=torch.uint8)
"""What messages are received like."""


class ErrorFeedback(Algorithm):
    """Sends the largest entries of the accumulated gradient; subclasses say how they are summed.

    Memory above plain training: |g|, and the residual |g| in fp32 or wider.
    """

    uses_gradient: ClassVar[bool] = True
    lockstep: ClassVar[bool] = True
    counts_gradients: ClassVar[bool] = True

    density: float
    """k / n, as a field of the dataclass."""

    def check(self, world_size: int) -> None:
        super().check(world_size)
        if not 0 < self.density <= 1:
            raise ValueError(
                "density must be above 0 and at most 1, got "
                f"density={self.density}; try density=0.01"
            )

    def start(self, net: Transport, x: Tensor) -> None:
        super().start(net, x)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        self.residual = torch.zeros_like(x, dtype=wide)
        self.wire = wide
        self.k = max(1, round(self.density * len(x)))
        self.step = 0
        self.round = 0  # in which this rank took part, with or without a gradient
        self.num_applied = 0

    def sparse_allreduce(self, g: Tensor) -> Selected:
        """Adds g to the residual, leaves zeros in g, gives the entries of the sum over all ranks.

        What it gives is taken out of the residuals.
        """
        raise NotImplementedError

    def before_update(self, x: Tensor, g: Tensor) -> None:
        active = num_active(self.net, active=True, num_gradients=self.num_gradients)
        self.step += 1
        self.exchange(g, active)

    def settle(self, x: Tensor) -> None:
        zeros = None
        while active := num_active(self.net, active=False, num_gradients=self.num_gradients):
            zeros = torch.zeros_like(x) if zeros is None else zeros.zero_()
            self.exchange(zeros, active)
        self.step = take_over_newest(self.net, x, self.step)

    def exchange(self, g: Tensor, active: int) -> None:
        """One round: leaves in g what is to be applied."""
        if self.skips_overflow and self.has_overflowed(g):
            g.fill_(torch.nan)
            return
        values, indices = self.sparse_allreduce(g)
        g[indices] = values.div_(active).to(g.dtype)
        self.round += 1
        self.num_applied = len(values)

    def consensus(self, x: Tensor) -> Tensor:
        # All ranks hold the same, unless they took over weights and kept their optimizer's state.
        return self.net.broadcast(x.clone(), src=0).wait()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "round": self.round, "residual": self.residual}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.round = state["step"], state["round"]
        self.residual.copy_(state["residual"])

    def metrics(self) -> dict[str, float]:
        return {"density": self.num_applied / max(1, len(self.residual))}

    def has_overflowed(self, g: Tensor) -> bool:
        """Whether any rank's gradient has NaN or inf in it."""
        flag = torch.tensor([int(not g.isfinite().all())])
        return bool(self.net.all_reduce(flag).wait())

    # ---- what this rank has to send ----

    def accumulate(self, g: Tensor) -> None:
        self.residual += g
        g.zero_()

    def local_topk(self) -> Selected:
        """The k largest entries of the residual, fewer where the others are zero."""
        return self.cut(self.select(sparse.kth_magnitude(self.residual, self.k)), self.k)

    def select(self, threshold: Tensor, g: Tensor | None = None) -> Selected:
        """What the threshold lets through of the residual, to which g is added first."""
        if g is None:
            values, indices = sparse.select(self.residual, threshold)
        else:
            values, indices = sparse.accumulate_and_select(self.residual, g, threshold)
        if not values.isfinite().all():
            raise FloatingPointError(
                f"gradients must be finite, got NaN or inf on rank {self.net.rank} at step "
                f"{self.step}; look at the learning rate and the loss, or set check_finite=True, "
                "which names the parameter"
            )
        return values, indices

    def cut(self, selected: Selected, k: int) -> Selected:
        """The k largest of what was selected, the first of equal ones."""
        values, indices = selected
        if len(values) <= k:
            return selected
        keep = sparse.largest(values, k)
        return values[keep], indices[keep]

    def take_out(self, values: Tensor, indices: Tensor) -> None:
        """Takes what was sent out of the residual; what the wire cannot hold of it stays."""
        self.residual[indices] = values - values.to(self.wire).to(values.dtype)

    # ---- the wire ----

    def pack(self, values: Tensor, indices: Tensor) -> Tensor:
        return sparse.pack(values, indices, self.wire)

    def unpack(self, message: Tensor) -> Selected:
        return sparse.unpack(message, self.wire, self.residual.dtype)

    def send(self, values: Tensor, indices: Tensor, rank: int, tag: int) -> None:
        self.net.send(self.pack(values, indices), rank, tag)

    def recv(self, rank: int, tag: int) -> Selected:
        return self.unpack(self.net.recv(BYTES, rank, tag).wait())

    def allgatherv(self, message: Tensor) -> list[Tensor]:
        """Every rank's message, in the order of the ranks.

        In ceil(log2 P) exchanges with ranks 1, 2, 4, ... further on, each of all that has come
        together by then (Bruck et al. 1997; recursive doubling for any P): every rank receives each
        message once.
        """
        net = self.net
        messages = [message]  # of this rank, the next one, ...
        while (distance := len(messages)) < net.world_size:
            num = min(distance, net.world_size - distance)
            for known in messages[:num]:
                net.send(known, (net.rank - distance) % net.world_size, GATHER)
            source = (net.rank + distance) % net.world_size
            messages += [net.recv(message, source, GATHER).wait() for _ in range(num)]
        return [messages[(rank - net.rank) % net.world_size] for rank in range(net.world_size)]


def joined(parts: Sequence[Selected]) -> Selected:
    """One after the other."""
    return torch.cat([values for values, _ in parts]), torch.cat([indices for _, indices in parts])


def evenly(length: int, num_parts: int) -> list[int]:
    """Where equal parts begin and end."""
    return [length * i // num_parts for i in range(num_parts + 1)]


def split(selected: Selected, bounds: Sequence[int]) -> list[Selected]:
    """The entries of each region."""
    values, indices = selected
    cuts = torch.searchsorted(indices, torch.tensor(bounds, device=indices.device)).tolist()
    return [(values[a:b], indices[a:b]) for a, b in pairwise(cuts)]
