"""The strategies for the Fabric of `lightning_fabric`, in place of `lightning`."""

from lightning_fabric.strategies import STRATEGY_REGISTRY
from lightning_fabric.strategies.ddp import DDPStrategy

from lightning_dsgd import keywords
from lightning_dsgd.algorithms.written import written
from lightning_dsgd.fabric.strategy import FabricMixin
from lightning_dsgd.trainer import names
from lightning_dsgd.trainer.arguments import FabricOptions


@keywords.lists(FabricOptions)
class FabricStrategy(FabricMixin, DDPStrategy):  # noqa: D101
    __doc__ = FabricMixin.__doc__


names.make_known(STRATEGY_REGISTRY, FabricStrategy, FabricStrategy)
names.hint_in(
    "lightning_fabric.connector",
    "_Connector",
    lambda algorithm: f"{__name__}.FabricStrategy({written(algorithm)})",
)
