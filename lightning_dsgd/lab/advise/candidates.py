"""What is simulated for an advice: every strategy, with the settings that are worth a try."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.hyperparameters import parse
from lightning_dsgd.primitives.error_feedback import ErrorFeedback

BOUND: Final = "no_sync"
"""Never communicates: nothing is faster, and it learns nothing from the others."""
BASELINE: Final = "allreduce"


@dataclass(frozen=True)
class Candidate:
    """Names a strategy with its settings.

    Args:
        spec: the strategy as on the command line
        copies: the memory that a rank needs more at its peak, in copies of the weights
    """

    spec: str
    copies: float

    @property
    def name(self) -> str:
        """The name of the strategy."""
        return parse(self.spec)[0]

    @property
    def is_sparse(self) -> bool:
        """Whether every rank unpacks messages of every other, which takes long to simulate."""
        return isinstance(make_algorithm(self.spec), ErrorFeedback)


CANDIDATES: Final = (
    Candidate("no_sync", 0),
    Candidate("allreduce", 1),
    Candidate("allreduce:wire_dtype=int8:overlap=true", 2),
    Candidate("local_sgd", 0),
    Candidate("local_sgd:sync_period=2", 0),
    Candidate("local_sgd:sync_period=32", 0),
    Candidate("local_sgd:wire_dtype=int8", 2),
    Candidate("diloco:sync_period=100", 2),
    Candidate("dpsgd", 2),
    Candidate("sgp", 2),
    Candidate("sgp:overlap=1", 3),
    Candidate("sgp:overlap=1:wire_dtype=int8", 3),
    Candidate("popsgd", 5),
    Candidate("popsgd:wire_dtype=int8", 6),
    Candidate("popsgd:blocking=true", 1),
    Candidate("adpsgd", 4),
    Candidate("adpsgd:wire_dtype=int8", 4),
    Candidate("hpsgd", 2),
    Candidate("hpsgd:max_local_steps=2", 2),
    Candidate("hpsgd:wire_dtype=int8", 4),
    Candidate("hpsgd:wire_dtype=int4", 4),
    Candidate("eager_sgd", 4),
    Candidate("wagma", 2),
    Candidate("wagma:sync_period=10", 2),
    Candidate("wagma:group_period=2:wire_dtype=int8", 6),
    Candidate("wagma:overlap=true", 3),
    Candidate("wagma:overlap=true:sync_period=10:wire_dtype=int8", 7),
    Candidate("oktopk", 3.25),
    Candidate("oktopk:wire_dtype=int8", 3.25),
    Candidate("oktopk:local_steps=4", 3.25),
    Candidate("oktopk:local_steps=4:wire_dtype=int4", 3.25),
    Candidate("topk_allgather", 2),
    Candidate("topk_dsa", 2.5),
    Candidate("gtopk", 2),
    Candidate("gaussian_topk", 2),
)
