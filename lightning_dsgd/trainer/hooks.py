"""Where strategies have no hook of their own, a callback has one."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl


class Hooks(pl.Callback):
    """Tells a strategy of the Trainer's hooks, before all other callbacks."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._strategy.before_update(optimizer)

    def on_train_batch_start(self, *args: Any) -> None:
        self._strategy.session.begin_batch()

    def on_train_batch_end(self, *args: Any) -> None:
        session = self._strategy.session
        session.end_batch()
        for what, detail in session.training.agreed.due():
            session.do_together(what, detail)

    def on_train_epoch_end(self, *args: Any) -> None:
        self._strategy.end_epoch()

    def on_validation_batch_start(self, *args: Any) -> None:
        self._strategy.session.check_peers()

    def on_test_batch_start(self, *args: Any) -> None:
        self._strategy.session.check_peers()

    def on_predict_batch_start(self, *args: Any) -> None:
        self._strategy.session.check_peers()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._strategy.fail(exception)
