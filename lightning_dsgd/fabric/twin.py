"""The strategies for the Fabric of `lightning_fabric`, in place of `lightning`."""

from lightning_fabric.strategies.ddp import DDPStrategy

from lightning_dsgd import keywords
from lightning_dsgd.fabric.strategy import FabricMixin, make_known
from lightning_dsgd.trainer.arguments import FabricOptions


@keywords.lists(FabricOptions)
class FabricStrategy(FabricMixin, DDPStrategy):  # noqa: D101
    __doc__ = FabricMixin.__doc__


make_known("lightning_fabric", FabricStrategy)
