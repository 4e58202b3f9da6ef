"""Makes the algorithms' names known to the Trainer of `lightning`: `Trainer(strategy="wagma")`.

A name stands for `DecentralizedStrategy` with the algorithm that has the name.  The Trainer of
`pytorch_lightning`, another package with a registry of its own, learns them in
`lightning_dsgd.pytorch_lightning`.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dsgd.algorithms import ALL_ALGORITHMS, BY_UNITS
from lightning_dsgd.algorithms.written import as_strategy
from lightning_dsgd.hyperparameters import names as names_of_options
from lightning_dsgd.trainer import names
from lightning_dsgd.trainer.balanced import BalancedStrategy
from lightning_dsgd.trainer.strategy import DecentralizedStrategy


def strategy_of(name: str, **options: Any) -> DecentralizedStrategy:
    """Makes what a name stands for; each option is the algorithm's, or one of every strategy."""
    kind = ALL_ALGORITHMS[name]
    own = {key: options.pop(key) for key in names_of_options(kind) if key in options}
    strategy = BalancedStrategy if name in BY_UNITS else DecentralizedStrategy
    return strategy(kind(**own), **options)


names.make_known(StrategyRegistry, DecentralizedStrategy, BalancedStrategy)
names.hint_in(
    "lightning.pytorch.trainer.connectors.accelerator_connector",
    "_AcceleratorConnector",
    as_strategy,
)
