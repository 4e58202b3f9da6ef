"""Translation by a Transformer, on batches that take unequal time as their sentences do."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.text import BLEUScore

from lightning_dsgd.tasks.base import SplitData, Task
from lightning_dsgd.tasks.text import (
    BEGIN,
    END,
    NUM_SMALLEST,
    PAD,
    Subwords,
    Tokenizer,
    tokenizer_of,
)

Pair = tuple[str, str]
"""A sentence and its translation."""


def generated_pairs(num_pairs: int, seed: int = 0) -> list[Pair]:
    """Makes sentences of a language that does not exist, and their translations into another.

    A clause is (adjective) noun verb (adjective) noun.  In the other language every word is another
    one, adjectives follow their noun and verbs come last.  Half of the sentences have one clause, a
    quarter two, and so on up to eight: as with true text, few are long.
    """
    draw = random.Random(seed)
    syllables = [c + v for c in "bdfgklmnprst" for v in "aeiou"]

    def lexicon(num_words: int) -> list[Pair]:
        return [
            ("".join(draw.choices(syllables, k=2)), "".join(draw.choices(syllables, k=2)))
            for _ in range(num_words)
        ]

    nouns, verbs, adjectives = lexicon(40), lexicon(20), lexicon(20)
    pairs = []
    for _ in range(num_pairs):
        clauses: list[Pair] = []
        while not clauses or (len(clauses) < 8 and draw.random() < 0.5):
            ours: list[str] = []
            theirs: list[str] = []
            verb = draw.choice(verbs)
            for part in range(2):
                noun, adjective = draw.choice(nouns), draw.choice(adjectives)
                is_described = draw.random() < 0.5
                if is_described:
                    ours.append(adjective[0])
                ours.append(noun[0])
                theirs.append(noun[1])
                if is_described:
                    theirs.append(adjective[1])
                if part == 0:
                    ours.append(verb[0])
            clauses.append((" ".join(ours), " ".join([*theirs, verb[1]])))
        pairs.append((" and ".join(c for c, _ in clauses), " et ".join(c for _, c in clauses)))
    return pairs


class TranslationData(SplitData):
    """Parallel text, in batches of sentences that are about equally long.

    As in the experiment of the WAGMA-SGD paper, every batch holds equally many sentences of one
    length, and which length is drawn at random: some ranks have much to do and some little.

    Args:
        path: folder with the files train.SOURCE, train.TARGET, val.SOURCE, val.TARGET, test.SOURCE
            and test.TARGET, one sentence a line; None for text that is generated.
        languages: the endings of these files.
        vocab_size: number of tokens; both languages share the tokenizer.
        max_len: tokens of a sentence; longer sentences are left out of the training.
        num_generated: sentences to train on that are generated.
        batch_size: sentences a rank and step.
        num_workers: loader processes a rank.
        tokenizer: "words"; or "bpe" for subwords, with the package tokenizers.
    """

    def __init__(
        self,
        path: str | None = None,
        languages: tuple[str, str] = ("en", "de"),
        vocab_size: int = NUM_SMALLEST + 256,
        max_len: int = 128,
        num_generated: int = 4000,
        batch_size: int = 32,
        num_workers: int = 0,
        tokenizer: Literal["words", "bpe"] = "words",
    ) -> None:
        super().__init__(batch_size, num_workers)
        self.path = path
        self.languages = languages
        self.vocab_size = vocab_size
        self.max_len = max_len
        self.num_generated = num_generated
        self.kind = tokenizer
        self.tokenizer: Tokenizer | Subwords = Tokenizer()

    def setup(self, stage: str) -> None:
        if self.splits:
            return
        if self.path is None:
            held_out = max(1, self.num_generated // 20)
            pairs = generated_pairs(self.num_generated + 2 * held_out)
            texts: dict[str, Callable[[], Iterable[Pair]]] = {
                "train": lambda: pairs[2 * held_out :],
                "val": lambda: pairs[:held_out],
                "test": lambda: pairs[held_out : 2 * held_out],
            }
        else:
            texts = {split: partial(self._read, split) for split in ("train", "val", "test")}
        both = (text for pair in texts["train"]() for text in pair)
        self.tokenizer = tokenizer_of(self.kind, both, self.vocab_size)
        for split, read in texts.items():
            encoded = [tuple(array("i", self.tokenizer.encode(side)) for side in p) for p in read()]
            if split == "train":
                encoded = [pair for pair in encoded if max(map(len, pair)) < self.max_len]
            batches = Buckets(encoded, self.batch_size, drop_last=split == "train")
            if not len(batches):
                raise ValueError(
                    f"there must be at least batch_size={self.batch_size} sentences of up to "
                    f"max_len={self.max_len} tokens, got {len(encoded)} to {split}; lower "
                    "batch_size, or raise max_len"
                )
            self.splits[split] = batches

    def _read(self, split: str) -> Iterator[Pair]:
        """Yields the pairs of two files, line by line."""
        files = [Path(str(self.path), f"{split}.{language}") for language in self.languages]
        numbers = []
        for file in files:
            if not file.exists():
                raise FileNotFoundError(
                    f"path must hold train, val and test files that end in {self.languages}, "
                    f"got path={self.path!r}, which has no {file.name}"
                )
            # Lines end at \n alone: other characters that end one may stand in sentences.
            with file.open(encoding="utf-8", newline="\n") as lines:
                numbers.append(sum(1 for _ in lines))
        if numbers[0] != numbers[1]:
            raise ValueError(
                f"the {split} files must have equally many lines, got {numbers[0]} and {numbers[1]}"
            )
        ours, theirs = (file.open(encoding="utf-8", newline="\n") for file in files)
        with ours, theirs:
            for pair in zip(ours, theirs, strict=True):
                yield pair[0].rstrip("\r\n"), pair[1].rstrip("\r\n")

    def _loader(self, split: str, **kwargs: Any) -> DataLoader[Any]:
        # A sample of the data set is a whole batch: so Lightning's sampler deals out batches.
        return super()._loader(split, batch_size=None, collate_fn=None, **kwargs)


class Buckets(Dataset[tuple[Tensor, Tensor]]):
    """Batches of pairs of about equal length: source and target, each (batch_size, longest).

    Args:
        pairs: the tokens of each sentence, and of its translation.
        batch_size: pairs of a batch.
        drop_last: whether to leave out a last batch that is smaller.
    """

    def __init__(
        self, pairs: Iterable[Sequence[Sequence[int]]], batch_size: int, drop_last: bool
    ) -> None:
        self.pairs = sorted(pairs, key=lambda pair: (len(pair[0]), len(pair[1])))
        end = len(self.pairs) - (len(self.pairs) % batch_size if drop_last else 0)
        self.begins = range(0, end, batch_size)

    def __len__(self) -> int:
        return len(self.begins)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        begin = self.begins[index]
        ours, theirs = zip(*self.pairs[begin : begin + self.begins.step], strict=True)
        source = padded([[*tokens, END] for tokens in ours])
        return source, padded([[BEGIN, *tokens, END] for tokens in theirs])


def padded(rows: list[list[int]]) -> Tensor:
    """Pads all texts to the length of the longest."""
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, PAD)


class TranslationModel(Task):
    """Trains the Transformer, https://arxiv.org/abs/1706.03762, normalised before each sublayer.

    Source, target and output share one embedding.

    Args:
        vocab_size: number of tokens; at least as many as the data has.
        dim: the size of an embedding; the base model has 512.
        depth: layers of the encoder, and of the decoder; the base model has 6.
        num_heads: the number of attention heads; the base model has 8.
        dropout: the dropout on embeddings and after each sublayer.
        label_smoothing: label smoothing of the loss in training.
        max_len: the most tokens of a translation.
        optimizer: "sgd", "adam" or "adamw".
        lr: learning rate.
        **kwargs: options of `Task`.
    """

    def __init__(
        self,
        vocab_size: int = NUM_SMALLEST + 256,
        dim: int = 64,
        depth: int = 2,
        num_heads: int = 4,
        dropout: float = 0.1,
        label_smoothing: float = 0.1,
        max_len: int = 128,
        optimizer: Literal["sgd", "adam", "adamw"] = "adam",
        lr: float = 1e-3,
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizer=optimizer, lr=lr, **kwargs)
        self.save_hyperparameters()
        self.dim = dim
        self.max_len = max_len
        self.label_smoothing = label_smoothing
        self.embedding = nn.Embedding(vocab_size, dim)
        self.dropout = nn.Dropout(dropout)
        layer = {"dropout": dropout, "batch_first": True, "norm_first": True}
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(dim, num_heads, 4 * dim, **layer),  # type: ignore[arg-type]
            depth,
            nn.LayerNorm(dim),
            enable_nested_tensor=False,
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(dim, num_heads, 4 * dim, **layer),  # type: ignore[arg-type]
            depth,
            nn.LayerNorm(dim),
        )
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        self.val_bleu = BLEUScore()
        self.test_bleu = BLEUScore()

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Returns logits (n, target_len, vocab_size) of what follows each token of `target`."""
        return self._decode(*self._encode(source), target)

    def _encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        hidden = source == PAD
        return self.encoder(self._embed(source), src_key_padding_mask=hidden), hidden

    def _decode(self, memory: Tensor, hidden: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        # What stands behind END is not hidden: it changes nothing before it, and has no loss.
        x = self.decoder(self._embed(target), memory, later, memory_key_padding_mask=hidden)
        return nn.functional.linear(x, self.embedding.weight)

    def _embed(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.dim**0.5
        place = torch.arange(tokens.shape[1], device=x.device, dtype=torch.float32)[:, None]
        frequency = torch.arange(0, self.dim, 2, device=x.device) * (-math.log(10_000) / self.dim)
        angle = place * frequency.exp()
        waves = torch.stack((angle.sin(), angle.cos()), 2).flatten(1)[:, : self.dim]
        return self.dropout(x + waves.to(x.dtype))  # type: ignore[no-any-return]

    def _loss(self, batch: list[Tensor], label_smoothing: float) -> Tensor:
        source, target = batch
        logits = self(source, target[:, :-1])
        return nn.functional.cross_entropy(
            logits.flatten(0, 1),
            target[:, 1:].flatten(),
            ignore_index=PAD,
            label_smoothing=label_smoothing,
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch, self.label_smoothing)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._evaluate("val", batch, self.val_bleu)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch, self.test_bleu)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> list[str]:
        return self._texts(self.translate(batch[0]))

    @torch.no_grad()
    def translate(self, source: Tensor) -> Tensor:
        """Takes the most likely next token, again and again: (n, up to max_len)."""
        memory, hidden = self._encode(source)
        target = torch.full((len(source), 1), BEGIN, device=source.device)
        ended = torch.zeros(len(source), 1, dtype=torch.bool, device=source.device)
        while target.shape[1] < self.max_len and not ended.all():
            best = self._decode(memory, hidden, target)[:, -1:].argmax(-1)
            target = torch.cat((target, best.masked_fill(ended, PAD)), 1)
            ended |= best == END
        return target

    def _texts(self, tokens: Tensor) -> list[str]:
        tokenizer: Tokenizer | Subwords = self.trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        return [tokenizer.decode(row) for row in tokens.tolist()]

    def _evaluate(self, split: str, batch: list[Tensor], bleu: BLEUScore) -> None:
        source, target = batch
        found, true = self._texts(self.translate(source)), self._texts(target)
        # Uncased, as in the paper.
        bleu.update([text.lower() for text in found], [[text.lower()] for text in true])
        options: Any = {"on_epoch": True, "batch_size": len(source)}
        self.log(f"{split}_loss", self._loss(batch, 0.0), sync_dist=True, **options)
        self.log(f"{split}_bleu", bleu, prog_bar=True, **options)
