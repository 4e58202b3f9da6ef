"""The contract between a data-parallel SGD algorithm and whoever drives it.

    gradients g are there  ->  before_update(x, g)
    optimizer.step changes x in place
                           ->  after_update(x)

Legend: x the weights of this rank, one flat tensor that IS the parameters (their fp32 form where
they are in half precision: `replica.wide`); g the gradient, flat like x; P ranks.  The same object
runs under Lightning, in the simulated world and in a test: it knows no more than a `Transport`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dsgd import hyperparameters
from lightning_dsgd.agreement import average
from lightning_dsgd.transport import Transport


@dataclass(frozen=True)
class Profile:
    """What helps to choose an algorithm, besides the first line of its docstring.

    |x| and |g| are the sizes of the weights and of the gradient in bytes.

    Args:
        when: how often it communicates
        with_whom: with which ranks
        sends: bytes that a rank sends per step
        memory: memory that a rank needs in addition to plain training
        suits: the situation that it is for; not of use for this package's own algorithms
    """

    when: str
    with_whom: str
    sends: str
    memory: str
    suits: str = ""


@dataclass(frozen=True)
class Conditions:
    """All that an algorithm is told from outside, besides its hyperparameters.

    Args:
        ranks_per_node: how many ranks the launch has started on each node, if that is known
        skips_overflow: whether all ranks skip a step before which the gradient is left with NaN or
            inf in it: a loss that is scaled for fp16 overflows now and then
        gradient_counts: for each parameter, on how many ranks it has a gradient; only for an
            algorithm that `counts_gradients`.  Before each step it holds this rank's own, 0 or 1,
            and `num_active` sums it in place.
        claims_batches: whether a rank takes its batches from what is left of an epoch, and so makes
            as many steps as it has time for
        samples: where means are weighted by samples, of how many this rank's step is made; set
            before its gradient is, and only for an algorithm that `weighs_samples`
        optimizer: what steps x, if that is known
        parameters_in: gives the optimizer's parameters that lie in x, each with its place in a
            tensor that is laid out like x; None where the optimizer steps x itself, or a shard
        fragments: where each fragment of whole layers begins in x, and where the last one ends;
            only for an algorithm that has `num_layer_fragments`
        is_whole: whether x is all that the replica trains, and not one of its parts or a shard
        goes_on: whether the others go on where a rank is lost
        num_homes: how many ranks' batches make a step, for an algorithm that `sums_units`; None: as
            many as there are ranks
        look: brings x up to date where x is a copy of the parameters; an algorithm that
            `looks_itself` calls it
    """

    ranks_per_node: int | None = None
    skips_overflow: bool = False
    gradient_counts: Tensor | None = None
    claims_batches: bool = False
    samples: Tensor | None = None
    optimizer: Optimizer | None = None
    parameters_in: Callable[[Tensor], Sequence[tuple[Tensor, Tensor]]] | None = None
    fragments: tuple[int, ...] = ()
    is_whole: bool = True
    goes_on: bool = False
    num_homes: int | None = None
    look: Callable[[], None] = lambda: None


ORDINARY: Final = Conditions()


@dataclass(frozen=True)
class Traits:
    """What whoever drives an algorithm must know of it.

    Args:
        uses_gradient: whether `before_update` needs g; if not, no gradient is gathered, and g is
            empty
        averages_weights: whether the algorithm changes weights, and not gradients alone; if so, x
            and g are fp32 where the parameters are in half precision
        lockstep: whether every rank waits for every other in every step
        exchange_period: how many steps there are from one exchange with other ranks to the next
        could_overlap: whether ranks wait for exchanges during which they would train with
            `overlap=True`, which takes more memory
        counts_gradients: whether the algorithm hands `Conditions.gradient_counts` to `num_active`
            in every round, so that ranks in lockstep agree on which parameters the optimizer steps
        takes_pieces: whether the algorithm, once started, wants to hear of the gradient during the
            backward pass: see `Algorithm.gradient_made`
        sums_units: whether the algorithm takes the gradients of a step's micro-batches one by one,
            and gives their sum before `before_update`: see `Balanced`
        keeps_updates: whether every update of every rank reaches the consensus, whoever is late;
            where gradients are averaged, every gradient.  What a rank keeps back for a later step
            is not lost.  How many are kept is measured (`replica.part`); where gradients are
            averaged, `metrics` may say how many of these are in the sums, as `updates_kept`.
        holds_back: whether the algorithm keeps what it will apply later, which a resume with
            another number of ranks has to `carry_over`
        follows_time: whether what a rank learns may depend on which rank comes first; if not, two
            trainings with the same data end with the same weights
        weighs_samples: whether means can be weighted by `Conditions.samples`
        scales_steps: whether the optimizer's steps are to be scaled: see `primitives.step_scaling`
        looks_itself: whether the algorithm calls `Conditions.look` in `before_update`, before it
            reads or changes x there; if not, x is up to date there in every step
        num_layer_fragments: into how many `Conditions.fragments` x is to be laid out; 0: as the
            module has it
    """

    uses_gradient: bool = False
    averages_weights: bool = True
    lockstep: bool = False
    exchange_period: int = 1
    could_overlap: bool = False
    counts_gradients: bool = False
    takes_pieces: bool = False
    sums_units: bool = False
    keeps_updates: bool = True
    holds_back: bool = False
    follows_time: bool = True
    weighs_samples: bool = False
    scales_steps: bool = False
    looks_itself: bool = False
    num_layer_fragments: int = 0


class Algorithm:
    """What one rank does to train one flat tensor together with the other ranks.

    Subclasses are dataclasses whose fields are the hyperparameters; all other state is made in
    `start`.  A step may change x and g in place.
    """

    name: ClassVar[str]
    """The name that `Trainer(strategy=...)` takes."""

    profile: ClassVar[Profile | None] = None
    """The algorithm's row in the table of strategies."""

    printed: ClassVar[dict[str, Any]] = {}
    """What the hyperparameters must be with `paper=True`, for an algorithm that has that one."""

    pieces_option: ClassVar[tuple[str, str]] = "overlap=True", "overlap=False"
    """What makes the algorithm take pieces (`Traits.takes_pieces`), and what makes it take none."""

    overflowed: bool | None = None
    """Whether any rank's last gradient had NaN or inf in it; None: the host has not asked."""

    similarity: Any = None
    """`step_scaling.Similarity` of the ranks' steps, where exchanges tell it; else None."""

    net: Transport
    conditions: Conditions

    @property
    def traits(self) -> Traits:
        """What whoever drives the algorithm must know, with the hyperparameters that it has."""
        return Traits()

    @property
    def weight(self) -> int:
        """How much this rank's step counts in a mean: 1, or as many samples as it has."""
        return 1 if self.conditions.samples is None else int(self.conditions.samples)

    def no_samples(self, num_pieces: int = 1) -> Tensor:
        """Returns what counts the samples since each piece of x was averaged, if that is asked."""
        is_asked = self.conditions.samples is not None
        return torch.zeros(num_pieces if is_asked else 0, dtype=torch.int64)

    @property
    def team_size(self) -> int:
        """How many consecutive ranks make their steps together, with the mean of their gradients.

        A rank that has run out of data takes over the steps of the others.
        """
        traits = self.traits
        return self.net.world_size if traits.lockstep and traits.uses_gradient else 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__doc__ = hyperparameters.documented(cls)

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Refuses an unknown option, with the one that may be meant: `__init__` names none."""
        hyperparameters.check_names(cls, given)
        if args and cls.__init__ is object.__init__:  # which leaves that to us
            raise TypeError(f"{cls.__name__} takes no arguments, got {', '.join(map(repr, args))}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        hyperparameters.take_printed(self)

    def hyperparameters(self) -> dict[str, Any]:
        """Returns the names and the values of the dataclass's fields."""
        return {name: getattr(self, name) for name in hyperparameters.names(self)}

    def check_hyperparameters(self) -> None:
        """Raises `ValueError` for hyperparameters that can work with no number of ranks.

        A strategy calls this when it is made, before there are ranks.  Each field has its own rule;
        algorithms add rules for several fields.
        """
        hyperparameters.check(self)
        hyperparameters.check_printed(self)
        if self.traits.scales_steps and self.traits.uses_gradient:
            raise ValueError(
                "scale_steps is for steps that the ranks make apart, with gradients of their own, "
                "and average afterwards, got scale_steps=True where gradients are averaged "
                "(node_size, or local_steps=1); set scale_steps=False"
            )

    def check(self, world_size: int, conditions: Conditions = ORDINARY) -> None:
        """Raises `ValueError` for hyperparameters that cannot work with so many ranks.

        `start` calls this before the first message.
        """
        self.check_hyperparameters()

    def start(self, net: Transport, x: Tensor, conditions: Conditions = ORDINARY) -> None:
        """Connects to the network; x is the same on all ranks, or what a resume restored."""
        self.check(net.world_size, conditions)
        self.net = net
        self.conditions = conditions

    def gradient_made(self, g: Tensor, begin: int) -> None:
        """Is called during the backward pass, once g is there from the element `begin` on.

        Only an algorithm that `takes_pieces` (see `Traits`) is called.  From then on that part of g
        is its own, until `before_update` has returned.
        """

    def add(
        self,
        step: int,
        unit: int,
        views_of: Callable[[Tensor], Sequence[Tensor]],
        gradients: Sequence[Tensor | None],
        scale: float = 1.0,
    ) -> None:
        """Adds the gradients of one micro-batch to this rank's sum of a step.

        Only an algorithm that `sums_units` is called, in this and the next three.

        Args:
            step: the step
            unit: the micro-batch's number in the step
            views_of: gives the parameters' places in a tensor that is laid out like x
            gradients: by parameter
            scale: what they are multiplied by
        """
        raise NotImplementedError

    def close_step(self, step: int) -> None:
        """Is called once all micro-batches of a step are in some rank's sum; may be in a lane."""
        raise NotImplementedError

    def await_sum(self, step: int) -> None:
        """Waits until a step's mean is there."""
        raise NotImplementedError

    def take_sum(self, step: int) -> tuple[Tensor, Tensor]:
        """Waits for a step's mean, and returns it.

        With it come, by parameter, how many micro-batches had a gradient.
        """
        raise NotImplementedError

    def before_update(self, x: Tensor, g: Tensor) -> None:
        """Is called when gradients are ready and the optimizer has not stepped yet."""

    def after_update(self, x: Tensor) -> None:
        """Is called when the optimizer has stepped."""

    def settle(self, x: Tensor) -> None:
        """Takes part in what the other ranks still do until every rank has come here.

        Ranks stop stepping at different times: to evaluate, to save, or because data ran out.
        After this call nothing is in flight and every rank stands at the same point.
        """

    def consensus(self, x: Tensor) -> Tensor:
        """Returns the weights to evaluate and save, the same on all ranks, which have settled."""
        mean = x.clone()
        average(self.net, mean)
        return mean

    def held_back(self) -> Tensor | None:
        """Returns all gradients that have not been applied yet; None: there are none.

        The optimizer applies them at the end of training, before `finish`.  They are the gradients
        of all ranks, and the same on each.  The call changes nothing, so it may be repeated after a
        loss.
        """
        return None

    def finish(self, x: Tensor) -> None:
        """Leaves the consensus in x and ends all that runs; every rank has settled."""
        x.copy_(self.consensus(x))
        self.stop()

    def stop(self) -> None:
        """Ends all lanes, also when training failed.  Never waits for another rank."""

    def num_copies(
        self, world_size: int, *, is_claimed: bool = False, on_device: bool = False
    ) -> float:
        """Returns the memory that a rank needs more at its peak, in copies of x; NaN: not known.

        `Profile.memory` says the same in words.

        Args:
            world_size: P
            is_claimed: whether ranks claim batches, and so have different numbers of them
            on_device: whether ranks train on a device
        """
        return math.nan

    def state_dict(self) -> dict[str, Any]:
        """Returns all that an exact resume needs besides x: tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` has returned, after `start`."""

    def carry_over(self, state: dict[str, Any], num_ranks: int) -> None:
        """Takes over all of a state that does not depend on which ranks there are.

        It is called after `start`, among other ranks than before.  Where a rank is lost or joins,
        `state` is this rank's own.  Where the algorithm `holds_back`, and training goes on from a
        checkpoint of another number of ranks, a rank takes over the states of none, one or several.

        Args:
            state: what `state_dict` has returned on one rank
            num_ranks: how many ranks' states are carried over, here and elsewhere: the mean of what
                these have held back is to be the mean over all ranks
        """

    def measure_kept(self) -> None:
        """Measures the `updates_kept` of `metrics`, on all ranks together at a consensus.

        An algorithm has one if its gradients are to be counted, and not the updates made of them.
        """

    def metrics(self) -> dict[str, float]:
        """Returns figures of the algorithm itself, to be logged as `dsgd/...`."""
        return {}
