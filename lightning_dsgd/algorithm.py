"""The contract between a data-parallel SGD algorithm and whoever drives it.

    gradients g are there  ->  before_update(x, g)
    optimizer.step changes x in place
                           ->  after_update(x)

Legend: x the weights of this rank, one flat tensor that IS the parameters; g the gradient, flat
like x; P ranks.  The same object runs under Lightning, in the simulated world and in a test: it
knows no more than a `Transport`.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from lightning_dsgd.transport import Transport

_KINDS: Final[dict[str, tuple[type, str]]] = {
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "True or False"),
    "str": (str, "a string"),
    "None": (type(None), "None"),
}
"""What a hyperparameter may be, by the annotation of its field."""


@dataclass(frozen=True)
class Profile:
    """What one chooses an algorithm by, besides the first line and the memory of its docstring.

    Args:
        when: how often it communicates
        with_whom: with which ranks
        sends: what a rank sends in a step; words are of 4 bytes
        suits: for which situation it is
    """

    when: str
    with_whom: str
    sends: str
    suits: str


class Algorithm:
    """One rank's part in the training of one flat tensor.

    Subclasses are dataclasses whose fields are the hyperparameters; all other state is made in
    `start`.  A step may change x and g in place.
    """

    name: ClassVar[str]
    """What `Trainer(strategy=...)` calls it."""

    profile: ClassVar[Profile | None] = None
    """For the table of strategies."""

    uses_gradient: ClassVar[bool] = False
    """Whether `before_update` needs g; if not, no gradient is gathered, and g is empty."""

    lockstep: ClassVar[bool] = False
    """Whether every rank waits for every other in every step."""

    skips_overflow: bool = False
    """Whether all ranks skip a step before which g is left with NaN or inf in it.

    Set by whoever drives it: a loss that is scaled for fp16 overflows now and then.
    """

    counts_gradients: ClassVar[bool] = False
    """Whether it hands `num_gradients` to `num_active` in every round, so that ranks in lockstep
    agree on which parameters the optimizer steps.
    """

    num_gradients: Tensor | None = None
    """For each parameter, on how many ranks it has a gradient, where `counts_gradients`.

    Set by whoever drives it, before a step to this rank's own, 0 or 1; `num_active` sums it.
    """

    net: Transport

    def hyperparameters(self) -> dict[str, Any]:
        """The fields of the dataclass."""
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]

    def check(self, world_size: int) -> None:
        """Raises `ValueError` for hyperparameters that cannot work, before the first message.

        Here those of another type than their field's: a command line may have passed text, and
        "False" is true.
        """
        own: tuple[Field[Any], ...] = fields(self) if is_dataclass(self) else ()
        for field in own:
            kinds = getattr(field.type, "__name__", str(field.type)).split(" | ")
            if not set(kinds) <= _KINDS.keys():
                continue
            types, words = zip(*(_KINDS[kind] for kind in kinds), strict=True)
            name, value, default = field.name, getattr(self, field.name), field.default
            if not isinstance(value, types):
                way_out = "" if default is MISSING else f"; try {name}={default!r}"
                raise ValueError(
                    f"{name} must be {' or '.join(words)}, got {name}={value!r}{way_out}"
                )

    def start(self, net: Transport, x: Tensor) -> None:
        """Connects to the network; x is the same on all ranks, or what a resume restored."""
        self.check(net.world_size)
        self.net = net

    def before_update(self, x: Tensor, g: Tensor) -> None:
        """Gradients are ready, the optimizer has not stepped yet."""

    def after_update(self, x: Tensor) -> None:
        """The optimizer has stepped."""

    def settle(self, x: Tensor) -> None:
        """Takes part in what the others still do until every rank has come here.

        Ranks stop to step at different times, to evaluate, to save or because they ran out of data.
        After this call nothing is in flight and every rank stands at the same point.
        """

    def consensus(self, x: Tensor) -> Tensor:
        """The weights to evaluate and to save, the same on all ranks; every rank has settled."""
        mean = x.clone()
        average(self.net, mean)
        return mean

    def finish(self, x: Tensor) -> None:
        """Leaves the consensus in x and ends all that runs; every rank has settled."""
        x.copy_(self.consensus(x))
        self.stop()

    def stop(self) -> None:
        """Ends lanes; also called when training failed.  Never waits for another rank."""

    def state_dict(self) -> dict[str, Any]:
        """All that an exact resume needs besides x: tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave, after `start`."""

    def metrics(self) -> dict[str, float]:
        """Figures of the algorithm itself, to be logged as `dsgd/...`."""
        return {}


def average(net: Transport, x: Tensor) -> None:
    """Puts the mean of x over all ranks into x."""
    net.all_reduce(x).wait()
    x /= net.world_size


def num_active(net: Transport, *, active: bool, num_gradients: Tensor | None = None) -> int:
    """How many ranks are still stepping.

    A rank that has stopped keeps calling this in `settle`, so every round of a synchronous
    algorithm begins with it: the ranks that go on learn who does, those that stopped learn whether
    to go on serving.

    Args:
        net: of all ranks
        active: whether this one is stepping
        num_gradients: `Algorithm.num_gradients`, summed in place over those that are stepping
    """
    counts = torch.tensor([int(active)])
    if num_gradients is not None:
        counts = torch.cat([counts, num_gradients * int(active)])
    net.all_reduce(counts).wait()
    if num_gradients is not None:
        num_gradients.copy_(counts[1:])
    return int(counts[0])


def take_over_newest(net: Transport, x: Tensor, step: int) -> int:
    """Gives every rank the weights of the one that has made the most steps, and tells how many.

    Where all ranks hold the same weights as long as they step, this brings those along that stopped
    before the others.
    """
    steps = [int(theirs) for theirs in net.all_gather(torch.tensor([step])).wait()]
    newest = steps.index(max(steps))
    if len(set(steps)) > 1:
        net.broadcast(x, newest).wait()
    return steps[newest]
