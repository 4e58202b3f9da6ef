"""What is the same on all ranks beside the weights: models, and what of them no algorithm averages.

**Models** must be alike: the same parameters, buffers and optimizers, in one order.

**Values** that are not the weights, such as buffers and frozen parameters, are compared by
checksums, given by one rank, or averaged.

**In a checkpoint** they lie beside other tensors.  Pairs of tensors, (live, other), say what stands
for what: a live tensor of the module, and its counterpart with the same layout.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_dsgd.agreement import refuse_unless_alike
from lightning_dsgd.replica.flat import trainable
from lightning_dsgd.transport import Transport

_CHECKSUM_ELEMENTS: Final = 1 << 20

Pairs = Sequence[tuple[Tensor, Tensor]]


# ---- models ----


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


# ---- values, and where they lie in a checkpoint ----


def give(net: Transport, tensors: Iterable[Tensor], giver: int) -> None:
    """Gives every rank the giver's tensors."""
    for live in tensors:
        flat_copy = live.detach().reshape(-1).contiguous()
        net.broadcast(flat_copy.view(torch.uint8), src=giver).wait()
        live.copy_(flat_copy.view(live.shape))


def differing(net: Transport, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors that differ between the ranks, as far as a checksum tells."""
    if not tensors:
        return []
    everyones_sums = net.all_gather(torch.cat([_checksum(t) for t in tensors])).wait()
    columns = torch.stack(everyones_sums).view(net.world_size, len(tensors), -1)
    is_same = (columns == columns[0]).all(2).all(0).tolist()
    return [tensor for tensor, same in zip(tensors, is_same, strict=True) if not same]


def distance(net: Transport, own: Pairs, shared: Pairs) -> float:
    """Returns how far the ranks are from what they share: sqrt(mean |x_i - x|^2) / |x|.

    Args:
        net: the network of all ranks
        own: the live tensors with this rank's values
        shared: the shared values of the first of these tensors
    """
    squares = torch.zeros(2, dtype=torch.float64)
    for (_, mine), (_, mean) in zip(own, shared, strict=False):
        squares[0] += (mine - mean).norm().double().cpu() ** 2
        squares[1] += mean.norm().double().cpu() ** 2
    net.all_reduce(squares).wait()
    return float((squares[0] / squares[1].clamp(min=1e-300)).sqrt())


def _checksum(tensor: Tensor) -> Tensor:
    """Returns two words that another tensor of the same shape is most unlikely to have.

    The words are the sum of its bytes as whole numbers, and a sum weighted by their places; piece
    by piece, as a frozen tensor may be large.
    """
    sums = torch.zeros(2, dtype=torch.int64)
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    is_even = data.numel() % 4 == 0 and data.storage_offset() % 4 == 0
    words = data.view(torch.int32) if is_even else data
    for number, piece in enumerate(torch.split(words, _CHECKSUM_ELEMENTS), 1):
        wide = piece.to(torch.int64)
        places = torch.arange(1, len(wide) + 1, device=wide.device)
        sums += torch.stack([wide.sum(), (wide * places).sum() * number]).cpu()
    return sums


def average(net: Transport, tensors: Sequence[Tensor], *, floats: bool = True) -> list[Tensor]:
    """Returns the float tensors' means and rank 0's others; without `floats`, rank 0's of all."""
    results: list[Tensor] = [torch.empty(0)] * len(tensors)
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.device), []).append(index)
    for (dtype, _), indices in groups.items():
        packed = torch.cat([tensors[i].detach().reshape(-1) for i in indices])
        if floats and (dtype.is_complex or dtype.is_floating_point) and dtype.itemsize > 1:
            numbers = torch.view_as_real(packed).view(-1) if dtype.is_complex else packed
            net.all_reduce(numbers).wait()
            numbers /= net.world_size
        else:  # as bytes: a buffer may be of a dtype that no transport knows
            net.broadcast(packed.view(torch.uint8), src=0).wait()
        for i, piece in zip(
            indices, torch.split(packed, [tensors[i].numel() for i in indices]), strict=True
        ):
            results[i] = piece.view(tensors[i].shape)
    return results


def exchanged(state: dict[str, Any], table: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Returns the same state, with each tensor that lies in a live one taken from its counterpart.

    Mappings of names are searched too: other callbacks keep weights under names of their own.
    """
    result = copy.copy(state)  # with its type and the versions that torch keeps beside a state_dict
    for key, value in state.items():
        if isinstance(value, Tensor):
            found = counterpart(value, table)
            result[key] = value if found is None else found
        elif isinstance(value, dict) and all(isinstance(name, str) for name in value):
            result[key] = exchanged(value, table)
    return result


def counterpart(value: Tensor, table: Iterable[tuple[Tensor, Tensor]]) -> Tensor | None:
    """Returns the counterpart of a tensor that is a live one, or lies within a flat live one."""
    real = torch.view_as_real(value) if value.is_complex() else value
    within = None
    for live, other in table:
        if value.untyped_storage().data_ptr() != live.untyped_storage().data_ptr():
            continue
        if value.is_set_to(live):
            return other
        if within is None and _is_within(real, live):
            offset = real.storage_offset() - live.storage_offset() + other.storage_offset()
            within = other.as_strided(real.size(), real.stride(), offset)
    if within is not None and value.is_complex():
        within = torch.view_as_complex(within.clone())
    return within


def _is_within(value: Tensor, live: Tensor) -> bool:
    """Returns whether all elements of a tensor lie in a flat tensor."""
    if value.dtype != live.dtype or live.dim() != 1 or not live.is_contiguous():
        return False
    begin = value.storage_offset() - live.storage_offset()
    reach = sum((size - 1) * s for size, s in zip(value.size(), value.stride(), strict=True))
    return value.numel() > 0 and begin >= 0 and begin + reach < live.numel()


def averaged(
    net: Transport, checkpoint: dict[str, Any], table: Sequence[tuple[Tensor, Tensor]]
) -> dict[str, Any]:
    """Returns a checkpoint exchanged by a table; the model's other tensors become means."""
    foreign = {
        key: value
        for key, value in checkpoint.get("state_dict", {}).items()
        if isinstance(value, Tensor) and counterpart(value, table) is None
    }
    means = dict(zip(foreign, average(net, list(foreign.values())), strict=True))
    result = exchanged(checkpoint, table)
    if means:
        result["state_dict"].update(means)
    return result


def make_alike(net: Transport, tensors: Sequence[Tensor]) -> None:
    """Puts the mean over the ranks into those tensors that differ between them."""
    others = differing(net, tensors)
    for live, mean in zip(others, average(net, others), strict=True):
        live.copy_(mean)
