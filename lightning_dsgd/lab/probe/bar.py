"""A progress bar of a probe."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def shown(stages: Iterable[tuple[str, dict[str, Any]]], *, is_shown: bool) -> list[dict[str, Any]]:
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
