"""hivemind's averager of weights as a strategy, to be measured beside ours.

    hivemind:period=8           weights averaged every `period` steps, in the background
    hivemind:delayed=false      the training waits for the average

Ranks find each other through hivemind's hash table, as volunteers on the Internet do, and gather
for at least `matchmaking_s` before an average begins.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from benchmarks.compare.peer import Peer
from lightning_dsgd.transport.connections import own_address


class HivemindStrategy(Peer):
    """Trains with hivemind's processes, which do all exchange between ranks.

    Threads: the averager's own thread changes the weights, under `_weights`; all else belongs to
    the training thread.
    """

    def __init__(self, period: int = 8, matchmaking_s: float = 1.0, delayed: bool = True) -> None:
        super().__init__()
        self.period = period
        self.matchmaking_s = matchmaking_s
        self.delayed = delayed
        self._weights = threading.Lock()
        self._num_steps = 0
        self._pending: Future[Any] | None = None
        self._dht: Any = None
        self._averager: Any = None

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        # An extra, which only this strategy needs, so it is not imported with this module.
        import hivemind
        from hivemind.optim.training_averager import TrainingAverager

        where = f"/ip4/{own_address()}/tcp/0"
        met: list[Any] = [None]
        if self.global_rank == 0:
            self._dht = hivemind.DHT(start=True, host_maddrs=[where])
            met = [[str(each) for each in self._dht.get_visible_maddrs()]]
        dist.broadcast_object_list(met, src=0)
        if self.global_rank != 0:
            self._dht = hivemind.DHT(start=True, host_maddrs=[where], initial_peers=met[0])
        (optimizer,) = self.optimizers
        self._averager = TrainingAverager(
            optimizer,
            average_parameters=True,
            average_gradients=False,
            initialize_optimizer=False,
            dht=self._dht,
            prefix="bench",
            target_group_size=self.world_size,
            min_matchmaking_time=self.matchmaking_s,
            request_timeout=self.matchmaking_s / 2,
            start=True,
        )
        dist.barrier()

    def optimizer_step(self, optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
        """Steps on this rank; every so many steps, an average begins after the last one's end."""
        with self._weights:
            result = super().optimizer_step(optimizer, closure, *args, **kwargs)
        self._num_steps += 1
        if self._num_steps % self.period == 0 and (self._pending is None or self._pending.done()):
            lock = self._weights if self.delayed else None
            self._pending = self._averager.step(data_lock=lock, wait=False, timeout=60.0)
            if not self.delayed:
                self._wait()
        return result

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._wait()

    def teardown(self) -> None:
        self._wait()
        if self._averager is not None:
            dist.barrier()  # the hash table stays until nobody asks it any more
            self._averager.shutdown()
            self._dht.shutdown()
        super().teardown()

    def _wait(self) -> None:
        """Waits until the average under way is in the weights."""
        if self._pending is not None:
            self._pending.result(timeout=120.0)
            self._pending = None
