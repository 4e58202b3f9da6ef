"""A model whose replica several ranks hold together: x is made of this rank's shards.

    FSDP2           p is a DTensor, of which this rank holds a shard, padded to the largest one's
                    size, from which FSDP gathers the whole parameter for a forward pass
    tensor parallel p is a DTensor of which this rank holds a shard and computes with it, or a
                    plain tensor that all ranks of the replica hold

Where all private names of torch's that this needs are there (`_fsdp_params`, and
`DTensor._local_tensor`), x aliases the shards: every p's shard, with its padding, is a view of x,
and nothing is copied.  Elsewhere, and with CPU offloading, whose memory is torch's own, x is a
copy: `pull` and `push` are a pass over it each, before and after every turn of an algorithm.

What FSDP has gathered does not change with x.  The root module keeps it after a forward pass that
no backward pass follows, as in an evaluation.  So `reshard` has to follow every change of x, and to
precede whatever asks the module for its parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import Parameter

from lightning_dsgd.replica.flat import FlatParameters, Place, Whole, check_parameters

SHARD: Final = "lightning_dsgd.shard"
"""The key of a shard in the files of a checkpoint."""


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's share of a tensor, without its gradients' history."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def sharding_of(module: nn.Module) -> list[Any]:
    """Returns those of a module's modules whose parameters FSDP shards."""
    return [each for each in module.modules() if isinstance(each, FSDPModule)]


def reshard(modules: Iterable[Any]) -> None:
    """Drops what FSDP has gathered: the modules' parameters are their shards again."""
    for module in modules:
        module.reshard()


class Shards(Whole):
    """Lays a module's replica out over several ranks.

    Attributes:
        is_alias: whether x shares the shards' memory

    Args:
        module: the whole module; its parallelism has been applied
    """

    def __init__(self, module: nn.Module) -> None:
        self._sharding = sharding_of(module)
        self.reshard()
        found = _fsdp_params(self._sharding)
        self._fsdp_params: dict[Parameter, Any] = found or {}
        self._in_fsdp = {p for child in self._sharding for p in child.parameters()}
        self.is_alias = found is not None

    def flatten(self, named_parameters: Iterable[tuple[str, Parameter]]) -> list[FlatParameters]:
        """Moves shards into flat tensors; see `flat.flatten`."""
        groups: dict[Any, dict[Parameter, str]] = {}
        named = {parameter: name for name, parameter in named_parameters}
        check_parameters({local(parameter): name for parameter, name in named.items()})
        for parameter, name in named.items():
            mine = local(parameter)
            kind = (mine.dtype.to_real(), mine.device)
            groups.setdefault(kind, {})[parameter] = name
        made = ShardedParameters if self.is_alias else CopiedParameters
        return [made(list(g.values()), list(g), self._fsdp_params) for g in groups.values()]

    def local(self, tensor: Tensor) -> Tensor:
        """Returns this rank's share of a tensor; see `local`."""
        return local(tensor)

    def reshard(self) -> None:
        """See `reshard`."""
        reshard(self._sharding)

    def describe(self) -> str:
        """Says, for the user, where x lies."""
        if self.is_alias:
            return "algorithms work on the shards in place"
        return (
            "algorithms work on a copy of the shards, four passes over it a step, as memory is "
            f"offloaded or torch {torch.__version__} is not as it was when this was tested"
        )

    def is_fully_sharded(self, parameter: Parameter) -> bool:
        """Returns whether each element lies on one rank of the replica alone, as with FSDP."""
        if not isinstance(parameter, DTensor) or parameter not in self._in_fsdp:
            return False
        [first, *more] = parameter.placements
        return first.is_shard() and not more

    def length(self, parameter: Parameter) -> int:
        """Returns how many elements of x a parameter takes, with its padding."""
        owner = self._fsdp_params.get(parameter)
        return int((local(parameter) if owner is None else owner._sharded_param_data).numel())


class ShardedParameters(FlatParameters):
    """Holds shards of one dtype and device, which lie in x."""

    def __init__(
        self, names: list[str], parameters: list[Parameter], fsdp_params: dict[Parameter, Any]
    ) -> None:
        self._owner_of = fsdp_params
        self._owners = [fsdp_params.get(parameter) for parameter in parameters]
        super().__init__(names, parameters)

    def _place(self, parameter: Parameter) -> Place:
        mine, owner = local(parameter), self._owner_of.get(parameter)
        padding = 0 if owner is None else owner._sharded_param_data.numel() - mine.numel()
        return Place.of(mine, padding)

    def _move_in(self) -> None:
        parts = self._padded(self.x)
        for parameter, owner, view, part in zip(
            self.parameters, self._owners, self._x_views, parts, strict=True
        ):
            _point(parameter, owner, view.copy_(local(parameter)), part)

    def _padded(self, flat: Tensor) -> list[Tensor]:
        """Returns the pieces of a tensor laid out like x, with their padding."""
        parts, begin = [], 0
        pairs = zip(self._split[::2], self._split[1::2], strict=True)
        for (numel, gap), place in zip(pairs, self._places, strict=True):
            parts.append(flat[begin : begin + numel + place.padding])
            begin += numel + gap
        return parts

    def is_intact(self) -> bool:
        """Returns whether all shards still are views of x."""
        return all(
            _lies_in(parameter, owner, view)
            for parameter, owner, view in zip(
                self.parameters, self._owners, self._x_views, strict=True
            )
        )

    def refresh(self) -> None:
        """Takes shards that left x back into it, with the values that they have now."""
        parts = self._padded(self.x)
        for parameter, owner, view, part in zip(
            self.parameters, self._owners, self._x_views, parts, strict=True
        ):
            if not _lies_in(parameter, owner, view):
                view.copy_(local(parameter))
                _point(parameter, owner, view, part)


class CopiedParameters(FlatParameters):
    """Holds shards of one dtype and device, copied into x; uses public names of torch alone."""

    def __init__(
        self, names: list[str], parameters: list[Parameter], fsdp_params: dict[Parameter, Any]
    ) -> None:
        super().__init__(names, parameters)

    def _place(self, parameter: Parameter) -> Place:
        return Place.of(local(parameter))

    def _move_in(self) -> None:
        self.pull()

    def pull(self) -> None:
        """Puts the shards' values into x."""
        for parameter, view in zip(self.parameters, self._x_views, strict=True):
            view.copy_(local(parameter))

    def push(self) -> None:
        """Puts what x holds into the shards."""
        for parameter, view in zip(self.parameters, self._x_views, strict=True):
            local(parameter).copy_(view)

    def thinned(self, step: int) -> Tensor:
        """Returns one of `step` entries of x, up to date."""
        if not self._is_open:
            self.pull()
        return super().thinned(step)

    def is_intact(self) -> bool:
        """Returns whether `refresh` has nothing to do."""
        return True


def _fsdp_params(modules: Iterable[Any]) -> dict[Parameter, Any] | None:
    """Returns what FSDP keeps of each parameter; None where FSDP is not as it was tested."""
    found: dict[Parameter, Any] = {}
    try:
        for module in modules:
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for owner in group.fsdp_params:
                    if not _is_as_tested(owner):
                        return None
                    found[owner.sharded_param] = owner
    except AttributeError:
        return None
    return found


def _is_as_tested(owner: Any) -> bool:
    """Returns whether a shard is the first part of its padded data, which may be replaced."""
    mine, padded = owner.sharded_param._local_tensor, owner._sharded_param_data
    is_plain = type(mine) is Tensor and type(padded) is Tensor and not mine.is_complex()
    is_first = not mine.numel() or mine.data_ptr() == padded.data_ptr()
    return bool(is_plain and is_first and padded.dim() == 1 and not owner.offload_to_cpu)


def _point(parameter: Parameter, owner: Any, view: Tensor, padded: Tensor) -> None:
    """Puts a parameter's shard into x."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = view
    else:
        parameter.data = view
    if owner is not None:
        owner._sharded_param_data = padded


def _lies_in(parameter: Parameter, owner: Any, view: Tensor) -> bool:
    mine = local(parameter)
    has_own = owner is not None and owner._sharded_param_data.data_ptr() != view.data_ptr()
    return not (has_own and view.numel()) and mine.device == view.device and mine.is_set_to(view)
