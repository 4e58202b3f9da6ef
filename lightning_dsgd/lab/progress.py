"""Progress bars of simulations, of a probe, and of what is looked at one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm


def of_candidates(candidates: Iterable[Any]) -> Iterator[Any]:
    """Yields the candidates, and shows which one is under way."""
    every: Sequence[Any] = list(candidates)
    with tqdm(every, unit="strategy", leave=False) as bar:
        for candidate in bar:
            bar.set_postfix_str(candidate.label)
            yield candidate


def of_checks(checks: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the checks by their names, and shows at a terminal which one is under way."""
    with tqdm(total=len(checks), unit="check", leave=False, disable=None) as bar:
        for name, check in checks.items():
            bar.set_postfix_str(name)
            yield name, check
            bar.update()


def of_stages(
    stages: Iterable[tuple[str, dict[str, Any]]], *, is_shown: bool
) -> list[dict[str, Any]]:
    """Goes through the stages, shows them, and returns what was found."""
    found = []
    with tqdm(
        total=None, disable=not is_shown, leave=False, bar_format="probe: {desc} [{elapsed}]"
    ) as bar:
        for name, last in stages:
            bar.set_description_str(name)
            if last:
                found.append(last)
    return found
