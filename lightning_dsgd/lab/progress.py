"""The progress bar of what is looked at one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tqdm import tqdm


def of_checks(checks: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the checks by their names, and shows at a terminal which one is under way."""
    with tqdm(total=len(checks), unit="check", leave=False, disable=None) as bar:
        for name, check in checks.items():
            bar.set_postfix_str(name)
            yield name, check
            bar.update()
