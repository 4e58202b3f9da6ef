"""Steps that raise, a scaler that is saved, and what an optimizer keeps of a training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import lightning_dsgd as dsgd
from tests.plain.test_training import loader_of, make, replica_of
from tests.support.fits import Plain, run, same
from tests.support.models import weights


class Failing(torch.optim.SGD):
    """Raises in some of its steps, once the gradients are exchanged."""

    num_calls = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.num_calls += 1
        if self.num_calls in (2, 5):
            raise ArithmeticError("no such luck")
        return super().step(closure)


def step_again() -> tuple[Tensor, list[Tensor], int]:
    """The weights, the gradients that each step has used, and the number of steps."""
    model, _ = make(Plain)
    optimizer = Failing(model.parameters(), 0.05)
    used = []
    with replica_of(model, optimizer, dsgd.AllReduce()) as replica:
        for number, batch in enumerate(loader_of(replica.rank, 8)):
            optimizer.zero_grad()
            model.loss(batch).backward()
            if number >= 4:  # as clipping needs it
                replica.reduce_gradients()
            try:
                optimizer.step()
            except ArithmeticError:
                continue
            used.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        own = weights(model)
        return own, used, replica.num_steps


def test_the_step_after_one_that_raised_exchanges_gradients() -> None:
    first, second = run(2, step_again)
    assert same([first[0], second[0]])
    assert len(first[1]) == 6
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first[1], second[1], strict=True))
    assert first[2] == second[2] == 6


def train_scaled(folder: str, init_scale: float) -> tuple[float, bool]:
    """The scale after a load from there, if there is anything, and whether nothing is hooked."""
    path = f"{folder}/saved.pt"
    model, optimizer = make(Plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    with replica_of(model, optimizer, dsgd.AllReduce(), scaler=scaler) as replica:
        if init_scale != 256.0:
            replica.load(path)
        found = scaler.get_scale()
        for batch in loader_of(replica.rank, 2):
            optimizer.zero_grad()
            scaler.scale(model.loss(batch)).backward()
            scaler.step(optimizer)
            scaler.update()
        replica.save(path)
    hooks = [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks]
    return found, not hooks and "step" not in vars(scaler)


def test_a_scaler_goes_on_with_its_scale_and_nothing_stays_hooked(tmp_path: Any) -> None:
    assert run(2, train_scaled, str(tmp_path), 256.0) == [(256.0, True)] * 2
    assert run(2, train_scaled, str(tmp_path), 1024.0) == [(256.0, True)] * 2
