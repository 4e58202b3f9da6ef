"""The pieces of a text that a language model is trained on, as one tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_dsgd.tasks.language import TextData


def pieces(split: str, **options: Any) -> Tensor:
    """Returns a split of a text, a piece in each row."""
    data = TextData(**options)
    data.setup("fit")
    subset: Any = data.splits[split]
    rows: Tensor = subset.dataset.tensors[0][subset.indices]
    return rows.long()
