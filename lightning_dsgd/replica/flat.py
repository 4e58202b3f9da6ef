"""The parameters of a model as views of one flat tensor x, their gradients gathered into g.

    flatten      p.data -> x     once      reads and writes every parameter; p.data: a view of x
    gather       p.grad -> g     a step    reads and writes every gradient
    scatter      g -> p.grad     a step    moves nothing; p.grad: a view of g

Legend: x the weights, g the gradient; p a parameter; |x| the bytes of x.

Memory above plain training: nothing for x, which replaces the parameters' own; |x| for g, once
something asks for it, beside the gradients that autograd makes during a backward pass.  Autograd
hands those over without a pass of its own, so gathering them moves fewer bytes than letting it
accumulate into a zeroed g.

x and g are laid out alike.  Every parameter begins on a multiple of `ALIGNMENT_BYTES`, and the gaps
before the next one hold zeros, which averaging, scaling and selecting the largest leave zeros.

The parameters remain the same objects: optimizers made before or after, tied parameters and hooks
of autograd go on working.  What x owns can still be copied and saved:

- `copy.deepcopy(module)` gives parameters with memory of their own.
- `torch.save(module.state_dict())` writes x once.  Saving a few of the parameters still writes all
  of x, and plain `pickle` writes x once per parameter: clone what is to be saved alone.
- `module.to(...)` that changes something and `param.data = ...` take parameters out of x;
  `FlatParameters.refresh` takes them back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter, is_lazy
from torch.optim import Optimizer

ALIGNMENT_BYTES = 64
"""The alignment of torch's CPU allocator: kernels are tuned for such addresses.

Packed without gaps, fp32 linear layers lose 4 to 6% in forward and backward (two AVX-512 cores,
`benchmarks/flat_passes.py`).  Inductor and the vectorised loads of GPUs want 16 bytes.
"""


def flatten(named_parameters: Iterable[tuple[str, Parameter]]) -> list[FlatParameters]:
    """Moves parameters into one flat tensor per dtype and device, in the order of first appearance.

    Values are kept to the bit, strides too (channels_last, transposed).  A parameter that comes
    again, under another name, counts once.  Complex parameters lie in x as pairs of real numbers.

    Args:
        named_parameters: What `module.named_parameters()` gives, or a part of it.

    Raises:
        ValueError: For what cannot be a view of x, before anything is moved.
    """
    names: dict[Parameter, str] = {}
    for name, parameter in named_parameters:
        names.setdefault(parameter, name)
    check_parameters(names)
    groups: dict[tuple[torch.dtype, torch.device], dict[Parameter, str]] = {}
    for parameter, name in names.items():
        kind = (parameter.dtype.to_real(), parameter.device)
        groups.setdefault(kind, {})[parameter] = name
    return [FlatParameters(list(group.values()), list(group)) for group in groups.values()]


def fragments_of(names: Sequence[str], num_fragments: int) -> dict[str, int]:
    """Returns in which fragment each parameter of a model is: of layer l in l mod num_fragments.

    The parameters of a layer have their names up to the first number in common; those before,
    between and after such layers are layers too.
    """
    layers = [next(iter(_LAYER.findall(name)), "") for name in names]
    starts = [before != layer for before, layer in pairwise(layers)]
    if sum(starts) + 1 < num_fragments:
        raise ValueError(
            f'num_fragments must be at most the number of layers with fragments="layers", got '
            f"num_fragments={num_fragments} and {sum(starts) + 1} layers; try num_fragments="
            f"{sum(starts) + 1}"
        )
    numbers = accumulate(starts, initial=0)
    return {name: number % num_fragments for name, number in zip(names, numbers, strict=True)}


_LAYER: Final = re.compile(r"^(?:.*?\.)?\d+(?=\.)")


class FlatParameters:
    """The parameters of one dtype and device; made by `flatten`.

    Attributes:
        x: The parameters, one contiguous 1-D tensor.
        names: The parameters' names, in the order in which they lie in x.
        parameters: The parameters themselves, in the same order.
        numel: The elements of all parameters; x has as many and the gaps.
    """

    def __init__(self, names: list[str], parameters: list[Parameter]) -> None:
        """Moves the parameters into x; they have been checked."""
        self.names = names
        self.parameters = parameters
        self._places = [self._place(parameter) for parameter in parameters]
        self.numel = sum(place.numel for place in self._places)
        dtype = parameters[0].dtype.to_real()
        step = ALIGNMENT_BYTES // dtype.itemsize
        self._split = [n for place in self._places for n in place.lengths(step)]
        self._split[-1] = self._places[-1].padding  # nothing follows that would need more
        ends = [0, *accumulate(map(sum, zip(self._split[::2], self._split[1::2], strict=True)))]
        self._bounds = dict(zip(parameters, pairwise(ends), strict=True))
        self.x = torch.empty(sum(self._split), dtype=dtype, device=parameters[0].device)
        self._x_views = self.views(self.x)
        self._g: Tensor | None = None
        self._g_views: list[Tensor] = []
        self._is_open = False
        for gap in self.x.split_with_sizes(self._split)[1::2]:
            gap.zero_()
        self._move_in()

    def _place(self, parameter: Parameter) -> Place:
        return Place.of(parameter)

    def _move_in(self) -> None:
        # One after the other, so that each frees its old memory before the next is written.
        for parameter, view in zip(self.parameters, self._x_views, strict=True):
            parameter.data = view.copy_(parameter.data)

    @property
    def g(self) -> Tensor:
        """The gradient, laid out like x; allocated when first asked for.

        After `scatter` the gradients of the parameters are views of it, so that what unscales or
        clips them changes g.  Nothing breaks when they are dropped (`zero_grad(set_to_none=True)`,
        the next backward makes new ones), zeroed in place or accumulated into.  But whoever keeps a
        `p.grad` for longer than a step must clone it: the next `gather` writes over it.
        """
        if self._g is None:
            self._g = torch.zeros_like(self.x)
            self._g_views = self.views(self._g)
        return self._g

    def gather(self, begin: int = 0, end: int | None = None) -> Tensor:
        """Puts gradients into g and returns it; zero where a parameter has none.

        One pass: reads and writes each gradient once, at 80 to 90% of the speed of a single `copy_`
        of the same bytes (60 parameters, 44 MB).  A gradient that already is the view of g (kept by
        `zero_grad(set_to_none=False)`) is not touched.

        Args:
            begin: the first of the parameters whose gradients are put there
            end: the one behind the last of them; by default none is left out
        """
        g = self.g
        views, grads, absent = self._match(slice(begin, end))
        with torch.no_grad():
            if grads:
                torch._foreach_copy_(views, grads)
            if absent:
                torch._foreach_zero_(absent)
        return g

    def num_gradients(self) -> Tensor:
        """Returns, for each parameter, 1 if it has a gradient, else 0."""
        has_one = [parameter.grad is not None for parameter in self.parameters]
        return torch.tensor(has_one, dtype=torch.int64)

    def scatter(self, num_gradients: Tensor | None = None) -> None:
        """Makes the gradients of the parameters views of g; no pass over memory.

        A parameter that has no gradient of its own gets the view only if it is not frozen and
        another rank had a gradient for it.  Otherwise its gradient stays None and optimizers skip
        it, as in training on one device.  (A frozen parameter with a gradient left over keeps one:
        optimizers would step it.)

        Args:
            num_gradients: on how many ranks each parameter had one; where nobody has counted, a
                part of g that is not all zero tells it
        """
        _ = self.g
        late: list[tuple[Parameter, Tensor]] = []
        for parameter, view in zip(self.parameters, self._g_views, strict=True):
            if parameter.grad is not None:
                parameter.grad = self._as_gradient(parameter, view)
            elif parameter.requires_grad:
                late.append((parameter, view))
        if not late:
            return
        if num_gradients is not None:
            counted = dict(zip(self.parameters, num_gradients.tolist(), strict=True))
            arrived = [counted[parameter] > 0 for parameter, _ in late]
        else:
            # Stacked: on a GPU, every answer read alone would be one more wait for the device.
            arrived = torch.stack([view.any() for _, view in late]).tolist()
        for (parameter, view), has_arrived in zip(late, arrived, strict=True):
            if has_arrived:
                parameter.grad = self._as_gradient(parameter, view)

    def show(self, g: Tensor, num_gradients: Tensor) -> None:
        """Makes the gradients of the parameters views of a tensor laid out like x.

        Args:
            g: the tensor
            num_gradients: for each parameter 0 if it has no gradient, and gets none
        """
        views = self.views(g)
        for parameter, view, num in zip(
            self.parameters, views, num_gradients.tolist(), strict=True
        ):
            has_one = num > 0 and parameter.requires_grad
            parameter.grad = self._as_gradient(parameter, view) if has_one else None

    def _as_gradient(self, parameter: Parameter, view: Tensor) -> Tensor:
        """Returns what a parameter gets as its gradient, of a view of g."""
        return view

    def views(self, flat: Tensor) -> list[Tensor]:
        """Returns views of a tensor laid out like x, one per parameter, with shape and strides."""
        parts = flat.split_with_sizes(self._split)[::2]
        return [place.view(part) for place, part in zip(self._places, parts, strict=True)]

    def parameters_in(self, flat: Tensor) -> list[tuple[Parameter, Tensor]]:
        """Returns each parameter with its place in a tensor laid out like x."""
        return list(zip(self.parameters, self.views(flat), strict=True))

    def begin_of(self, index: int) -> int:
        """Returns the element of x at which a parameter begins."""
        return self._bounds[self.parameters[index]][0]

    def spans(self, parameters: Iterable[Parameter]) -> list[slice]:
        """Returns where these parameters lie in x; neighbours and their gaps are one span."""
        spans: list[slice] = []
        for begin, end in sorted(self._bounds[p] for p in parameters if p in self._bounds):
            follows = bool(spans) and spans[-1].stop == begin
            spans.append(slice(spans.pop().start if follows else begin, end))
        return spans

    def is_intact(self) -> bool:
        """Returns whether all parameters still are views of x: same memory, shape and strides.

        Takes a microsecond a parameter and never waits for a GPU: cheap enough for every step.
        """
        return all(map(_is_at, self.parameters, self._x_views))

    def refresh(self) -> None:
        """Takes parameters that left x back into it, with the values that they have now.

        They get the strides back that they had when x was made: x, g and what an algorithm keeps
        stay laid out alike.  As cheap as `is_intact` when nothing has left.

        Raises:
            ValueError: When a parameter has another dtype, device or shape.  Nothing is moved then.
        """
        moved: list[tuple[Parameter, Tensor]] = []
        for name, parameter, view in zip(self.names, self.parameters, self._x_views, strict=True):
            if not _is_at(parameter, view):
                _check_alike(name, parameter, view)
                moved.append((parameter, view))
        # A parameter may have been pointed at the place of another, which is about to be written.
        inside = self.x.untyped_storage().data_ptr()
        values = [
            p.data.clone() if p.untyped_storage().data_ptr() == inside else p.data for p, _ in moved
        ]
        for (parameter, view), value in zip(moved, values, strict=True):
            parameter.data = view.copy_(value)

    def open(self) -> None:
        """Brings x up to date, where it is a copy of the parameters, before x is used."""
        if not self._is_open:
            self.pull()
            self._is_open = True

    def close(self) -> None:
        """Has the parameters follow x, if x has been opened."""
        if self._is_open:
            self.push()
            self._is_open = False

    def publish(self) -> None:
        """Has the parameters follow x, to which something has been written."""
        self._is_open = True
        self.close()

    def thinned(self, step: int) -> Tensor:
        """Returns one of `step` entries of x, up to date; the tensor may be a view of x."""
        return self.x[::step]

    def pull(self) -> None:
        """Puts the parameters' values into x, if the parameters do not lie in x."""

    def push(self) -> None:
        """Puts the values of x into the parameters, if the parameters do not lie in x."""

    def _match(self, some: slice) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Returns the views of g to write, their gradients, and those that no gradient has."""
        written: list[Tensor] = []
        grads: list[Tensor] = []
        absent: list[Tensor] = []
        kinds = self.names, self.parameters, self._g_views
        for name, parameter, view in zip(*(kind[some] for kind in kinds), strict=True):
            grad = parameter.grad
            if grad is None:
                absent.append(view)
            elif grad is not view:
                if grad.layout is not torch.strided:
                    raise ValueError(
                        f"gradients must be dense, got one of layout {grad.layout} for parameter "
                        f"{name!r}; make its embedding with sparse=False"
                    )
                written.append(view)
                grads.append(grad)
        return written, grads, absent


class Whole:
    """Lays a module's replica out on this rank alone."""

    def flatten(self, named_parameters: Iterable[tuple[str, Parameter]]) -> list[FlatParameters]:
        """Moves parameters into flat tensors; see `flatten`."""
        return flatten(named_parameters)

    def local(self, tensor: Tensor) -> Tensor:
        """Returns this rank's share of a tensor, without its gradients' history."""
        return tensor.data

    def describe(self) -> str:
        """How several ranks hold the replica together; empty where one rank holds it."""
        return ""

    def reshard(self) -> None:
        """Drops what was gathered from other ranks; here, nothing was."""


def check_module(module: nn.Module) -> None:
    """Raises `ValueError` for modules whose gradients will be sparse, for which g has no room."""
    for name, child in module.named_modules():
        if (
            isinstance(child, nn.Embedding | nn.EmbeddingBag)
            and child.sparse
            and child.weight.requires_grad
        ):
            raise ValueError(
                f"gradients must be dense, got module {name!r}, {type(child).__name__} with "
                "sparse=True; make it with sparse=False"
            )


class Place(NamedTuple):
    """Says how a parameter lies in its place of a flat tensor."""

    size: torch.Size
    stride: tuple[int, ...]
    is_complex: bool
    numel: int
    """The number of elements in the flat tensor; a complex number takes two."""
    padding: int = 0
    """The number of zeros that must follow in any case."""

    @staticmethod
    def of(tensor: Tensor, padding: int = 0) -> Place:
        """Returns the place of a tensor."""
        is_complex = tensor.is_complex()
        numel = tensor.numel() * (2 if is_complex else 1)
        return Place(tensor.size(), tensor.stride(), is_complex, numel, padding)

    def lengths(self, step: int) -> tuple[int, int]:
        """Returns its length and the gap behind it: the next begins at a multiple of `step`."""
        return self.numel, self.padding + -(self.numel + self.padding) % step

    def view(self, part: Tensor) -> Tensor:
        """Returns a piece of a flat tensor in the parameter's form."""
        if self.is_complex:
            part = part.view(part.dtype.to_complex())
        return part.as_strided(self.size, self.stride)


def _is_at(parameter: Parameter, view: Tensor) -> bool:
    return parameter.device == view.device and parameter.is_set_to(view)


def _check_alike(name: str, parameter: Parameter, view: Tensor) -> None:
    wanted, given = (
        f"{t.dtype} on {t.device} with shape {tuple(t.shape)}" for t in (view, parameter)
    )
    if wanted != given:
        raise ValueError(
            f"parameter {name!r} must remain {wanted}, as when training was set up, got {given}; "
            "change dtype, device or shape before fit, or flatten the module again"
        )


def check_parameters(names: Mapping[Any, str]) -> None:
    """Raises `ValueError` for tensors, with their names, that cannot be views of x."""
    for parameter, name in names.items():
        if is_lazy(parameter):
            raise ValueError(
                f"parameters must have a shape, got the lazy parameter {name!r}; run a forward "
                "pass with a sample batch before training"
            )
        if hasattr(parameter, "device_mesh"):
            raise ValueError(
                f"parameters must be whole, got shards of {name!r}; name the replicas that an "
                'algorithm is to work between: decentralized(..., replicas=mesh["replica"]), or '
                "ShardedStrategy for the Trainer"
            )
        if type(parameter.data) is not Tensor or parameter.layout is not torch.strided:
            raise ValueError(
                f"parameters must be plain dense tensors, got {type(parameter.data).__name__} of "
                f"layout {parameter.layout} for {name!r}; convert it before training, or train "
                "this model with Lightning's own strategies"
            )
        if parameter.is_meta:
            raise ValueError(
                f"parameters must have values, got {name!r} on the meta device; call "
                "module.to_empty(device=...) and initialise it before training"
            )
        if not (parameter.is_floating_point() or parameter.is_complex()):
            raise ValueError(
                "parameters must be of a floating-point or complex dtype, got "
                f"{parameter.dtype} for {name!r}; register it as a buffer"
            )
        if not _is_dense(parameter):
            raise ValueError(
                "parameters must fill their memory without gaps and overlaps, got strides "
                f"{parameter.stride()} for {name!r} of shape {tuple(parameter.shape)}; make it "
                "from tensor.contiguous()"
            )
    _check_disjoint(names)


def _is_dense(parameter: Parameter) -> bool:
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1 and stride != expected:
            return parameter.numel() == 0
        expected *= size
    return True


def _check_disjoint(names: Mapping[Any, str]) -> None:
    """Raises where two parameters share memory without being one object: x would separate them."""
    owners = [p for p in names if not is_lazy(p) and not p.is_meta and p.numel()]
    owners.sort(key=lambda parameter: (str(parameter.device), parameter.data_ptr()))
    for before, after in pairwise(owners):
        end = before.data_ptr() + before.numel() * before.element_size()
        if before.device == after.device and after.data_ptr() < end:
            raise ValueError(
                "parameters must not share memory unless they are one object, got "
                f"{names[before]!r} and {names[after]!r}; assign the same Parameter to both"
            )


def trainable(optimizer: Optimizer) -> list[Parameter]:
    """Returns the optimizer's parameters that are trained; frozen ones stay equal on all ranks."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
