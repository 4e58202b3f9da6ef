"""The algorithms, one paper a file; `ALGORITHMS` and `BY_UNITS` are the only lists of them.

A package of somebody else's adds one of its own through an entry point:

    [project.entry-points."lightning_dsgd.algorithms"]
    mine = "my_package:MyAlgorithm"          # a dataclass that is an `Algorithm`, with a name
"""

from __future__ import annotations

import warnings
from collections import ChainMap
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Final

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms.adpsgd import ADPSGD
from lightning_dsgd.algorithms.allreduce import AllReduce
from lightning_dsgd.algorithms.balanced import Balanced
from lightning_dsgd.algorithms.diloco import DiLoCo
from lightning_dsgd.algorithms.dpsgd import DPSGD
from lightning_dsgd.algorithms.eager_sgd import EagerSGD
from lightning_dsgd.algorithms.hpsgd import HPSGD
from lightning_dsgd.algorithms.local_sgd import LocalSGD
from lightning_dsgd.algorithms.no_sync import NoSync
from lightning_dsgd.algorithms.noloco import NoLoCo
from lightning_dsgd.algorithms.oktopk import OkTopk
from lightning_dsgd.algorithms.popsgd import PopSGD
from lightning_dsgd.algorithms.sgp import SGP
from lightning_dsgd.algorithms.sparse_baselines import GaussianTopk, GTopk, TopkAllgather, TopkDSA
from lightning_dsgd.algorithms.sparse_loco import SparseLoCo
from lightning_dsgd.algorithms.wagma import WAGMA
from lightning_dsgd.hyperparameters import did_you_mean, names, parse, unknown

_GROUP: Final = "lightning_dsgd.algorithms"

_IN_FRONT: Final[tuple[type[Algorithm], ...]] = (
    WAGMA, HPSGD, OkTopk, PopSGD, SGP, ADPSGD, LocalSGD, DiLoCo, AllReduce,
)  # fmt: skip
_COMPARED: Final[tuple[type[Algorithm], ...]] = (
    EagerSGD, DPSGD, NoLoCo, SparseLoCo, TopkAllgather, TopkDSA, GTopk, GaussianTopk, NoSync,
)  # fmt: skip
ALGORITHMS: Final[dict[str, type[Algorithm]]] = {
    algorithm.name: algorithm for algorithm in (*_IN_FRONT, *_COMPARED)
}
"""The algorithms by name; the first ones are those to try first."""
COMPARISONS: Final = tuple(algorithm.name for algorithm in _COMPARED)
"""The names of those that are here to be compared with."""

BY_UNITS: Final[dict[str, type[Algorithm]]] = {Balanced.name: Balanced}
"""Those that sum a step's micro-batches one by one, and so stand on a face's loaders."""
ALL_ALGORITHMS: Final[Mapping[str, type[Algorithm]]] = ChainMap(ALGORITHMS, BY_UNITS)
"""All of them, `BY_UNITS` first, and those that other packages add to `ALGORITHMS`."""


def make_algorithm(spec: str) -> Algorithm:
    """Makes an algorithm from its name and hyperparameters, as in `wagma:overlap=true`."""
    name, options = parse(spec)
    if name not in ALL_ALGORITHMS:
        raise ValueError(
            f"an algorithm must be one of {', '.join(ALL_ALGORITHMS)}, "
            f"with hyperparameters as in wagma:overlap=true, got {spec!r}"
            f"{did_you_mean(name, ALL_ALGORITHMS)}"
        )
    kind = ALL_ALGORITHMS[name]
    known = names(kind)
    for option, value in options.items():
        if option not in known:
            raise ValueError(unknown(name, option, value, known))
    algorithm = kind(**options)
    algorithm.check_hyperparameters()
    return algorithm


def warn_of_one_left_out(where: str, error: Exception) -> None:
    """Warns that an algorithm of another package cannot be a strategy."""
    text = f"{where} is left out of the strategies: {type(error).__name__}: {error}"
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def _add_those_of_others() -> None:
    """Adds other packages' algorithms; warns of one that fails to load or whose name is taken."""
    for entry in entry_points(group=_GROUP):
        try:
            algorithm = entry.load()
            if not (isinstance(algorithm, type) and issubclass(algorithm, Algorithm)):
                raise TypeError(f"it must be a subclass of Algorithm, got {algorithm}")
            for taken in ALL_ALGORITHMS.values():
                if algorithm.name == taken.name or algorithm.__name__ == taken.__name__:
                    raise ValueError(f"there is {taken.__name__} already, called {taken.name!r}")
        except Exception as error:
            warn_of_one_left_out(entry.value, error)
        else:
            ALGORITHMS[algorithm.name] = algorithm


_add_those_of_others()
