"""What the algorithms have held back of the gradients, applied once all ranks have trained.

    x + (x after a step with what was held back - x after a step with a gradient of zero)

So momentum and weight decay act no more.  The optimizer's state stays as it is, to the bit.
What was held back is clipped as the gradients of training are, where the face knows how.

Memory: what `Algorithm.held_back` returns, for one part after the other; after that nothing on the
device but what the optimizer takes in any step.  2 |x| and the optimizer's state are in the host's
memory meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dsgd.replica.part import Part


def apply_held_back(
    optimizer: Optimizer, parts: Sequence[Part], clip: Callable[[Optimizer], None]
) -> None:
    """Applies the gradients that the algorithms of an optimizer's parts have held back, if any."""
    having = [part for part in parts if _take(part)]
    if not having:
        return
    for group in optimizer.param_groups:  # some optimizers' zero_grad would write to g
        for parameter in group["params"]:
            parameter.grad = None
    restore = _restorer(optimizer)
    begins = [_on_host(part.x) for part in parts]
    _step(optimizer, having, clip)
    ends = [_on_host(part.x) for part in parts]
    restore()
    for part, begin in zip(parts, begins, strict=True):
        part.x.copy_(begin)
        part.weights.g.zero_()
    _step(optimizer, having, unclipped)
    restore()
    for part, begin, end in zip(parts, begins, ends, strict=True):
        x, g = part.x, part.weights.g  # where there is room now
        torch.sub(g.copy_(end), x, out=x)
        x += g.copy_(begin)
        g.zero_()
    optimizer.zero_grad()


def unclipped(optimizer: Optimizer) -> None:
    """Leaves an optimizer's gradients as they are."""


def _take(part: Part) -> bool:
    """Puts what a part's algorithm has held back into g; returns whether there is any."""
    held_back = part.algorithm.held_back()
    if held_back is not None:
        part.weights.g.copy_(held_back)
    return held_back is not None


def _step(optimizer: Optimizer, having: Iterable[Part], clip: Callable[[Optimizer], None]) -> None:
    for part in having:
        part.weights.scatter()
    clip(optimizer)
    optimizer.step(lambda: 0.0)  # some optimizers want a closure


def _restorer(optimizer: Optimizer) -> Callable[[], None]:
    """Copies an optimizer's state; returns what puts it back, as often as it is called.

    `load_state_dict` would make new tensors, of the parameters' dtype.
    """
    if type(optimizer).state_dict is not Optimizer.state_dict:  # its state lies elsewhere
        state = copy.deepcopy(optimizer.state_dict())
        return lambda: optimizer.load_state_dict(copy.deepcopy(state))
    lists = [group["params"] for group in optimizer.param_groups]
    known = [*lists, *(parameter for each in lists for parameter in each), *optimizer.state]
    tensors = _tensors_in([*optimizer.state.values(), *optimizer.param_groups], known)
    saved = [_on_host(tensor) for tensor in tensors]
    stays = {id(each): each for each in (*known, *tensors)}
    values = copy.deepcopy((dict(optimizer.state), [*optimizer.param_groups]), {**stays})

    def restore() -> None:
        for tensor, value in zip(tensors, saved, strict=True):
            tensor.copy_(value)
        state, groups = copy.deepcopy(values, {**stays})
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(options)

    return restore


def _tensors_in(value: Any, known: Sequence[Any]) -> list[Tensor]:
    """Returns the tensors in nested containers, each once, but for those that are known."""
    found: dict[int, Tensor] = {}
    is_known = {id(each) for each in known}

    def look(value: Any) -> None:
        if id(value) in is_known:
            return
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif isinstance(value, dict | list | tuple):
            for each in value.values() if isinstance(value, dict) else value:
                look(each)

    look(value)
    return [*found.values()]


def _on_host(x: Tensor) -> Tensor:
    return x.detach().to("cpu", copy=True)
