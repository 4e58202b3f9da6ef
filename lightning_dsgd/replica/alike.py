"""Models of all ranks must be alike: the same parameters, buffers and optimizers, in one order."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_dsgd.agreement import refuse_unless_alike
from lightning_dsgd.replica.flat import trainable
from lightning_dsgd.transport import Transport


def num_bytes(module: nn.Module, optimizers: Sequence[Optimizer]) -> int:
    """Returns the number of bytes of all parameters and buffers."""
    ours = {*module.parameters(), *module.buffers(), *chain(*map(_parameters_of, optimizers))}
    return sum(t.numel() * t.element_size() for t in ours if not is_lazy(t))


def check_disjoint(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raises if a parameter belongs to two optimizers."""
    owner: dict[nn.Parameter, int] = {}
    for index, optimizer in enumerate(optimizers):
        for parameter in _parameters_of(optimizer):
            if owner.setdefault(parameter, index) != index:
                name = next((n for n, p in module.named_parameters() if p is parameter), "?")
                raise ValueError(
                    f"each parameter must belong to one optimizer, got {name!r} in the "
                    f"optimizers {owner[parameter]} and {index}; give it to one of them"
                )


def check_alike(net: Transport, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raises, on every rank, if their models differ in names, shapes, dtypes or optimizers."""
    entries = _descriptions(module, optimizers)
    digests = torch.tensor([_digest(entry) for entry in entries], dtype=torch.int64)
    columns = [theirs.tolist() for theirs in net.all_gather(digests).wait()]
    mine = f"{len(entries)} parameters and buffers"
    if len(set(map(len, columns))) == 1:
        rows = zip(*columns, strict=True)
        differing = next((i for i, row in enumerate(rows) if len(set(row)) > 1), None)
        if differing is None:
            return
        mine = entries[differing]
    way_out = "build it from the same arguments everywhere"
    refuse_unless_alike(net, mine, "the model", way_out)


def description(module: nn.Module, optimizers: Sequence[Optimizer]) -> str:
    """Returns a text that is equal for models with equal parameters, buffers and optimizers."""
    lines = _descriptions(module, optimizers)
    return f"{len(lines)} parameters and buffers (checksum {_digest(' '.join(lines)):x})"


def _descriptions(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[str]:
    """Returns a line for each parameter and buffer, with all that must be alike."""
    owner = {
        p: f"optimizer {i} ({type(optimizer).__name__})"
        for i, optimizer in enumerate(optimizers)
        for p in trainable(optimizer)
    }
    lines = []
    for name, p in module.named_parameters():
        where = owner.get(p, "no optimizer")
        lines.append(f"parameter {name!r} of {_form(p)}, trained by {where}")
    lines += [f"buffer {name!r} of {_form(b)}" for name, b in module.named_buffers()]
    return lines


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _form(tensor: Tensor) -> str:
    shape = "no shape yet" if is_lazy(tensor) else f"shape {tuple(tensor.shape)}"
    return f"{shape} and {tensor.dtype}"


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")
