"""How a rank waits for rank 0's word, in one process: it notices a loss, and waits no longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from lightning_dsgd.session.stopping import AgreedBatch
from lightning_dsgd.transport import PeerLost, Timeout

SOON_S = 20.0  # on a busy machine; else nothing would end the wait


class Silent:
    """The network of rank 1, on which rank 0 says nothing."""

    rank, world_size, timeout_s = 1, 2, 0.5
    lost: PeerLost | None = None
    now = staticmethod(time.monotonic)

    def check(self) -> None:
        if self.lost is not None:
            raise self.lost


def raised_by(wait: Callable[[], Any]) -> BaseException | None:
    """What a wait ends with; None if it does not end."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            wait()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SOON_S)
    return errors[0] if errors else None


def held(net: Silent) -> AgreedBatch:
    """A rank that was told to begin no batch."""
    agreed = AgreedBatch(net, serves=False)  # type: ignore[arg-type]
    agreed._hold(what=3)
    return agreed


def test_a_rank_that_rank_0_tells_nothing_says_so_after_the_timeout() -> None:
    found = raised_by(held(Silent()).may_begin_batch)
    assert isinstance(found, Timeout)
    assert str(found).startswith("rank 1 has waited 0.5 s for rank 0 to say after which batch")


@pytest.mark.parametrize("wait", ["may_begin_batch", "await_stop"])
def test_a_rank_that_waits_for_rank_0_notices_its_loss(wait: str) -> None:
    net = Silent()
    net.timeout_s = 1000.0
    net.lost = PeerLost(0, "died")
    found = raised_by(getattr(held(net), wait))
    assert found is net.lost
