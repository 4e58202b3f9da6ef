"""Measurements of the strategies in real processes, through `Trainer.fit`."""
