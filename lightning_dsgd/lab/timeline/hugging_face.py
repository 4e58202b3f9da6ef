"""The events by which Hugging Face's Trainer, which imports nothing of this package, is recorded.

It calls each of its callbacks by name at these points, with the wrapped model at none of them:

    on_train_begin
        for each step: its batches are read; on_step_begin; forward and backward passes, in which
        the model is found; the optimizer; on_step_end
        then, where it is due: on_log; an evaluation with on_prediction_step, on_log, on_evaluate;
        on_save
    on_train_end

What lies between on_step_begin and the event before it was spent on the loader.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Events:
    """Turns the events into what `LoopTrace` notes."""

    _since_s = 0.0
    _evaluating_s: float | None = None

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Takes every other event, also those of later versions, and does nothing."""
        if not name.startswith("on_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._goes_on

    def on_train_begin(self: Any, *_: Any, optimizer: Any = None, **__: Any) -> None:
        """Waits for the model, which is wrapped by now, to run."""
        self._await_model(optimizer)
        self._goes_on()

    def on_step_begin(self: Any, *_: Any, **__: Any) -> None:
        """Notes that the batches of a step have been read."""
        self._has_batch(self._since_s)

    def on_step_end(self: Any, *_: Any, **__: Any) -> None:
        """Ends a step."""
        self._end_step()
        self._goes_on()

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        """Notes an evaluation, which began with the event before."""
        if self._evaluating_s is None:
            self._evaluating_s = self._since_s

    def on_evaluate(self: Any, *_: Any, **__: Any) -> None:
        """Notes the end of an evaluation."""
        began_s, self._evaluating_s = self._evaluating_s, None
        self._has_evaluated(self._since_s if began_s is None else began_s)
        self._goes_on()

    def on_predict(self, *_: Any, **__: Any) -> None:
        """Notes the end of a prediction, which is no evaluation."""
        self._evaluating_s = None
        self._goes_on()

    def on_train_end(self: Any, *_: Any, **__: Any) -> None:
        """Closes the file."""
        self._stop_finding()
        if self._watch is not None:
            self.__exit__(None, None, None)

    def _goes_on(self, *_: Any, **__: Any) -> None:
        self._since_s = time.monotonic()
