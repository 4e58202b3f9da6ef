"""Makes the algorithms' names known to the Trainer of `lightning`: `Trainer(strategy="wagma")`.

A name stands for `DecentralizedStrategy` with the algorithm that has the name.  The Trainer of
`pytorch_lightning`, another package with a registry of its own, learns them in
`lightning_dsgd.pytorch_lightning`.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dsgd.algorithms.written import as_strategy
from lightning_dsgd.trainer import names
from lightning_dsgd.trainer.balanced import BalancedStrategy
from lightning_dsgd.trainer.strategy import DecentralizedStrategy

names.make_known(StrategyRegistry, DecentralizedStrategy, BalancedStrategy)
names.hint_in(
    "lightning.pytorch.trainer.connectors.accelerator_connector",
    "_AcceleratorConnector",
    as_strategy,
)
