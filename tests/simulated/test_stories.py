"""What takes how long in a simulated world: stories of its ranks, and the times that they note.

A story is a list of steps: `compute 2` for 2 s, `work 1` on a core of the machine, `send 1 1000` to
rank 1 so many bytes (of a dtype), `recv 1` or `recv any`, `sum` with all, `now`.
The time is noted where a step waits or is `now`, with the rank that a message of `any` has come
from.  A story ends where a rank is lost: who, why, and when.  Nothing is heard of a rank that is
killed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_dsgd.simulated import Killed, SimulatedWorld
from lightning_dsgd.transport import ANY, PeerLost

HALF_S = {"latency_s": 0.5, "bandwidth_bytes_s": 1000.0}
MB_S = {"bandwidth_bytes_s": 1e6}
DTYPES, FAULTS = ("float32", "uint8", "int64"), ("delay", "kill", "drop")
TEN_STEPS = "; ".join(["compute 1; sum"] * 10)
PAIRS = ["send 1 1000000; now", "recv 0", "send 3 1000000; now", "recv 2"]

Row = tuple[dict[str, Any], list[str], list[list[Any] | None]]
STORIES: dict[str, Row] = {
    "a message may count for other bytes than it has": (
        {"bandwidth_bytes_s": 1000.0, "message_bytes": lambda x: 100.0 * x.nbytes},
        *(["send 1 10; now", "recv 0"], [[0.0], [1.0]]),
    ),
    "a message takes the latency, and its bytes over the bandwidth": (
        {"latency_s": 0.125, "bandwidth_bytes_s": 1000.0},
        ["compute 2; send 1 1000; now; recv 1", "recv 0; now; compute 0.25; send 0 500"],
        [[2.0, 3.125 + 0.25 + 0.5 + 0.125], [3.125, 3.125]],
    ),
    "a link sends one message at a time": (
        *(HALF_S, ["send 1 1000; send 2 1000; send 3 1000; now", *["recv 0"] * 3]),
        [[0.0], [1.5], [2.5], [3.5]],
    ),
    "a link receives one message at a time": (
        HALF_S,
        [
            "recv any; recv any; recv any",
            *(f"compute {rank / 4}; send 0 1000" for rank in (1, 2, 3)),
        ],
        [[(1, 1.75), (2, 2.75), (3, 3.75)], [], [], []],
    ),
    # Rank 0's third message leaves at 2 s; rank 2's to the same receiver comes long before it.
    "a queue at one link does not hold up another": (
        {"bandwidth_bytes_s": 1000.0},
        [
            *("send 1 1000; send 1 1000; send 3 1000", "recv 0; recv 0"),
            *("compute 0.5; send 3 1000", "recv any; recv any"),
        ],
        [[], [1.0, 2.0], [], [(2, 1.5), (0, 3.0)]],
    ),
    "a shared link carries one message at a time": (
        HALF_S | {"shared_link": True},
        [f"send {rank ^ 1} 1000; recv {rank ^ 1}" for rank in range(4)],
        [[2.5], [1.5], [4.5], [3.5]],
    ),
    "any takes what arrives first and not what was sent first": (
        {"latency_s": 1.0, "bandwidth_bytes_s": 1000.0, "delay": [(1, 0.0, 2.0)]},
        ["recv any; recv any", "send 0 4000", "compute 0.5; send 0 1000"],
        [[(2, 2.5), (1, 7.0)], [], []],
    ),
    "a delayed rank is late and nothing else changes": (
        *({"delay": [(1, 2.5, 7.0)]}, [f"{TEN_STEPS}; now"] * 4),
        [[1.0, 2.0, *(10.0 + n for n in range(8)), 17.0]] * 4,
    ),
    "a delay strikes a rank that waits": (
        {"delay": [(1, 1.0, 0.5), (1, 1.25, 9.0)]},
        ["compute 2; send 1 1000; now", "recv 0"],
        [[2.0], [10.5]],
    ),
    "a killed rank is lost to all": (
        {"detect_s": 0.25, "kill": [(2, 3.875)]},
        [TEN_STEPS] * 4,
        [
            [1.0, 2.0, 3.0, (2, "was killed at 3.875 s", 4.125)] if rank != 2 else None
            for rank in range(4)
        ],
    ),
    "a loss reaches waits that had nothing to do with it": (
        {"detect_s": 0.5, "kill": [(0, 5.0)]},
        ["compute 100", "recv 2", "compute 14; now"],
        [None, [(0, "was killed at 5 s", 5.5)], [14.0]],
    ),
    "messages that had not left die with their sender": (
        HALF_S | {"detect_s": 10.0, "kill": [(0, 1.5)]},
        ["send 1 1000; send 1 1000; send 1 1000; compute 50", "recv 0; recv 0; recv 0"],
        [None, [1.5, 2.5, (0, "was killed at 1.5 s", 11.5)]],
    ),
    "a dropped rank is lost after the heartbeat timeout": (
        {"heartbeat_timeout_s": 5.0, "drop": [(1, 2.5)]},
        [TEN_STEPS] * 3,
        [[1.0, 2.0, (lost, "stopped answering: not heard of for 5 s", 7.5)] for lost in (1, 0, 1)],
    ),
}


def step(net: Any, verb: str, *rest: str) -> Any:
    """Takes a step; what is noted of it."""
    dtype = getattr(torch, rest[-1] if verb in ("send", "recv") and rest[-1] in DTYPES else "int8")
    source = None
    if verb == "compute":
        net.compute(float(rest[0]))
    elif verb == "work":
        net.work(float(rest[0]))
    elif verb == "send":
        net.send(torch.zeros(int(rest[1]), dtype=torch.int8).view(dtype), int(rest[0]))
    elif verb == "recv":
        receipt = net.recv(torch.empty(0, dtype=dtype), ANY if rest[0] == "any" else int(rest[0]))
        receipt.wait()
        source = receipt.source if rest[0] == "any" else None
    elif verb == "sum":
        net.all_reduce(torch.ones(4)).wait()
    return net.now() if source is None else (source, net.now())


def live(net: Any, stories: list[str]) -> list[Any]:
    noted: list[Any] = []
    for text in filter(None, stories[net.rank].split("; ")):
        try:
            time = step(net, *text.split())
        except PeerLost as lost:
            return [*noted, (lost.rank, lost.reason, net.now())]
        if not text.startswith(("compute", "send")):
            noted.append(time)
    return noted


@pytest.mark.parametrize("story", STORIES)
def test_what_takes_how_long(story: str) -> None:
    check(*STORIES[story])


def check(options: dict[str, Any], stories: list[str], expected: list[Any]) -> None:
    given = {name: value for name, value in options.items() if name not in FAULTS}
    world = SimulatedWorld(len(stories), **given)
    for fault in FAULTS:
        for arguments in options.get(fault, []):
            getattr(world, fault)(*arguments)
    for noted, times in zip(world.outcomes(live, stories), expected, strict=True):
        if times is None:
            assert isinstance(noted, Killed)
        else:
            assert [pytest.approx(each) for each in times] == noted
