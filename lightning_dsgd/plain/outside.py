"""Refuses steps outside of the `with`, which would train one rank alone, in silence.

    decentralized(model, optimizer, ...)       each optimizer refuses to step
    with decentralized(...) as replica:        each optimizer steps again, as `steps` says

A refusal is held by its optimizer, as the `decentralized(...)` may be kept by nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer

_HELD: Final = "_refusal_of_lightning_dsgd"
"""The optimizer's attribute that holds the handle of its refusal."""
PLACE: Final = "`with decentralized(...) as replica:`"


def refuse_steps(optimizers: Sequence[Optimizer]) -> None:
    """Has optimizers refuse to step until `allow_steps` is called."""
    allow_steps(optimizers)
    for optimizer in optimizers:
        vars(optimizer)[_HELD] = optimizer.register_step_pre_hook(_uncompiled_refusal)


def allow_steps(optimizers: Sequence[Optimizer]) -> None:
    """Has optimizers step again, whichever `decentralized(...)` has them refuse to."""
    for optimizer in optimizers:
        handle = vars(optimizer).pop(_HELD, None)
        if handle is not None:
            handle.remove()


def _refuse(*args: Any) -> None:
    raise RuntimeError(
        f"steps must be made inside of {PLACE}, got one outside, which would train this rank "
        "alone; write `with` before decentralized(...), and train in it"
    )


_uncompiled_refusal: Any = torch.compiler.disable(_refuse)  # type: ignore[no-untyped-call]


def must_be_inside(what: str) -> RuntimeError:
    """Returns the error about a call that needs the other ranks, or this rank's number."""
    return RuntimeError(f"replica.{what} must be called inside of {PLACE}, got it outside")
