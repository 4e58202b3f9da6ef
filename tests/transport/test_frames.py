"""What is no message is noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_dsgd.transport import PeerLost
from lightning_dsgd.transport.frames import HEADER
from tests.support.worlds import ProcessWorld

EMPTY = torch.empty(0)
LARGE = 1 << 62
EXPECTED = 3 << 30
NO_MESSAGES = {
    "kind": HEADER.pack(1, 2, 0, 99, 0),
    "dtype": HEADER.pack(1, 2, 0, 0, 99),
    "half an element": HEADER.pack(1, 2, 6, 0, 0),
    "more than memory": HEADER.pack(1, 2, LARGE, 0, 0),
    "more than is expected": HEADER.pack(1, 2, EXPECTED + 4, 0, 0),
    "much news": HEADER.pack(0, 0, LARGE, 255, 0),
    "news in an unknown form": HEADER.pack(0, 0, 2, 255, 0) + b"{}",
    "the loss of no rank": HEADER.pack(0, 0, 8, 255, 0) + b'[77, ""]',
}


def send_no_message(net: Any, name: str) -> str:
    net.expect_at_most(EXPECTED)
    net.expect_at_most(0)  # which does not lower it
    if net.rank == 1:
        for other in (0, 2):  # has opened its network
            net.recv(EMPTY, other).wait()
        net.mesh.connections.to(0).sock.sendall(NO_MESSAGES[name])
    else:
        net.send(EMPTY, 1)
    with pytest.raises(PeerLost, match="rank 1 ") as info:
        net.recv(EMPTY, 2 - net.rank).wait()
    return info.value.reason


@pytest.mark.parametrize("name", NO_MESSAGES)
def test_what_is_no_message_is_noticed_before_memory_is_taken_for_it(name: str) -> None:
    for reason in ProcessWorld().run(3, send_no_message, name):
        print(reason)
        if name in ("news in an unknown form", "the loss of no rank"):
            assert reason == "told of the loss of a rank in an unknown form"
        else:
            assert reason.startswith("sent what is no message here: kind ")
            if name == "more than is expected":
                assert f" {EXPECTED + 4} bytes (" in reason
                assert f" {EXPECTED} bytes at most)" in reason
            assert "all ranks must run the same version of lightning_dsgd" in reason
