"""The steps of a loop whose ranks share each step's micro-batches: `balanced`.

    for batches in replica.steps(loader, accumulate=4):
        optimizer.zero_grad()
        for x, y in batches:              what this rank computes of the step: as many as it has
            loss(model(x), y).backward()  time for, perhaps none
        optimizer.step()                  with the mean over all micro-batches of all ranks

A loop with DDP would have divided its loss by `accumulate`; here the gradient is divided.  A batch
of the loader is a mean over its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning_dsgd.data.units.balancing import Balancing, longest
from lightning_dsgd.data.units.loaders import UnitLoader, check_can_draw_for_others
from lightning_dsgd.data.units.protocol import NONE
from lightning_dsgd.plain.steps import failing
from lightning_dsgd.session import notices
from lightning_dsgd.session.session import Session


class UnitSteps:
    """Leads one rank through the steps of its epochs.

    Args:
        session: the session of this rank
        balancing: what this rank has in hand
        micro_batches: see `Balanced`
    """

    def __init__(
        self, session: Session[Any], balancing: Balancing, micro_batches: int | None
    ) -> None:
        self._session, self._balancing = session, balancing
        self._micro_batches = micro_batches
        self._loaders: dict[int, UnitLoader] = {}
        self._is_whole = False

    def of(self, loader: Any, accumulate: int, move: Callable[[Any], Any]) -> Iterator[Any]:
        """Yields the steps of an epoch, each as an iterator of its micro-batches.

        Args:
            loader: the batches that this rank would have with DDP
            accumulate: of how many batches of each rank a step is made
            move: brings a batch to the device
        """
        if accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, got {accumulate}")
        session, balancing = self._session, self._balancing
        with failing(session):
            units = self._loaders.get(id(loader))
            if units is None or units.source is not loader:
                if session.ranks.go_on:
                    check_can_draw_for_others(loader, balancing.num_homes)
                units = self._loaders[id(loader)] = UnitLoader(loader, session.rank)
            session.begin_training()
            balancing.begin_epoch(
                units,
                limit=session.ranks.together(lambda: longest(session.meetings, loader)),
                num_slots_of_step=accumulate,
                micro_batches=self._micro_batches,
            )
            notices.tell_of_parts(session, balancing, self._micro_batches)
        for step in range(balancing.plan.num_steps):
            with failing(session):
                session.begin_batch()
                balancing.begin_step(step)
            self._is_whole = False
            yield self._batches(accumulate, move)
            if not self._is_whole:
                raise RuntimeError(
                    "all micro-batches of a step must be computed, got a loop over `batches` that "
                    "was left early; leave the loop over the steps in its place, on all ranks"
                )
            session.end_batch()

    def _batches(self, accumulate: int, move: Callable[[Any], Any]) -> Iterator[Any]:
        session, balancing = self._session, self._balancing
        assert session.training is not None, "there are steps while a training is under way"
        while True:
            with failing(session):
                unit = balancing.next_unit()
                batch = None if unit == NONE else move(balancing.batch())
            if unit == NONE:
                break
            session.training.replica.drop_gradients()
            yield batch
            with failing(session):
                balancing.finish(balancing.weight / accumulate)
        self._is_whole = True
