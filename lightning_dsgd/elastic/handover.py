"""What a member gives a newcomer, besides the weights: as bytes that torch loads without pickles.

    checkpoint       what Lightning saves: optimizers, schedulers, callbacks, loops; of a batch that
                     is about to begin
    random_states    of all generators that training draws from
    session          what the members have agreed on and counted so far

It is loaded with `weights_only=True`: tensors, numbers, text, and lists and dicts of them.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dsgd.elastic import taken_over
from lightning_dsgd.session.checkpoint import record
from lightning_dsgd.transport import Transport

_SIZE = torch.zeros(1, dtype=torch.int64)


def give(net: Transport, newcomers: Sequence[int], trainer: Any, session: dict[str, Any]) -> None:
    """Gives this rank's state to these ranks of the view."""
    state = {
        "checkpoint": taken_over.state_before_batch(trainer),
        "random_states": record.random_states(),
        "session": session,
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    given = torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)
    net.expect_at_most(given.nbytes)
    for newcomer in newcomers:
        net.send(torch.tensor([given.nbytes]), newcomer)
    for newcomer in newcomers:
        net.recv(_SIZE, newcomer).wait()  # it expects so much
        net.send(given, newcomer)


def take(net: Transport, giver: int) -> dict[str, Any]:
    """Takes the state that the giver gives."""
    size = net.recv(_SIZE, giver).wait()
    net.expect_at_most(int(size))
    net.send(size, giver)
    taken: Tensor = net.recv(torch.empty(0, dtype=torch.uint8), giver).wait()
    buffer = io.BytesIO(taken.numpy().tobytes())
    try:
        state: dict[str, Any] = torch.load(buffer, "cpu", weights_only=True)
    except Exception as err:
        raise ValueError(
            "what callbacks and modules save must be tensors, numbers, text, lists and dicts for a "
            f"rank to join, got from the first member: {err}; change their state_dict"
        ) from err
    return state
