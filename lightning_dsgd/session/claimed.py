"""What the core asks of batches that ranks claim: a door to the wing `elastic`."""

from __future__ import annotations

from typing import Protocol

from lightning_dsgd.transport import Transport


class Claimed(Protocol):
    """What one rank trains on, where it claims its batches."""

    def open(self, net: Transport) -> None:
        """Begins to claim over a network of all ranks, or goes on in a view with other members."""
        ...

    def end_batch(self) -> None:
        """Notes that the batch in hand is over."""
        ...

    def close(self) -> None:
        """Ends the thread beside the training."""
        ...
