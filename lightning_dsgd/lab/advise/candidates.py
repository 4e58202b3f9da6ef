"""What is simulated for an advice: every strategy, with the settings that are worth a try."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.hyperparameters import parse
from lightning_dsgd.lab import decisions
from lightning_dsgd.lab.epochs import CLAIMED, EQUAL
from lightning_dsgd.lab.target_rows import label
from lightning_dsgd.primitives.error_feedback import ErrorFeedback

BOUND: Final = "no_sync"
"""Never communicates: nothing is faster, and it learns nothing from the others."""
BASELINE: Final = "allreduce"


@dataclass(frozen=True)
class Candidate:
    """Names a strategy with its settings.

    Args:
        spec: the strategy as on the command line
        data: how an epoch's batches are dealt, "equal" or "claimed"
    """

    spec: str
    data: str = EQUAL

    @property
    def label(self) -> str:
        """What a row is called, here and in the results of `benchmarks target`."""
        return label({"strategy": self.spec} | ({} if self.data == EQUAL else {"data": self.data}))

    @property
    def name(self) -> str:
        """The name of the strategy."""
        return parse(self.spec)[0]

    @property
    def is_sparse(self) -> bool:
        """Whether every rank unpacks messages of every other, which takes long to simulate."""
        return isinstance(make_algorithm(self.spec), ErrorFeedback)

    @property
    def lockstep(self) -> bool:
        """Whether ranks step together, and so cannot claim batches."""
        return make_algorithm(self.spec).traits.lockstep


def all_for(num_ranks: int) -> list[Candidate]:
    """Returns all candidates, those of `decisions` included that need so many ranks or fewer."""
    decided = [
        Candidate(choice.strategy)
        for situation in decisions.SITUATIONS.values()
        for choice in situation.choices
        if choice.strategy not in decisions.NOT_COMPARED and choice.least_ranks <= num_ranks
    ]
    return list(dict.fromkeys((*CANDIDATES, *decided)))


def with_claims(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Returns the candidates, each beside the same with claimed batches where ranks can claim."""
    pairs = [(each, replace(each, data=CLAIMED)) for each in candidates]
    return [each for pair in pairs for each in (pair[:1] if pair[0].lockstep else pair)]


CANDIDATES: Final = tuple(
    Candidate(spec)
    for spec in (
        "no_sync",
        "allreduce",
        "allreduce:wire_dtype=int8:overlap=true",
        "local_sgd",
        "local_sgd:sync_period=2",
        "local_sgd:sync_period=32",
        "local_sgd:wire_dtype=int8",
        "diloco:sync_period=100",
        "sparse_loco",
        "noloco",
        "dpsgd",
        "sgp",
        "sgp:overlap=1",
        "sgp:overlap=1:wire_dtype=int8",
        "popsgd",
        "popsgd:wire_dtype=int8",
        "popsgd:blocking=true",
        "adpsgd",
        "adpsgd:wire_dtype=int8",
        "hpsgd",
        "hpsgd:max_local_steps=2",
        "hpsgd:wire_dtype=int8",
        "hpsgd:wire_dtype=int4",
        "eager_sgd",
        "wagma",
        "wagma:sync_period=10",
        "wagma:group_period=2:wire_dtype=int8",
        "wagma:overlap=true",
        "wagma:overlap=true:sync_period=10:wire_dtype=int8",
        "oktopk",
        "oktopk:wire_dtype=int8",
        "oktopk:local_steps=4",
        "oktopk:local_steps=4:wire_dtype=int4",
        "topk_allgather",
        "topk_dsa",
        "gtopk",
        "gaussian_topk",
    )
)
