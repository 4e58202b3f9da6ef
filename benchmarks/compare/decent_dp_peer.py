"""Decent-DP's decentralised data parallelism as a strategy, to be measured beside ours.

    decent_dp:topology=ring                    one neighbour per step, by turns left and right
    decent_dp:topology=one-peer-exp            one rank per step, at distance 1, 2, 4, ...

Its wrapper makes the optimizer's step inside the backward pass, bucket by bucket, and averages the
weights with a neighbour's while the next pass is under way: everyone waits for its neighbours.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.compare.peer import Peer


class DecentDPStrategy(Peer):
    """Trains with Decent-DP's wrapper, whose optimizer steps and averages."""

    def __init__(self, topology: str = "ring") -> None:
        super().__init__()
        self.topology = topology
        self._buckets: list[torch.optim.Optimizer] = []  # the wrapper's, from the second step on

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        # An extra, which only this strategy needs, so it is not imported with this module.
        from decent_dp.ddp import DecentralizedDataParallel
        from loguru import logger

        logger.disable("decent_dp")  # which tells what it is about to do
        (theirs,) = self.optimizers
        assert self.model is not None

        def optimizer_of(bucket: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
            self._buckets.append(type(theirs)([x for _, x in bucket], **theirs.defaults))
            return self._buckets[-1]

        self.model = DecentralizedDataParallel(
            self.model,
            optimizer_of,
            topology=self.topology,
            sync_buffer_in_global_avg=True,
            _local_world_size=self.world_size,
        )

    def optimizer_step(self, optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the closure, in whose backward pass the wrapper's hooks step."""
        for bucket in self._buckets:
            bucket.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
        return closure()

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._buckets:
            self.model.global_avg()  # type: ignore[union-attr, operator]

    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self._buckets:
            self.model.revert_global_avg()  # type: ignore[union-attr, operator]
