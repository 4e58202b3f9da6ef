"""A progress bar of simulations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tqdm import tqdm


def shown(candidates: Iterable[Any]) -> Iterator[Any]:
    """Yields the candidates, and shows which one is under way."""
    every: Sequence[Any] = list(candidates)
    with tqdm(every, unit="strategy", leave=False) as bar:
        for candidate in bar:
            bar.set_postfix_str(candidate.spec)
            yield candidate
