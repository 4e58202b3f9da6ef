"""What the core asks of batches that ranks claim: a door to the wing `elastic`."""

from __future__ import annotations

from typing import Any, Protocol

from lightning_dsgd.transport import Transport


class Claimed(Protocol):
    """What one rank trains on, where it claims its batches."""

    def open(self, net: Transport) -> None:
        """Begins to claim over a network of all ranks, or goes on in a view with other members."""
        ...

    def end_batch(self) -> None:
        """Notes that the batch in hand is over."""
        ...

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Adds the claims to a checkpoint; all ranks call it."""
        ...

    def restore(self, checkpoint: Any) -> None:
        """Goes on with the claims in a checkpoint, and removes them from it."""
        ...

    def close(self) -> None:
        """Ends the thread beside the training."""
        ...
