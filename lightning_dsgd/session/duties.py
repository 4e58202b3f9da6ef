"""What a session asks of its face: a loop in plain PyTorch does no more than what stands here.

`Session` inherits this.  A face makes a subclass of `Session` and overrides what it can do.  What
ranks that are lost or join ask of a face: `elastic.face.Face`.
"""

from __future__ import annotations

import signal
from typing import NoReturn

from torch import Tensor

from lightning_dsgd.session.ending import ended_by


class Duties:
    """Does for a session what only its face can do."""

    @property
    def is_evaluating(self) -> bool:
        """Whether a signal ends this rank at once, though it is to train."""
        return False

    def end_by(self, signum: int, begin: str, end: str = "") -> NoReturn:
        """Raises what this rank ends with after a signal; the text surrounds the signal's name."""
        kind = KeyboardInterrupt if signum == signal.SIGINT else SystemExit
        raise ended_by(signum, kind, begin, end)

    def _agree(self, what: int, votes: Tensor, *, are_all_here: bool) -> bool:
        """Notes what others are here for; returns whether all are here to do the same."""
        return are_all_here

    def quiet_observer(self) -> None:
        """Keeps other code from ending this process before the process can say why it ends."""

    def end_children(self) -> None:
        """Ends the ranks that this process has started, at once."""

    def forgive_others(self) -> None:
        """Has a rank that ends badly end no other, where this process would end them."""

    def become_first(self) -> None:
        """Has this rank print and log, as those before it are lost."""
