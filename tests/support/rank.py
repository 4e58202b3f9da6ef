"""One rank of a world: an algorithm, and the weights that it trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_dsgd.algorithm import Algorithm, Conditions

STEPPED = Conditions(optimizer=torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0))
"""Where nothing is said of the optimizer but its rate, which stays."""


class Rank:
    """Starts an algorithm with the weights x; `step` and `descend` are what an optimizer does."""

    def __init__(
        self, net: Any, algorithm: Algorithm, x: Tensor, conditions: Conditions = STEPPED
    ) -> None:
        self.net, self.algorithm, self.x = net, algorithm, x
        algorithm.start(net, x, conditions)

    def step(self, update: Tensor | float = 0.0, *, seconds: float = 0.0) -> None:
        """Computes for so long, and adds an update in which the algorithm has no part."""
        if seconds:
            self.net.compute(seconds)
        self.algorithm.before_update(self.x, self.x[:0])
        self.x += update
        self.algorithm.after_update(self.x)

    def descend(self, g: Tensor, lr: float = 1.0, *, seconds: float = 0.0) -> None:
        """Computes for so long, and subtracts what the algorithm makes of a gradient."""
        if seconds:
            self.net.compute(seconds)
        self.algorithm.before_update(self.x, g)
        self.x.sub_(g, alpha=lr)
        self.algorithm.after_update(self.x)

    def settle(self) -> Tensor:
        """Returns the rank's own weights, once all ranks stand still."""
        self.algorithm.settle(self.x)
        return self.x.clone()

    def finish(self) -> Tensor:
        """Returns the weights at the end of training."""
        self.algorithm.settle(self.x)
        self.algorithm.finish(self.x)
        return self.x

    def resume(self, algorithm: Algorithm, name: str = "again") -> None:
        """Goes on, once all ranks stand still, with another algorithm that loads what is saved.

        As in a process of its own, the weights are restored after the start, and before the state.
        """
        state, conditions = self.algorithm.state_dict(), self.algorithm.conditions
        self.algorithm.stop()
        own, self.x = self.x, torch.full_like(self.x, 7.0)
        self.algorithm = algorithm
        algorithm.start(self.net.sub(name), self.x, conditions)
        self.x.copy_(own)
        algorithm.load_state_dict(state)
        taken_over = algorithm.state_dict()
        assert state.keys() == taken_over.keys()
        for key, value in state.items():
            _check_same(taken_over[key], value, key)


def _check_same(found: Any, expected: Any, key: str) -> None:
    """Raises unless two values of a state are equal to the bit, with all that is in them."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), key
        for name, value in expected.items():
            _check_same(found[name], value, f"{key}.{name}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), key
        for number, value in enumerate(expected):
            _check_same(found[number], value, f"{key}[{number}]")
    elif isinstance(expected, str):
        assert found == expected, key
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=key)


def held_by(*objects: Any, x: Tensor) -> int:
    """How many times the memory of x the tensors take that are these objects' attributes."""
    held = {id(t): t for each in objects if each is not None for t in vars(each).values()}
    tensors = [t for t in held.values() if isinstance(t, Tensor) and t is not x]
    return round(sum(t.nbytes for t in tensors) / x.nbytes)
