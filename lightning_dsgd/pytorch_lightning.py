"""The strategies for the Trainer of `pytorch_lightning`, in place of `lightning`.

from lightning_dsgd.pytorch_lightning import DecentralizedStrategy
"""

from functools import partial

from pytorch_lightning import strategies

from lightning_dsgd import keywords
from lightning_dsgd.algorithms.written import as_strategy
from lightning_dsgd.trainer import names
from lightning_dsgd.trainer.arguments import TrainerOptions
from lightning_dsgd.trainer.balanced import BalancedMixin
from lightning_dsgd.trainer.strategy import DecentralizedMixin


@keywords.lists(TrainerOptions)
class DecentralizedStrategy(DecentralizedMixin, strategies.DDPStrategy):  # noqa: D101
    __doc__ = DecentralizedMixin.__doc__


@keywords.lists(TrainerOptions)
class BalancedStrategy(BalancedMixin, DecentralizedStrategy):  # noqa: D101
    __doc__ = BalancedMixin.__doc__


names.make_known(strategies.StrategyRegistry, DecentralizedStrategy, BalancedStrategy)
names.hint_in(
    "pytorch_lightning.trainer.connectors.accelerator_connector",
    "_AcceleratorConnector",
    partial(as_strategy, home=__name__),
)
