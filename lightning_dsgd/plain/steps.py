"""What stands around each step of an optimizer in a plain loop.

    optimizer.step()            torch's pre-hook   session.before_update
                                the step itself
                                torch's post-hook  session.after_update
    optimizer.step(closure)     session.before_update once the closure has made the gradients
    scaler.step(optimizer)      unscales, session.before_update, then as above; where the step is
                                skipped, session.after_update all the same

A subclass of an optimizer whose `step` calls its base's fires both hooks twice: only the outer ones
count.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_dsgd.session.options import check_is_first
from lightning_dsgd.session.phases import Phase
from lightning_dsgd.session.scaling import agree_on_overflow, is_unscaled
from lightning_dsgd.session.session import Session
from lightning_dsgd.transport import TransportError


class Steps:
    """Hooks one training's optimizers; the training thread alone calls the hooks."""

    def __init__(
        self, session: Session[Any], optimizers: Sequence[Optimizer], scaler: GradScaler | None
    ) -> None:
        self.num_steps = 0
        self._session = session
        self.optimizers = list(optimizers)
        self._scaler = scaler
        self._depth: dict[int, int] = {}
        self._outer: dict[int, FrameType] = {}  # that of the step under way
        self._exchanged: set[int] = set()  # optimizers whose algorithm has had its turn
        # Where the step itself is compiled, Dynamo looks no further than to here.
        self._begin = _uncompiled(self._begin_step)
        self._end = _uncompiled(self._end_step)
        self._handles = [
            handle
            for optimizer in optimizers
            for handle in (
                optimizer.register_step_pre_hook(self._before),
                optimizer.register_step_post_hook(self._after),
            )
        ]
        if scaler is not None:
            self._real_scaled_step = scaler.step
            scaler.step = self._scaled_step  # type: ignore[method-assign]

    def give_back(self) -> None:
        """Takes the hooks out of the optimizers and the scaler."""
        for handle in self._handles:
            handle.remove()
        if self._scaler is not None:
            vars(self._scaler).pop("step", None)

    def exchange(self, optimizer: Optimizer) -> None:
        """Gives the algorithm its turn, once a step, as the gradients are ready."""
        self._forget_one_that_raised(optimizer)
        if id(optimizer) in self._exchanged:
            return
        session, scaler = self._session, self._scaler
        is_scaled = scaler is not None and scaler.is_enabled()
        if scaler is not None and is_scaled and not is_unscaled(scaler, optimizer):
            scaler.unscale_(optimizer)
        with failing(session):
            session.check_peers()
            session.before_update(optimizer)
        training = session.training
        if is_scaled and training is not None and training.algorithm.traits.uses_gradient:
            agree_on_overflow(scaler, optimizer, training.replica.parts)
        self._exchanged.add(id(optimizer))

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        return self._begin(optimizer, args, kwargs, _caller())

    def _begin_step(self, optimizer: Optimizer, args: Any, kwargs: Any, frame: FrameType) -> Any:
        key = id(optimizer)
        if self._session.phase is Phase.TRAINED:
            return None  # training has ended, and what was held back is applied
        self._forget_one_that_raised(optimizer)
        if key in self._outer:
            self._depth[key] += 1
            return None
        self._check(optimizer, frame)
        self._depth[key], self._outer[key] = 1, frame
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.exchange(optimizer)
            return None
        if key in self._exchanged:
            raise RuntimeError(
                "gradients must be reduced once a step, got reduce_gradients(...) before a step "
                "with a closure, which makes them again; leave the closure out, or clip in it"
            )

        def wrapped() -> Any:
            training = self._session.training
            if training is not None and training.algorithm.traits.sums_units:
                check_is_first(optimizer, is_first=key not in self._exchanged)
            output = closure()
            self.exchange(optimizer)
            return output

        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, {**kwargs, "closure": wrapped}

    def _forget_one_that_raised(self, optimizer: Optimizer) -> None:
        """Forgets a step that has raised, and so has not called its post-hook."""
        outer = self._outer.get(id(optimizer))
        if outer is not None and not _is_on_stack(outer):
            del self._outer[id(optimizer)]
            self._exchanged.discard(id(optimizer))

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._end(optimizer)

    def _end_step(self, optimizer: Optimizer) -> None:
        key = id(optimizer)
        if key not in self._outer:
            return
        self._depth[key] -= 1
        if not self._depth[key]:
            del self._outer[key]
            self._learn(optimizer)

    def _learn(self, optimizer: Optimizer) -> None:
        """Gives the algorithm its turn again, as the weights have changed."""
        self._exchanged.discard(id(optimizer))
        self.num_steps += 1
        with failing(self._session):
            self._session.after_update(optimizer)

    def _scaled_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        is_ours = any(optimizer is own for own in self.optimizers)
        if is_ours and self._scaler is not None and self._scaler.is_enabled():
            self.exchange(optimizer)
        output = self._real_scaled_step(optimizer, *args, **kwargs)
        if id(optimizer) in self._exchanged:  # it was skipped
            self._learn(optimizer)
        return output

    def _check(self, optimizer: Optimizer, frame: FrameType) -> None:
        training = self._session.training
        if training is not None and training.replica.shows_consensus:
            raise RuntimeError(
                "a step must be made from this rank's own weights, got one inside of "
                "`with replica.consensus():`; train outside of it"
            )
        if getattr(optimizer, "grad_scale", None) is not None:
            raise ValueError(
                "where a loss is scaled for fp16, gradients must be unscaled before the step, got "
                f"a fused {type(optimizer).__name__}; use fused=False"
            )
        uses_gradient = training is not None and training.algorithm.traits.uses_gradient
        if self._scaler is None and uses_gradient and not self.num_steps:
            while frame.f_back is not None:
                frame = frame.f_back
                is_scaled = frame.f_code is GradScaler.step.__code__
                if is_scaled and frame.f_locals["self"].is_enabled():
                    raise ValueError(
                        "where ranks exchange gradients they must skip the same steps, got a "
                        "GradScaler that skips those of one rank; use decentralized(..., "
                        "scaler=scaler)"
                    )


@contextlib.contextmanager
def failing(session: Session[Any]) -> Iterator[None]:
    """Ends this rank's part on an error of the network inside, whoever catches the error."""
    try:
        yield
    except TransportError as error:
        session.fail(error)
        raise


def _uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    disabled: Callable[..., Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return disabled


def _caller() -> FrameType:
    """Returns the frame of the step that has called the hook."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    assert frame.f_back.f_back is not None
    return frame.f_back.f_back


def _is_on_stack(wanted: FrameType) -> bool:
    frame = inspect.currentframe()
    while frame is not None:
        if frame is wanted:
            return True
        frame = frame.f_back
    return False
