"""Text for the language tasks: a corpus that every Python has, and a small tokenizer."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

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


def read_corpus(path: str | None, max_chars: int | None) -> str:
    """Reads the text to train on.

    Args:
        path: a text file, or a folder whose .txt, .md, .rst and .py files are joined in the order
            of their names; None for the sources of the running Python's standard library.
        max_chars: how much of the text to take; None for all.
    """
    root = Path(path) if path is not None else Path(sysconfig.get_path("stdlib"))
    if root.is_file():
        files: Iterable[Path] = [root]
    elif root.is_dir():
        # The standard library's subfolders, with its tests and installed packages, are left out.
        found = root.iterdir() if path is None else root.rglob("*")
        files = sorted(file for file in found if file.suffix in (".txt", ".md", ".rst", ".py"))
    else:
        raise FileNotFoundError(f"path must be a text file or a folder, got path={path!r}")
    parts: list[str] = []
    num_chars = 0
    for file in files:
        if max_chars is not None and num_chars >= max_chars:
            break
        parts.append(file.read_text(encoding="utf-8", errors="replace"))
        num_chars += len(parts[-1])
    if num_chars == 0:
        raise ValueError(f"there must be text in .txt, .md, .rst or .py files, got none in {root}")
    return "".join(parts)[:max_chars]
