"""A simulated world, as its caller sees it.

The caller's thread makes the world and its faults, and waits in `run`; it shares no field with the
ranks' threads while these run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_dsgd.simulated.baton import Baton, shortened
from lightning_dsgd.simulated.endpoint import SimulatedTransport
from lightning_dsgd.simulated.faults import Faults
from lightning_dsgd.simulated.links import Links, Processors
from lightning_dsgd.simulated.simulation import Fault, Simulation
from lightning_dsgd.transport.contract import PeerLost, TransportError
from lightning_dsgd.transport.counters import Counters

R = TypeVar("R")


class RankFailed(RuntimeError):
    """A rank of a simulated world failed; its own exception is the cause of this one."""


class SimulatedWorld:
    """P ranks on a virtual clock.

    Faults (`kill`, `delay`, `drop`) strike at a virtual time that is set before the run.
    They and default timeouts do not keep the world going: when every thread waits and nothing is
    under way, `Deadlock` is raised at once, with a table of who waits for what.

    Args:
        world_size: P
        latency_s: from the end of a message's departure to its arrival
        bandwidth_bytes_s: the bandwidth of each link, in each direction
        shared_link: all ranks share one link, in place of one each
        timeout_s: how long a wait may take, in virtual time
        size_scale: multiplies the bytes of each message, in its cost and where bytes are counted,
            so that small tensors can stand for large ones
        message_bytes: gives the bytes of each message in place of `size_scale`, where some messages
            stand for larger ones and others do not
        detect_s: how long after a rank's end the others know of it
        heartbeat_timeout_s: how long after a rank's last sign of life the others give it up
        strict: a run that leaves messages that nobody received has failed
        links: makes the links of all ranks, with no link but a rank's own by default
        processors: makes what communication takes of them; by default nothing
    """

    undelivered: list[str]
    """The messages of the last run that nobody received, in words."""

    def __init__(
        self,
        world_size: int,
        latency_s: float = 0.0,
        bandwidth_bytes_s: float = math.inf,
        shared_link: bool = False,
        timeout_s: float = 1800.0,
        size_scale: float = 1.0,
        message_bytes: Callable[[Tensor], float] | None = None,
        detect_s: float = 0.01,
        heartbeat_timeout_s: float = 20.0,
        strict: bool = True,
        links: Callable[..., Links] = Links,
        processors: Callable[[Baton], Processors] = Processors,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        if latency_s < 0 or bandwidth_bytes_s <= 0 or size_scale <= 0:
            raise ValueError(
                f"latency_s must not be negative, bandwidth_bytes_s and size_scale must be "
                f"positive, got latency_s={latency_s}, bandwidth_bytes_s={bandwidth_bytes_s} and "
                f"size_scale={size_scale}"
            )
        self.world_size = world_size
        self.latency_s = latency_s
        self.bandwidth_bytes_s = bandwidth_bytes_s
        self.shared_link = shared_link
        self.timeout_s = timeout_s
        self.message_bytes = message_bytes or (lambda x: x.nbytes * size_scale)
        self.detect_s = detect_s
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.strict = strict
        self._links = links
        self._processors = processors
        self.undelivered = []
        self._faults: list[tuple[float, Fault]] = []
        self._arrivals: list[float] = []  # of newcomers, which come to a world of the wing alone

    def kill(self, rank: int, at_s: float) -> None:
        """Ends all of the rank's threads; the others know `detect_s` later."""
        self._script(rank, at_s, lambda faults: faults.kill(rank))

    def delay(self, rank: int, at_s: float, seconds: float) -> None:
        """Moves the rank's clocks on by so many seconds."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards, got seconds={seconds}")
        self._script(rank, at_s, lambda faults: faults.delay(rank, seconds))

    def drop(self, rank: int, at_s: float) -> None:
        """Lets all messages to and from the rank vanish, those on their way and later ones.

        After `heartbeat_timeout_s` the others have lost it, and it has lost the others.
        """
        self._script(rank, at_s, lambda faults: faults.drop(rank))

    def run(self, fn: Callable[..., R], *args: Any) -> list[R]:
        """Runs `fn(net, *args)` on each rank from 0 s on; returns what each rank returned.

        Raises:
            RankFailed: from the first failure that is not the loss of another rank
            TransportError: for messages that nobody received, if `strict`
        """
        simulation = self._simulation()
        outcomes = self._outcomes(simulation, fn, args)
        failed = [rank for rank, o in enumerate(outcomes) if isinstance(o, BaseException)]
        if failed:
            rank, at_s, error = min(
                simulation.failures, key=lambda failure: isinstance(failure[2], PeerLost)
            )
            others = f" (and {len(failed) - 1} more of {self.world_size})" if failed[1:] else ""
            raise RankFailed(
                f"rank {rank} failed at {at_s:.9g} s{others}: {type(error).__name__}: {error}"
            ) from error
        if self.strict and self.undelivered:
            raise TransportError(
                f"messages that nobody received, {len(self.undelivered)} in all:\n"
                + shortened(self.undelivered)
            )
        return outcomes

    def outcomes(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Does what `run` does, but returns a rank's exception where the rank failed."""
        return self._outcomes(self._simulation(), fn, args)

    def _simulation(self) -> Simulation:
        baton = Baton(self.world_size + len(self._arrivals))
        faults = self._make_faults(baton)
        links = self._links(
            baton,
            faults,
            self.latency_s,
            self.bandwidth_bytes_s,
            self.shared_link,
            self.message_bytes,
        )
        return Simulation(baton, faults, links, self._processors(baton), self._arrivals)

    def _make_faults(self, baton: Baton) -> Faults:
        return Faults(baton, self.detect_s, self.heartbeat_timeout_s)

    def _outcomes(
        self, simulation: Simulation, fn: Callable[..., Any], args: tuple[Any, ...]
    ) -> list[Any]:
        # Ranks take turns, so a pool of workers for each thread would be idle but for its own rank,
        # and how sums are split would depend on the machine.
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            nets = [
                SimulatedTransport(simulation, rank, self.timeout_s, Counters())
                for rank in range(self.world_size + len(self._arrivals))
            ]
            return simulation.run(self._faults, [partial(fn, net, *args) for net in nets])
        finally:
            torch.set_num_threads(num_threads)
            self.undelivered = simulation.links.undelivered()

    def _script(self, rank: int, at_s: float, fault: Fault) -> None:
        num_ranks = self.world_size + len(self._arrivals)
        if not 0 <= rank < num_ranks or at_s < 0:
            raise ValueError(
                f"a fault strikes a rank of 0 to {num_ranks - 1} at 0 s or later, "
                f"got rank={rank} and at_s={at_s}"
            )
        self._faults.append((at_s, fault))
