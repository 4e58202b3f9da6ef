"""Small tasks with gradients for many ranks at once: what `benchmarks target` trains.

    task = TASKS["digits"]()
    networks = Networks(task, num_ranks=8)
    g = networks.gradients(x, ranks=[0, 3], batches)      # x, g: one row of weights per rank

A step of a small network takes the processor mostly for the calls, not for the numbers, so one call
computes the gradients of several ranks (`torch.func.vmap`).  Each rank has weights, BatchNorm
statistics and batches of its own; nothing else is shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_dsgd.tasks.language import CausalLanguageModel
from lightning_dsgd.tasks.networks import resnet
from lightning_dsgd.tasks.text import BEGIN, END, NUM_SMALLEST, PAD, Tokenizer, read_corpus
from lightning_dsgd.tasks.translation import TranslationModel, generated_pairs, padded

BATCH: Final = 16
HELD_OUT_IMAGES: Final = 720
SEQ_LEN: Final = 32
SOURCE_LEN: Final = 8
TARGET_LEN: Final = 6


@dataclass(frozen=True)
class Task:
    """Describes what is trained, and how its quality is measured.

    Args:
        make: makes the network from the seed of torch's generator
        examples: makes inputs and targets in an order that a seed draws: those to train on, then
            those to evaluate on
        optimizer: makes the optimizer of a rank from its weights and the learning rate
        warmup: share of the steps in which the learning rate rises; then it falls as a cosine does
        higher_is_better: True if the quality is an accuracy, False if it is a loss
        ignored: a target that counts for nothing
    """

    make: Callable[[], nn.Module]
    examples: Callable[[int], tuple[Tensor, Tensor, Tensor, Tensor]]
    optimizer: Callable[[list[Tensor], float], torch.optim.Optimizer]
    warmup: float = 0.0
    higher_is_better: bool = True
    ignored: int = -100

    def share_of_lr(self, step: int, num_steps: int) -> float:
        """Returns the learning rate's factor: a linear rise, then a cosine to zero."""
        done = (step + 1) / num_steps
        if done < self.warmup:
            return done / self.warmup
        return (1.0 + math.cos(math.pi * step / num_steps)) / 2

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss to minimise."""
        return nn.functional.cross_entropy(
            outputs.flatten(0, -2), targets.flatten(), ignore_index=self.ignored
        )

    def quality(self, outputs: Tensor, targets: Tensor) -> float:
        """Returns the quality to report: the share of right answers, or the loss."""
        if not self.higher_is_better:
            return float(self.loss(outputs, targets))
        return float((outputs.argmax(-1) == targets)[targets != self.ignored].float().mean())


class Networks:
    """Holds one network per rank, with its BatchNorm statistics; the caller holds the weights.

    Args:
        task: what is trained
        num_ranks: the number of ranks
    """

    def __init__(self, task: Task, num_ranks: int) -> None:
        self.task = task
        self.module = task.make()
        self._shapes = {name: p.shape for name, p in self.module.named_parameters()}
        self._buffers = {
            name: buffer.expand(num_ranks, *buffer.shape).clone()
            for name, buffer in self.module.named_buffers()
        }
        self._gradients = vmap(grad(self._loss))

    def weights(self) -> Tensor:
        """Returns the first weights, flat."""
        return torch.cat([p.detach().flatten() for p in self.module.parameters()])

    def gradients(self, x: Tensor, ranks: Sequence[int], batches: Sequence[Tensor]) -> Tensor:
        """Returns these ranks' gradients, a row each; `x` and `batches` have such rows too."""
        rows = list(ranks)
        buffers = {name: buffer[rows] for name, buffer in self._buffers.items()}
        with sdpa_kernel(SDPBackend.MATH):  # the faster ones compute one network at a time
            g: Tensor = self._gradients(x, buffers, *batches)
        for name, buffer in buffers.items():
            self._buffers[name][rows] = buffer
        return g

    def quality(self, x: Tensor, inputs: Tensor, targets: Tensor) -> float:
        """Returns the quality of weights x with the mean of the ranks' BatchNorm statistics."""
        means = {
            name: buffer.mean(0) if buffer.is_floating_point() else buffer[0]
            for name, buffer in self._buffers.items()
        }
        self.module.eval()
        outputs = functional_call(self.module, (self._named(x), means), (inputs,))
        self.module.train()
        return self.task.quality(outputs, targets)

    def _loss(self, x: Tensor, buffers: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Any:
        outputs = functional_call(self.module, (self._named(x), buffers), (inputs,))
        return self.task.loss(outputs, targets)

    def _named(self, x: Tensor) -> dict[str, Tensor]:
        parts = x.split_with_sizes([shape.numel() for shape in self._shapes.values()])
        return {
            name: part.view(shape)
            for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _resnet() -> nn.Module:
    return resnet((1, 8, 8), 10, blocks=(1, 1, 1), width=8, bottleneck=False)


def _language_model() -> nn.Module:
    return CausalLanguageModel(seq_len=SEQ_LEN, dim=40, depth=1, num_heads=4)


class _Translator(nn.Module):
    """Translates; an input holds the source, then the target up to the word that is wanted."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        options: dict[str, Any] = {"dropout": 0.0, "label_smoothing": 0.0, "max_len": TARGET_LEN}
        self.model = TranslationModel(vocab_size, dim=32, depth=1, num_heads=4, **options)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the logits of each next word."""
        logits: Tensor = self.model(inputs[:, :SOURCE_LEN], inputs[:, SOURCE_LEN:])
        return logits


def _translator() -> nn.Module:
    return _Translator(_sentences()[1])


def _digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16
    targets = torch.tensor(labels)[order]
    n = HELD_OUT_IMAGES
    return images[n:], targets[n:], images[:n], targets[:n]


def _text(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns characters of Python's own library; 128 pieces are held out."""
    tokens = torch.tensor(Tokenizer().encode(read_corpus(None, 200_000)))
    pieces = tokens.unfold(0, SEQ_LEN + 1, SEQ_LEN)
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed))
    held_out, train = pieces[order[:128]], pieces[order[128:]]
    return train[:, :-1], train[:, 1:], held_out[:, :-1], held_out[:, 1:]


@cache
def _sentences() -> tuple[list[tuple[list[int], list[int]]], int]:
    """Returns one-clause sentences and their translations in tokens, and the number of tokens."""
    pairs = [pair for pair in generated_pairs(3000) if " and " not in pair[0]]
    tokenizer = Tokenizer.of_texts((text for pair in pairs for text in pair), NUM_SMALLEST + 256)
    encoded = [(tokenizer.encode(ours), tokenizer.encode(theirs)) for ours, theirs in pairs]
    return encoded, tokenizer.vocab_size


def _translations(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns a made-up language's sentences and translations; 256 sentences are held out."""
    encoded, _ = _sentences()
    sources = padded([[*ours, END] for ours, _ in encoded])
    inputs = torch.cat([sources, padded([[BEGIN, *theirs] for _, theirs in encoded])], dim=1)
    targets = padded([[*theirs, END] for _, theirs in encoded])
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    held_out, train = order[:256], order[256:]
    return inputs[train], targets[train], inputs[held_out], targets[held_out]


def _sgd(weights: list[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr, momentum=0.9)


def _adamw(weights: list[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr, weight_decay=0.0)


_TRANSLATION: Final = Task(_translator, _translations, _adamw, warmup=0.1, ignored=PAD)
TASKS: Final = {
    "digits": Task(_mlp, _digits, _sgd),
    "resnet": Task(_resnet, _digits, _sgd),
    "language": Task(_language_model, _text, _adamw, warmup=0.1, higher_is_better=False),
    "translation": _TRANSLATION,
    "translation_loss": replace(_TRANSLATION, higher_is_better=False),
}
"""The tasks by name: a two-layer network, a ResNet with BatchNorm, two Transformers.

Translation is there twice, as its share of right words stays low for long and then jumps: when it
does decides the share at the end, and the loss falls all along.
"""
