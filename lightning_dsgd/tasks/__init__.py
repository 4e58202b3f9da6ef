"""What the recipes train: LightningModules and LightningDataModules."""

from lightning_dsgd.tasks.digits import DigitsClassifier, DigitsData
from lightning_dsgd.tasks.images import CIFAR10Data, ImageClassifier, ImageFolderData
from lightning_dsgd.tasks.language import CausalLanguageModel, MaskedLanguageModel, TextData

__all__ = [
    "CIFAR10Data",
    "CausalLanguageModel",
    "DigitsClassifier",
    "DigitsData",
    "ImageClassifier",
    "ImageFolderData",
    "MaskedLanguageModel",
    "TextData",
]
