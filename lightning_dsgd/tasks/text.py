"""Text for the language tasks: a corpus that every Python has, and what makes tokens of it."""

from __future__ import annotations

import json
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Kind = Literal["words", "wordpiece", "bpe"]
"""What tokens stand for: frequent words, BERT's lower-case pieces of words, or pairs of bytes."""

PAD, BEGIN, END, MASK = range(4)
"""Tokens that stand for no text: what fills a batch, begins a sentence, ends it, hides a token."""
NUM_SPECIAL = 4
NUM_SMALLEST = NUM_SPECIAL + 256
"""A vocabulary of this size holds the special tokens and the bytes, and no word."""

_PIECE = re.compile(r" ?\w+| ?[^\w\s]+|\s+")


class Tokenizer:
    """Makes the most frequent words a token each, and spells every other word in bytes.

    A word takes the space before it along, so nothing is lost: `decode(encode(text)) == text`.

    Args:
        words: the words in the order of their tokens; none makes it a tokenizer of bytes.
    """

    def __init__(self, words: Iterable[str] = ()) -> None:
        self.words = list(words)
        self._token_of = {word: NUM_SMALLEST + i for i, word in enumerate(self.words)}

    @classmethod
    def of_texts(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Makes the tokenizer that suits the texts, with a vocabulary of at most this size."""
        if vocab_size < NUM_SMALLEST:
            raise ValueError(
                f"vocab_size must be at least {NUM_SMALLEST}, for the bytes and {NUM_SPECIAL} "
                f"special tokens, got vocab_size={vocab_size}"
            )
        if vocab_size == NUM_SMALLEST:
            return cls()
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(_PIECE.findall(text))
        # Ties by the word, so that every rank has the same vocabulary.
        frequent = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        words = [word for word, _ in frequent if len(word.encode()) > 1]
        return cls(words[: vocab_size - NUM_SMALLEST])

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return NUM_SMALLEST + len(self.words)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        tokens: list[int] = []
        for piece in _PIECE.findall(text):
            token = self._token_of.get(piece)
            if token is None:
                tokens += [NUM_SPECIAL + byte for byte in piece.encode()]
            else:
                tokens.append(token)
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of tokens, without the special tokens."""
        parts = []
        for token in tokens:
            if token >= NUM_SMALLEST:
                parts.append(self.words[token - NUM_SMALLEST].encode())
            elif token >= NUM_SPECIAL:
                parts.append(bytes([token - NUM_SPECIAL]))
        return b"".join(parts).decode(errors="replace")


class Subwords:
    """Makes frequent pieces of words a token each, by the package `tokenizers`.

    Args:
        tokenizer: of that package.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def of_texts(cls, texts: Iterable[str], vocab_size: int, kind: Kind) -> Subwords:
        """Makes the tokenizer that suits the texts, with a vocabulary of at most this size."""
        them = _tokenizers()
        special = ["[PAD]", "[BEGIN]", "[END]", "[MASK]"]
        options: dict[str, Any] = {"vocab_size": vocab_size, "show_progress": False}
        if kind == "bpe":
            made = them.Tokenizer(them.models.BPE())
            made.pre_tokenizer = them.pre_tokenizers.ByteLevel(add_prefix_space=False)
            made.decoder = them.decoders.ByteLevel()
            options["initial_alphabet"] = them.pre_tokenizers.ByteLevel.alphabet()
            trainer = them.trainers.BpeTrainer(special_tokens=special, **options)
        else:
            made = them.Tokenizer(them.models.WordPiece(unk_token="[UNK]"))
            made.normalizer = them.normalizers.BertNormalizer(lowercase=True)
            made.pre_tokenizer = them.pre_tokenizers.BertPreTokenizer()
            made.decoder = them.decoders.WordPiece()
            options["limit_alphabet"] = 1000  # as BERT's: the rarest characters are unknown
            trainer = them.trainers.WordPieceTrainer(special_tokens=[*special, "[UNK]"], **options)
        made.train_from_iterator(texts, trainer)
        if made.get_vocab_size() > vocab_size:
            raise ValueError(
                "the vocabulary must have room for each character, and for the special tokens, "
                f"got vocab_size={vocab_size}; choose at least {made.get_vocab_size()}"
            )
        return cls(made)

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return int(self.tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        tokens: list[int] = self.tokenizer.encode(text).ids
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of tokens, without the special tokens."""
        text: str = self.tokenizer.decode([*tokens], skip_special_tokens=True)
        return text


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            "tokenizer='wordpiece' and tokenizer='bpe' need the package tokenizers, which is not "
            "installed; pip install tokenizers, or choose tokenizer='words'"
        ) from error
    return tokenizers


def tokenizer_of(kind: Kind, texts: Iterable[str], vocab_size: int) -> Tokenizer | Subwords:
    """Makes the tokenizer of a kind that suits the texts."""
    if kind not in get_args(Kind):
        raise ValueError(f"tokenizer must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    if kind == "words":
        return Tokenizer.of_texts(texts, vocab_size)
    return Subwords.of_texts(texts, vocab_size, kind)


def read_corpus(path: str | None, max_chars: int | None) -> str:
    """Reads the text to train on, whole; `corpus` explains the arguments."""
    return "".join(corpus(path, max_chars))


def corpus(path: str | None, max_chars: int | None) -> Iterator[str]:
    """Reads the text to train on, file by file.

    Args:
        path: a text file, or a folder whose .txt, .md, .rst and .py files follow in the order
            of their names; None for the sources of the running Python's standard library.
        max_chars: how much of the text to take; None for all.
    """
    num_chars = 0
    for file in _files(path):
        if max_chars is not None and num_chars >= max_chars:
            break
        text = file.read_text(encoding="utf-8", errors="replace")
        yield text if max_chars is None else text[: max_chars - num_chars]
        num_chars += len(text)
    if num_chars == 0:
        raise ValueError(f"there must be text in .txt, .md, .rst or .py files, got none in {path}")


def _files(path: str | None) -> list[Path]:
    """Returns the files of a corpus in their order."""
    root = Path(path) if path is not None else Path(sysconfig.get_path("stdlib"))
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise FileNotFoundError(f"path must be a text file or a folder, got path={path!r}")
    # The standard library's subfolders, with its tests and installed packages, are left out.
    found = root.iterdir() if path is None else root.rglob("*")
    return sorted(file for file in found if file.suffix in (".txt", ".md", ".rst", ".py"))


class Cache:
    """The tokens of a corpus in a file, which ranks map into memory and never read whole.

    Args:
        folder: where the file is, or will be.
        path: the corpus.
        max_chars: how much of it.
        kind: of tokens.
        vocab_size: the most tokens.
    """

    def __init__(
        self, folder: str, path: str | None, max_chars: int | None, kind: Kind, vocab_size: int
    ) -> None:
        self.folder = Path(folder)
        self.texts = partial(corpus, path, max_chars)
        self.tokenizer = partial(tokenizer_of, kind, vocab_size=vocab_size)
        self.path, self.options = path, [max_chars, kind, vocab_size]

    def make(self) -> None:
        """Writes the tokens, unless they are there; the last file to be written is the record."""
        sizes = [file.stat().st_size for file in _files(self.path)]
        options = [self.path, len(sizes), sum(sizes), *self.options]
        record = self.folder / "made.json"
        if record.exists():
            made = json.loads(record.read_text())
            if made != options:
                raise ValueError(
                    "cache must be a folder of its own for each [path, number of files, bytes, "
                    f"max_chars, tokenizer, vocab_size], got {options} with "
                    f"cache={str(self.folder)!r}, which was made with {made}; name another folder"
                )
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        tokenizer = self.tokenizer(self.texts())
        with open(self.folder / "tokens.bin", "wb") as file:
            for text in self.texts():
                torch.tensor(tokenizer.encode(text), dtype=torch.int32).numpy().tofile(file)
        partly = record.with_suffix(".part")
        partly.write_text(json.dumps(options))
        os.replace(partly, record)

    def tokens(self) -> Tensor:
        """Returns all tokens, mapped into memory."""
        if not (self.folder / "made.json").exists():
            raise FileNotFoundError(
                "cache must be a folder that all nodes see, and that rank 0 has filled, got "
                f"cache={str(self.folder)!r}, which holds nothing here"
            )
        file = self.folder / "tokens.bin"
        return torch.from_file(str(file), size=file.stat().st_size // 4, dtype=torch.int32)
