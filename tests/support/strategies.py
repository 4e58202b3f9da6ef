"""The Trainer's strategies by name, as tests and their scripts make them."""

from __future__ import annotations

from typing import Any

from lightning_dsgd import BalancedStrategy, DecentralizedStrategy
from lightning_dsgd.algorithms import ALGORITHMS, BY_UNITS
from lightning_dsgd.hyperparameters import names

KINDS = BY_UNITS | ALGORITHMS
"""The algorithms, by the names that `Trainer(strategy=...)` takes."""


def strategy_of(name: str, **options: Any) -> Any:
    """Makes a strategy; each option is the algorithm's, or one of every strategy."""
    own = {key: options.pop(key) for key in names(KINDS[name]) if key in options}
    strategy = BalancedStrategy if name in BY_UNITS else DecentralizedStrategy
    return strategy(KINDS[name](**own), **options)
