"""What the recipes train: LightningModules and LightningDataModules."""

from lightning_dsgd.tasks.digits import DigitsClassifier, DigitsData

__all__ = ["DigitsClassifier", "DigitsData"]
