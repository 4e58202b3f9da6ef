"""The named strategies for the Trainer of `pytorch_lightning`, in place of `lightning`.

from lightning_dsgd.pytorch_lightning import WAGMAStrategy
"""

from typing import Final

from pytorch_lightning import strategies

from lightning_dsgd import keywords
from lightning_dsgd.trainer.arguments import TrainerOptions
from lightning_dsgd.trainer.named import make_all, make_known
from lightning_dsgd.trainer.strategy import DecentralizedMixin


@keywords.lists(TrainerOptions)
class DecentralizedStrategy(DecentralizedMixin, strategies.DDPStrategy):  # noqa: D101
    __doc__ = DecentralizedMixin.__doc__


STRATEGIES: Final = make_all(DecentralizedStrategy, __name__)
"""The names that `Trainer(strategy=...)` takes, once this module is imported."""

globals().update({strategy.__name__: strategy for strategy in STRATEGIES.values()})
__all__ = ["DecentralizedStrategy", *(strategy.__name__ for strategy in STRATEGIES.values())]

make_known("pytorch_lightning", STRATEGIES, DecentralizedStrategy)
