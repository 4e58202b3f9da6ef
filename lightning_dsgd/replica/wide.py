"""Weights in half precision, and what their rounding leaves over.

    x <- x + (p - round(x))      pull: the optimizer has changed p, and p was round(x) before
    p <- round(x)                push: an algorithm has changed x

Legend: p the parameters, in bfloat16 or fp16; x the same in fp32, which algorithms average.

In bfloat16 a weight of 1 has 1.0078 as its neighbour, so a smaller correction of 1 would round to
nothing, and a sum of corrections would lose updates.  In x nothing is lost.  What an optimizer
loses by its own rounding of p is lost on one device, too.

Memory: 4 bytes for each weight; algorithms keep and send fp32 then (`wire_dtype` rounds what they
send, and keeps the rest).  A pass over x before a turn of an algorithm that looks at x, and one
after it; before an update only few algorithms look (`Traits.looks_itself`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from lightning_dsgd import devices
from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.replica.flat import FlatParameters

_PIECE: Final = 1 << 24
"""The number of elements whose differences are in memory at a time."""


def widened(flats: Sequence[FlatParameters], algorithm: Algorithm) -> list[FlatParameters]:
    """Returns parameters, with x in fp32 where the algorithm would average weights in less."""
    halves = (torch.bfloat16, torch.float16) if algorithm.traits.averages_weights else ()
    return [WideParameters(each) if each.x.dtype in halves else each for each in flats]


class WideParameters(FlatParameters):
    """Holds parameters in half precision, with x and g in fp32.

    Attributes:
        home: the parameters, as they lie in half precision
    """

    def __init__(self, home: FlatParameters) -> None:
        vars(self).update(vars(home))
        self.home = home
        self.x = home.x.float()
        self._follow = form_for(self.x, home.x)
        self._g = None

    def is_intact(self) -> bool:
        """Returns whether the parameters lie where they did."""
        return self.home.is_intact()

    def refresh(self) -> None:
        """Takes parameters back that have left their place."""
        self.home.refresh()

    def pull(self) -> None:
        """Adds to x by how much the parameters have changed; a weight that was set to 0 is 0."""
        self.home.pull()
        self._follow(self.x, self.home.x)

    def thinned(self, step: int) -> Tensor:
        """Returns one of `step` entries of x, as `pull` would leave them."""
        if self._is_open:
            return super().thinned(step)
        x = self.x[::step].clone()
        follow_plainly(x, self.home.thinned(step))
        return x

    def push(self) -> None:
        """Rounds x into the parameters."""
        self.home.x.copy_(self.x)
        self.home.push()

    def restore(self, x: Tensor) -> None:
        """Takes back what x was, where the parameters are what it rounds to."""
        is_same = x.to(self.home.x.dtype) == self.home.x
        self.x.copy_(torch.where(is_same, x, self.home.x.float()))

    def _as_gradient(self, parameter: Parameter, view: Tensor) -> Tensor:
        return view.to(parameter.dtype)


Form = Callable[[Tensor, Tensor], None]
"""Adds to x, the first, by how much p has changed since p was x rounded."""


def form_for(x: Tensor, p: Tensor) -> Form:
    """Returns the form for tensors like these: one kernel where Triton compiles it."""
    if not devices.runs_triton(x):
        return follow_plainly
    try:
        from lightning_dsgd.replica import wide_triton

        _check_alike(wide_triton.follow, x, p)
    except Exception as error:  # kernels may not compile, as without a C compiler
        warnings.warn(
            f"weights in {p.dtype} are brought up to date by ten kernels in place of one, as "
            f"Triton cannot run on {x.device}, {type(error).__name__}: {error}",
            stacklevel=2,
        )
        return follow_plainly
    return wide_triton.follow


def _check_alike(follow: Form, x: Tensor, p: Tensor) -> None:
    """Raises `RuntimeError` unless a form makes the bits of `follow_plainly` on this device."""
    values = [1.0, 1.0 + 2.0**-10, 0.1, -3.0, 2.0**-140, 0.0, 7.0]
    expected, now = x.new_tensor(values), p.new_tensor([2.0, 1.5, 0.0, -3.0, 0.0, 1.0, 2.0**-20])
    found = expected.clone()
    follow_plainly(expected, now)
    follow(found, now)
    if not found.equal(expected):
        raise RuntimeError(f"its kernel gives {found.tolist()} in place of {expected.tolist()}")


def follow_plainly(x: Tensor, p: Tensor) -> None:
    """Follows on any device; the kernel of `wide_triton` must equal the result to the bit."""
    pieces = torch.split(x, _PIECE), torch.split(p, _PIECE)
    for some, new in zip(*pieces, strict=True):
        before = some.to(new.dtype)
        change = new.float().sub_(before).masked_fill_(new == before, 0)
        some.add_(change).masked_fill_((new == 0) & (before != 0), 0)
