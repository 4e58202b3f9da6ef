"""The Trainer's strategies by name, as tests and their scripts make them."""

from lightning_dsgd.lab.jobs.fit import KINDS, strategy_of

__all__ = ["KINDS", "strategy_of"]
