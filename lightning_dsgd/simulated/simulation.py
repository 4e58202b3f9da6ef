"""One run of a simulated world: its threads' beginning and end, and what became of each.

All of this belongs to the holder of the baton, but for `run` and what gives the outcomes, which the
caller of the world uses before the first thread runs and after the last has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning_dsgd.simulated.baton import Baton, Killed, Thread
from lightning_dsgd.simulated.faults import Faults
from lightning_dsgd.simulated.links import Links, Processors
from lightning_dsgd.transport.contract import LaneStopped, TransportError, failed

Fault = Callable[[Faults], None]


class Simulation:
    """What all endpoints of one run share.

    Args:
        baton: tells which thread runs
        faults: tell which rank is lost
        links: carry messages
        processors: tell what communication takes of them
        arrivals: when each newcomer comes; they are the last ranks
    """

    def __init__(
        self,
        baton: Baton,
        faults: Faults,
        links: Links,
        processors: Processors,
        arrivals: Sequence[float] = (),
    ) -> None:
        self.baton = baton
        self.faults = faults
        self.links = links
        self.processors = processors
        self.failures: list[tuple[int, float, BaseException]] = []
        """The rank, the time and the exception of each thread that failed, as they were noticed."""
        self._num_training = len(baton.threads)
        self._arrivals = arrivals
        self.num_first = len(baton.threads) - len(arrivals)
        """How many ranks there are at the start."""

    def run(self, faults: list[tuple[float, Fault]], fns: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs `fns[rank]()` on each rank; returns what each returned, or its exception."""
        for at_s, fault in faults:
            self.baton.plan_idle(at_s, partial(fault, self.faults))

        def start_all() -> None:
            begins = [0.0] * self.num_first + [*self._arrivals]
            for rank, (fn, begin_s) in enumerate(zip(fns, begins, strict=True)):
                self.start(rank, "", fn, begin_s)

        self.baton.run(start_all)
        return [self._outcome(rank) for rank in range(len(fns))]

    def start(self, rank: int, path: str, fn: Callable[[], Any], at_s: float = 0.0) -> Thread:
        """Starts a thread of a rank that runs `fn` as soon as the baton comes to it."""
        return self.baton.start(rank, path, partial(self._run_thread, fn), at_s)

    def _run_thread(self, fn: Callable[[], Any], thread: Thread) -> None:
        try:
            if thread.doom is not None:
                raise thread.doom
            thread.result = fn()
        except BaseException as error:
            if not (isinstance(error, LaneStopped) and error is thread.doom):
                thread.failure = error
        self._end(thread)

    def _end(self, thread: Thread) -> None:
        self.baton.end(thread)
        if thread.failure is not None:
            self._fail(thread, thread.failure)
        if thread.age == 0:
            self.faults.end(thread.rank, thread.failure)
            self._num_training -= 1
            if self._num_training == 0:
                self._stop_stray_lanes()

    def _fail(self, thread: Thread, error: BaseException) -> None:
        self.failures.append((thread.rank, thread.clock, error))
        if thread.age == 0:
            for lane in self.baton.threads[thread.rank]:
                self.baton.stop(lane)
        if not self.faults.has_lost(thread.rank) and not isinstance(error, Killed):
            reason = failed(error)
            at_s = thread.clock + self.faults.detect_s
            self.faults.lose(thread.rank, reason, at_s, error)

    def _stop_stray_lanes(self) -> None:
        for training, *lanes in self.baton.threads:
            strays = [lane for lane in lanes if not lane.ended and lane.doom is None]
            if strays and training.failure is None:
                what = "\n".join(f"  {lane.name}: {lane.what_of()}" for lane in strays)
                training.failure = TransportError(
                    f"rank {training.rank} returned without stopping its lanes:\n{what}"
                )
                self.failures.append((training.rank, training.clock, training.failure))
            for lane in strays:
                self.baton.stop(lane)

    def _outcome(self, rank: int) -> Any:
        training, *lanes = self.baton.threads[rank]
        if training.failure is not None:
            return training.failure
        for lane in lanes:
            if lane.failure is not None and not lane.failure_told:
                return lane.failure
        return training.result
