"""`strategy="adaptive"` in the Trainer: it knows the epochs, and loggers get each decision."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from lightning_dsgd.lab import trackers
from lightning_dsgd.lab.adaptive.algorithm import Adaptive
from lightning_dsgd.trainer.named import named
from lightning_dsgd.trainer.strategy import DecentralizedStrategy


class AdaptiveMixin:
    """Has all ranks meet after each epoch, and tells the loggers of each decision.

    Attributes:
        decisions: all decisions so far, as lines, with their reasons; also after training
    """

    decisions: Sequence[str] = ()

    def on_train_start(self: Any) -> None:
        super().on_train_start()  # type: ignore[misc]
        self.decisions = ()
        trainer = self._trainer
        num_batches = trainer.num_training_batches
        for part in self._parts:
            part.algorithm.tell = rank_zero_info
            if math.isfinite(num_batches):
                steps = max(1, math.ceil(num_batches / trainer.accumulate_grad_batches))
                part.algorithm.expect_epochs(steps)

    def optimizer_step(
        self: Any,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)  # type: ignore[misc]
        self._report()
        return output

    def end_epoch(self: Any) -> None:
        super().end_epoch()  # type: ignore[misc]
        self.session.meet()  # where no rank has validated or saved, nobody would look
        self._report()

    @property
    def _parts(self: Any) -> list[Any]:
        training = self.session.training
        return [] if training is None else list(training.replica.parts)

    def _report(self: Any) -> None:
        lines = [line for part in self._parts for line in part.algorithm.decisions]
        if len(lines) > len(self.decisions):
            self.decisions = lines
            if self._trainer.is_global_zero:
                for logger in self._trainer.loggers:
                    trackers.give_decisions(logger, lines, self._trainer.global_step)


@cache
def made(base: type) -> type:
    """Makes the strategy, of the Trainer of one of Lightning's two packages."""
    return named(Adaptive, type("Adaptive", (AdaptiveMixin, base), {}), __name__)


AdaptiveStrategy: Final = made(DecentralizedStrategy)
