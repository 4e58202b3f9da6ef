"""What `training_step` logs where the ranks share the micro-batches of a step.

After a step, a value that was logged for it is the mean over the micro-batches that count: over
this rank's, and with `sync_dist=True` over all ranks'.  A micro-batch that another rank has
computed as well leaves nothing here.  At the end of an epoch a rank without a value has that of
the others.
"""

from __future__ import annotations

import json
from typing import Any

from lightning_dsgd.agreement import everyones
from lightning_dsgd.trainer import joint, seams
from lightning_dsgd.trainer.sessions import TrainerSession
from lightning_dsgd.trainer.torchmetrics_of_steps import StepMetrics


class StepLogs:
    """Holds what the micro-batches of a step have logged; the head of the file tells how.

    Args:
        trainer: whose module logs
        session: with whom the ranks meet

    Attributes:
        metrics: the module's metrics, which a micro-batch may have updated in vain
    """

    def __init__(self, trainer: Any, session: TrainerSession) -> None:
        self._trainer, self._session = trainer, session
        self.metrics = StepMetrics(trainer.lightning_module, session.world_size)
        self._before: dict[str, tuple[Any, ...]] = {}
        self._of_unit: dict[str, tuple[Any, str]] = {}
        self._of_step: dict[str, tuple[str, list[Any]]] = {}

    # ---- around a micro-batch ----

    def begin_unit(self) -> None:
        """Remembers what is logged before a micro-batch."""
        self._before = seams.logged(self._trainer)
        self.metrics.remember()

    def asks_all_ranks(self) -> bool:
        """Returns whether the micro-batch that ends here has logged a value over all ranks."""
        self._of_unit = seams.logged_since(self._trainer, self._before)
        return any(how for _, how in self._of_unit.values())

    def keep_unit(self) -> None:
        """Keeps what the micro-batch has logged: it counts."""
        for key, (value, how) in self._of_unit.items():
            self._of_step.setdefault(key, (how, []))[1].append(value)

    def forget_unit(self) -> None:
        """Forgets what a micro-batch has logged that was computed in vain."""
        seams.forget_logs(self._trainer, self._before)
        self.metrics.undo()

    # ---- after a step, and after an epoch ----

    def show(self, *, asks_all_ranks: bool) -> None:
        """Puts means over the step's micro-batches in the place of what was logged last.

        Args:
            asks_all_ranks: whether any rank has logged a value over all of them; the same on all
        """
        of_step, self._of_step = self._of_step, {}
        logs = {key: (how, [float(v) for v in values]) for key, (how, values) in of_step.items()}
        if asks_all_ranks:
            session, mine = self._session, json.dumps(logs)
            texts = session.ranks.together(lambda: everyones(session.meetings, mine))
            logs |= _over_all([json.loads(text) for text in texts])
        for key, (how, values) in logs.items():
            seams.show_log(self._trainer, key, _reduced(how, values) if values else 0.0)

    def end_epoch(self) -> None:
        """Shows what the others have where this rank had no micro-batch that counts."""
        trainer = self._trainer
        asked = joint.logged_over_all(trainer)
        alone, steps = joint.logged_alone(trainer), joint.logged_for_steps(trainer)
        theirs = [*map(json.loads, self._session.texts(json.dumps([asked, alone, steps])))]
        known = {joint.key_of(how) for how, _ in [*asked, *alone]}
        joint.log_nothing(
            trainer,
            [each for rank in theirs for each in rank[0] if joint.key_of(each[0]) not in known],
        )
        for key, (how, values) in _by_key([each for rank in theirs for each in rank[1]]).items():
            if key not in known:
                joint.log_as_others(trainer, how, sum(values) / len(values))
        for key in {key for rank in theirs for key in rank[2]} - known:
            shown = [rank[2][key] for rank in theirs if key in rank[2]]
            joint.show_last_step(trainer, key, sum(shown) / len(shown))


def _over_all(logs: list[dict[str, Any]]) -> dict[str, tuple[str, list[float]]]:
    """Returns the values of all ranks that are asked of all of them."""
    together: dict[str, tuple[str, list[float]]] = {}
    for log in logs:
        for key, (how, values) in log.items():
            if how:
                together.setdefault(key, (how, []))[1].extend(values)
    for key, (how, values) in together.items():
        if how == "sum":  # over ranks, and not over micro-batches
            together[key] = how, [sum(values) / len(values) * len(logs)]
    return together


def _by_key(logged: list[Any]) -> dict[str, tuple[dict[str, Any], list[float]]]:
    together: dict[str, tuple[dict[str, Any], list[float]]] = {}
    for how, value in logged:
        together.setdefault(joint.key_of(how), (how, []))[1].append(value)
    return together


def _reduced(how: str, values: list[float]) -> float:
    if how in ("max", "min"):
        return max(values) if how == "max" else min(values)
    return sum(values) / len(values)
