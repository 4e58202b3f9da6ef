"""Language models on plain text: a small causal one, and a masked one as BERT is trained."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import Subset, TensorDataset
from torchmetrics.text import Perplexity

from lightning_dsgd.tasks.base import SplitData, Task
from lightning_dsgd.tasks.text import (
    MASK,
    NUM_SMALLEST,
    NUM_SPECIAL,
    Cache,
    Kind,
    read_corpus,
    tokenizer_of,
)


class TextData(SplitData):
    """Loads plain text, cut into pieces of equal length: 90% train, 5% validate, 5% test.

    Args:
        path: a text file or a folder of them (`lightning_dsgd.tasks.text.read_corpus`); None for
            the sources of the running Python's standard library.
        seq_len: tokens of a piece; each piece has one more, which the last one predicts.
        vocab_size: the tokenizer's number of tokens; the default makes each byte a token.
        max_chars: how much of the text to take; None for all.
        batch_size: pieces a rank and step.
        num_workers: loader processes a rank.
        tokenizer: "words"; or, by the package tokenizers, "bpe", and with `cache` "wordpiece".
        cache: a folder that all nodes see.  Rank 0 writes the tokens there, once, file by file, and
            all ranks map them into memory: for text that does not fit into it.
    """

    def __init__(
        self,
        path: str | None = None,
        seq_len: int = 128,
        vocab_size: int = NUM_SMALLEST,
        max_chars: int | None = 2_000_000,
        batch_size: int = 16,
        num_workers: int = 0,
        tokenizer: Kind = "words",
        cache: str | None = None,
    ) -> None:
        super().__init__(batch_size, num_workers)
        self.path = path
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.max_chars = max_chars
        self.tokenizer = tokenizer
        self.prepare_data_per_node = cache is None
        self.cache = cache and Cache(cache, path, max_chars, tokenizer, vocab_size)

    def prepare_data(self) -> None:
        if self.cache:
            self.cache.make()

    def setup(self, stage: str) -> None:
        if self.splits:
            return
        if self.cache:
            tokens = self.cache.tokens()
        else:
            if self.tokenizer == "wordpiece":
                raise ValueError(
                    "cache must be a folder with tokenizer='wordpiece', got cache=None: each "
                    "rank would number its vocabulary in another order; name a folder"
                )
            text = read_corpus(self.path, self.max_chars)
            made = tokenizer_of(self.tokenizer, [text], self.vocab_size)
            tokens = torch.tensor(made.encode(text), dtype=torch.int32)
        num_pieces = (len(tokens) - 1) // self.seq_len
        if num_pieces < 20:
            raise ValueError(
                "the text must be at least 20 pieces of seq_len tokens long, got "
                f"{len(tokens)} tokens with seq_len={self.seq_len}; give more text, or a smaller "
                f"seq_len (up to {max(1, (len(tokens) - 1) // 20)})"
            )
        pieces = tokens.unfold(0, self.seq_len + 1, self.seq_len)
        # Every twentieth piece, not the end: there the text may be of another kind.
        place = torch.arange(num_pieces) % 20
        kinds = {"train": (place != 9) & (place != 19), "val": place == 9, "test": place == 19}
        every = TensorDataset(pieces)  # which stay where the tokens are until they are asked for
        places: dict[str, Any] = {split: kind.nonzero()[:, 0] for split, kind in kinds.items()}
        self.splits = {split: Subset(every, places[split]) for split in places}


class Encoder(nn.Module):
    """A Transformer's encoder (https://arxiv.org/abs/1706.03762) over tokens.

    Args:
        vocab_size: number of tokens.
        seq_len: the most tokens of a text.
        dim: the size of an embedding; the feed-forward layers have four times as many.
        depth: number of layers.
        num_heads: the number of attention heads.
        dropout: the dropout on embeddings and after each sublayer.
        causal: whether a token sees only those before it.  Then layers are normalised before their
            sublayers, as in GPT-2, else after them, as in BERT.
    """

    def __init__(
        self,
        vocab_size: int,
        seq_len: int,
        dim: int,
        depth: int,
        num_heads: int,
        dropout: float,
        causal: bool,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.embedding = nn.Embedding(vocab_size, dim)
        self.position = nn.Parameter(torch.zeros(seq_len, dim))
        self.embedded = nn.Sequential(
            nn.Identity() if causal else nn.LayerNorm(dim), nn.Dropout(dropout)
        )
        layer = nn.TransformerEncoderLayer(
            dim,
            num_heads,
            4 * dim,
            dropout,
            activation="gelu",
            batch_first=True,
            norm_first=causal,
        )
        last = nn.LayerNorm(dim) if causal else None
        self.layers = nn.TransformerEncoder(layer, depth, last, enable_nested_tensor=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1 and "position" not in name:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, tokens.device)
        x = self.embedded(self.embedding(tokens) + self.position[:length])
        y: Tensor = (
            self.layers(x, mask.to(x.dtype), is_causal=True) if self.causal else self.layers(x)
        )
        return y


class LanguageModel(Task):
    """Trains a model on what it says of hidden tokens: cross-entropy and perplexity.

    Args:
        **kwargs: options of `Task`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.val_perplexity = Perplexity()
        self.test_perplexity = Perplexity()

    def logits_and_targets(
        self, pieces: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Returns logits (n, vocab_size) of a batch's hidden tokens, and these tokens (n,)."""
        raise NotImplementedError

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits, targets = self.logits_and_targets(batch[0].long(), None)
        loss = nn.functional.cross_entropy(logits, targets)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._evaluate("val", batch, batch_idx, self.val_perplexity)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch, batch_idx, self.test_perplexity)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0][:, :-1].long()).argmax(dim=-1)  # type: ignore[no-any-return]

    def _evaluate(
        self, split: str, batch: list[Tensor], batch_idx: int, perplexity: Perplexity
    ) -> None:
        # The same tokens are hidden in every evaluation.
        generator = torch.Generator(self.device).manual_seed(batch_idx)
        logits, targets = self.logits_and_targets(batch[0].long(), generator)
        perplexity.update(logits[None].float(), targets[None])
        loss = nn.functional.cross_entropy(logits, targets)
        self.log(f"{split}_loss", loss, on_epoch=True, sync_dist=True)
        self.log(f"{split}_perplexity", perplexity, on_epoch=True, prog_bar=True)


class CausalLanguageModel(LanguageModel):
    """Predicts each token from those before it; input and output share their embeddings.

    Args:
        vocab_size: number of tokens; at least as many as the data has.
        seq_len: the most tokens of a text.
        dim: the size of an embedding.
        depth: number of layers.
        num_heads: the number of attention heads.
        dropout: the dropout on embeddings and after each sublayer.
        optimizer: "sgd", "adam", "adamw" or "muon", see `Task`.
        lr: learning rate.
        **kwargs: options of `Task`.
    """

    def __init__(
        self,
        vocab_size: int = NUM_SMALLEST,
        seq_len: int = 128,
        dim: int = 128,
        depth: int = 2,
        num_heads: int = 4,
        dropout: float = 0.0,
        optimizer: Literal["sgd", "adam", "adamw", "muon"] = "adamw",
        lr: float = 1e-3,
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizer=optimizer, lr=lr, **kwargs)
        self.save_hyperparameters()
        self.encoder = Encoder(vocab_size, seq_len, dim, depth, num_heads, dropout, causal=True)

    def configure_model(self) -> None:
        """Shards every layer, and then the rest, under a strategy that has a mesh for it."""
        if self.device_mesh is None or isinstance(self.encoder, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for layer in self.encoder.layers.layers:
            fully_shard(layer, mesh=mesh)
        # Its embedding is needed once more, after its own forward pass.
        fully_shard(self.encoder, mesh=mesh, reshard_after_forward=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.linear(self.encoder(tokens), self.encoder.embedding.weight)

    def logits_and_targets(
        self, pieces: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        return self(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten()


class MaskedLanguageModel(LanguageModel):
    """Trains BERT's masked language model, https://arxiv.org/abs/1810.04805, section 3.1, task 1.

    The model has to tell 15% of the tokens: 80% of these are masked, 10% random, 10% left.
    There is no next-sentence prediction: the pooler, the segments and the last layer for that
    (593,666 of the 133,547,324 parameters of the Ok-Topk paper) are left out.

    Args:
        vocab_size: number of tokens; at least as many as the data has.
        seq_len: the most tokens of a text.
        dim: the size of an embedding; BERT-base has 768.
        depth: number of layers; BERT-base has 12.
        num_heads: the number of attention heads; BERT-base has 12.
        dropout: the dropout on embeddings and after each sublayer.
        optimizer: "sgd", "adam", "adamw" or "muon", see `Task`.
        lr: learning rate.
        **kwargs: options of `Task`.
    """

    def __init__(
        self,
        vocab_size: int = NUM_SMALLEST,
        seq_len: int = 128,
        dim: int = 128,
        depth: int = 2,
        num_heads: int = 4,
        dropout: float = 0.1,
        optimizer: Literal["sgd", "adam", "adamw", "muon"] = "adamw",
        lr: float = 1e-3,
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizer=optimizer, lr=lr, **kwargs)
        self.save_hyperparameters()
        self.vocab_size = vocab_size
        self.encoder = Encoder(vocab_size, seq_len, dim, depth, num_heads, dropout, causal=False)
        self.head = nn.Sequential(
            nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim), nn.Linear(dim, vocab_size)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(tokens))
        return logits

    def logits_and_targets(
        self, pieces: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        tokens = pieces[:, :-1]
        hidden, given = hide(tokens, self.vocab_size, generator)
        # Only the hidden places need their logits, which are the dearest part of a small model.
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        logits = self.head(self.encoder(given)[rows, hidden])
        return logits.flatten(0, 1), tokens[rows, hidden].flatten()


def hide(
    tokens: Tensor, vocab_size: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Hides 15% of each text's tokens: returns places (n, num_hidden) and the texts (n, seq_len).

    Args:
        tokens: (n, seq_len).
        vocab_size: the number of tokens that may stand in for hidden ones.
        generator: draws the places; by default torch's own generator.
    """
    n, length = tokens.shape

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=tokens.device)

    hidden = uniform(n, length).topk(max(1, round(0.15 * length)), dim=1).indices
    how = uniform(*hidden.shape)
    others = NUM_SPECIAL + (uniform(*hidden.shape) * (vocab_size - NUM_SPECIAL)).long()
    true = tokens.gather(1, hidden)
    stand_in = torch.where(how < 0.9, others, true).masked_fill(how < 0.8, MASK)
    return hidden, tokens.scatter(1, hidden, stand_in)
