"""What the recipes train: LightningModules and LightningDataModules."""

from lightning_dsgd.tasks.base import MuonWithAdamW
from lightning_dsgd.tasks.control import RecurrentPPO, Updates
from lightning_dsgd.tasks.digits import DigitsClassifier, DigitsData
from lightning_dsgd.tasks.images import CIFAR10Data, ImageClassifier, ImageFolderData
from lightning_dsgd.tasks.language import CausalLanguageModel, MaskedLanguageModel, TextData
from lightning_dsgd.tasks.regression import (
    GisetteData,
    LeastSquaresData,
    LinearRegression,
    LogisticRegression,
    YearPredictionData,
)
from lightning_dsgd.tasks.speech import SpeechData, SpeechRecognizer
from lightning_dsgd.tasks.translation import TranslationData, TranslationModel

__all__ = [
    "CIFAR10Data",
    "CausalLanguageModel",
    "DigitsClassifier",
    "DigitsData",
    "GisetteData",
    "ImageClassifier",
    "ImageFolderData",
    "LeastSquaresData",
    "LinearRegression",
    "LogisticRegression",
    "MaskedLanguageModel",
    "MuonWithAdamW",
    "RecurrentPPO",
    "SpeechData",
    "SpeechRecognizer",
    "TextData",
    "TranslationData",
    "TranslationModel",
    "Updates",
    "YearPredictionData",
]
