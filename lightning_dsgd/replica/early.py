"""Gradients that an algorithm takes during the backward pass (`Traits.takes_pieces`).

    autograd has made p.grad   ->  noted, in whatever order it makes them
    all from one p on are made ->  gathered into g, and the algorithm is told
    before the update          ->  the rest is gathered, such as zeros for unused parameters

Autograd makes the gradients of the last layers first, and these lie last in g.

What a rank has handed over, nothing must change.  So a second backward pass before the step, and a
gradient that a hook or a loop has changed since, are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.replica.flat import FlatParameters, Whole
from lightning_dsgd.transport import PeerLost


def check(algorithm: Algorithm, layout: Whole, *, check_finite: bool) -> None:
    """Raises `ValueError` where gradients cannot be taken during the backward pass."""
    given, way_out = algorithm.pieces_option
    if algorithm.traits.takes_pieces and check_finite:
        raise ValueError(
            f"check_finite=True looks at a gradient before it is sent, got it with {given}, "
            "which sends it during the backward pass; leave one of them out"
        )
    if algorithm.traits.takes_pieces and layout.describe():
        raise ValueError(
            f"{given} needs a replica that one rank holds, got one that several ranks hold "
            f"together; set {way_out}"
        )


class EarlyGradients:
    """Hands the gradients of one part to its algorithm as the backward pass makes them.

    Args:
        weights: the parameters
        current: returns the algorithm that gets their gradients, another one after a loss
    """

    def __init__(self, weights: FlatParameters, current: Callable[[], Algorithm]) -> None:
        self._weights = weights
        self._current = current
        self._begin()
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._is_made, index)
            )
            for index, parameter in enumerate(weights.parameters)
        ]

    def _begin(self) -> None:
        self._algorithm: Algorithm | None = None  # which has what is handed over
        self._made: dict[int, int] = {}  # the version of each gradient that was made
        self._first = len(self._weights.parameters)  # all from this one on are handed over

    @torch.no_grad()
    def _is_made(self, index: int, parameter: Tensor) -> None:
        is_first = not self._made  # of this backward pass, in which the algorithm's traits stay
        if is_first and not self._current().traits.takes_pieces:  # any more, or yet
            return
        given, way_out = self._current().pieces_option
        if index in self._made:
            raise ValueError(
                f"{given} needs one backward pass per step, got a second one for parameter "
                f"{self._weights.names[index]!r}; set {way_out}, or do not accumulate gradients"
            )
        grad, g = parameter.grad, self._weights.g
        assert grad is not None
        if grad.untyped_storage().data_ptr() == g.untyped_storage().data_ptr():
            raise ValueError(
                f"{given} needs gradients that are dropped after each step, got one that is "
                f"kept; call optimizer.zero_grad(set_to_none=True), or set {way_out}"
            )
        self._made[index] = _version(grad)
        last = self._first
        while self._first and self._first - 1 in self._made:
            self._first -= 1
        if self._first < last:
            self._weights.gather(self._first, last)
            self._algorithm = self._algorithm or self._current()
            with contextlib.suppress(PeerLost):  # which the update meets too, and goes on from
                self._algorithm.gradient_made(g, self._weights.begin_of(self._first))

    def gather(self) -> Tensor:
        """Returns g, with all put into it that has not been handed over yet."""
        given, way_out = self._current().pieces_option
        for index, version in self._made.items():
            grad = self._weights.parameters[index].grad
            if grad is None or _version(grad) != version:
                raise ValueError(
                    f"{given} sends a gradient as soon as it is made, got a gradient of "
                    f"parameter {self._weights.names[index]!r} that was changed since; change it "
                    "once it is reduced (in on_before_optimizer_step with the Trainer, by "
                    f"fabric.clip_gradients, after replica.reduce_gradients()), or set {way_out}"
                )
        is_same = self._algorithm is self._current()  # another has nothing yet
        g = self._weights.gather(0, self._first if is_same else None)
        self._begin()
        return g

    def take_back(self) -> None:
        """Notes that the algorithm has dropped what it was handed: the step gathers all anew."""
        self._algorithm = None

    def remove(self) -> None:
        """Ends the watch over the parameters."""
        for handle in self._handles:
            handle.remove()


def _version(grad: Tensor) -> int:
    """Returns a number that every change in place makes larger."""
    return int(grad._version)  # noqa: SLF001
