"""The contract between a data-parallel SGD algorithm and whoever drives it.

    gradients g are there  ->  before_update(x, g)
    optimizer.step changes x in place
                           ->  after_update(x)

Legend: x the weights of this rank, one flat tensor that IS the parameters; g the gradient, flat
like x; P ranks.  The same object runs under Lightning, in the simulated world and in a test: it
knows no more than a `Transport`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from torch import Tensor

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
        suits: which situation it is for
    """

    when: str
    with_whom: str
    sends: str
    memory: str
    suits: str


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
    """

    ranks_per_node: int | None = None
    skips_overflow: bool = False
    gradient_counts: Tensor | None = None


PLAIN: Final = Conditions()


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

    counts_gradients: ClassVar[bool] = False
    """Whether it hands `Conditions.gradient_counts` to `num_active` in every round, so that ranks
    in lockstep agree on which parameters the optimizer steps.
    """

    keeps_updates: ClassVar[bool] = True
    """Whether every update of every rank reaches the consensus, whoever is late; where gradients
    are averaged, every gradient.  What a rank keeps back for a later step is not lost.  How many
    are kept is measured (`replica.kept`); where gradients are averaged, `metrics` may say how many
    of these are in the sums, as `updates_kept`.
    """

    holds_back: ClassVar[bool] = False
    """Whether it keeps what is to be applied later, which a resume with another number of ranks is
    to `carry_over`.
    """

    follows_time: ClassVar[bool] = True
    """Whether what a rank learns may depend on which rank comes first; if not, two trainings with
    the same data end with the same weights.
    """

    net: Transport
    conditions: Conditions

    @property
    def team_size(self) -> int:
        """How many consecutive ranks make their steps together, with the mean of their gradients.

        One that has run out of data takes over the steps of the others.
        """
        return self.net.world_size if self.lockstep and self.uses_gradient else 1

    @property
    def exchange_period(self) -> int:
        """How many steps there are from one exchange with other ranks to the next."""
        return 1

    @property
    def scales_steps(self) -> bool:
        """Whether who drives it scales the optimizer's steps: see `primitives.step_scaling`."""
        return bool(getattr(self, "scale_steps", False))

    def hyperparameters(self) -> dict[str, Any]:
        """The fields of the dataclass."""
        return {name: getattr(self, name) for name in hyperparameters.names(self)}

    def check_hyperparameters(self) -> None:
        """Raises `ValueError` for hyperparameters that can work with no number of ranks.

        A strategy asks for it when it is made, before there are ranks.  Here each field's own rule;
        algorithms add what concerns several.
        """
        hyperparameters.check(self)
        if self.scales_steps and self.uses_gradient:
            raise ValueError(
                "scale_steps is for steps that the ranks make apart, with gradients of their own, "
                "and average afterwards, got scale_steps=True where gradients are averaged "
                "(hierarchical=True, or local_steps=1); set scale_steps=False"
            )

    def check(self, world_size: int, conditions: Conditions = PLAIN) -> None:
        """Raises `ValueError` for hyperparameters that cannot work with so many ranks.

        Before the first message.
        """
        self.check_hyperparameters()

    def start(self, net: Transport, x: Tensor, conditions: Conditions = PLAIN) -> None:
        """Connects to the network; x is the same on all ranks, or what a resume restored."""
        self.check(net.world_size, conditions)
        self.net = net
        self.conditions = conditions

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

    def held_back(self) -> Tensor | None:
        """All gradients that have not been applied, for the optimizer; None: there are none.

        Of all ranks, the same on each; at the end of training, before `finish`.  Changes nothing,
        so it may be called again after a loss.
        """
        return None

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

    def carry_over(self, state: dict[str, Any], num_ranks: int) -> None:
        """Takes over what `state_dict` gave and does not depend on the ranks.

        After `start`, among other ranks than before: where one is lost or joins, this rank's own
        state; where it `holds_back`, and training goes on from a checkpoint of another number of
        ranks, the states of none, one or several of these.

        Args:
            state: of one rank
            num_ranks: of how many ranks states are carried over, here and elsewhere: the mean over
                these of what they have held back is to be the mean over all ranks
        """

    def measure_kept(self) -> None:
        """Measures, on all ranks together at a consensus, what `metrics` has as `updates_kept`.

        For algorithms of which gradients are to be counted, and not the updates made of them.
        """

    def metrics(self) -> dict[str, float]:
        """Figures of the algorithm itself, to be logged as `dsgd/...`."""
        return {}
