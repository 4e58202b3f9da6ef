"""The Trainer's strategies by name, as tests and their scripts make them."""

from lightning_dsgd.trainer.named import KINDS, strategy_of

__all__ = ["KINDS", "strategy_of"]
