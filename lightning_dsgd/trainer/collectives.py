"""Lightning's collectives: this rank first serves those that still train, and then waits for all.

With `on_loss="end"` barriers, sums and means travel on our network, and the rest by torch's process
group.  With `on_loss="continue"` that would wait for lost ranks, so all of it travels on ours,
among the members.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_dsgd.session.phases import Phase
from lightning_dsgd.trainer import seams
from lightning_dsgd.trainer.launched import LaunchedMixin
from lightning_dsgd.trainer.sessions import TrainerSession


class CollectivesMixin(LaunchedMixin):
    """Makes the collectives of a strategy; the head of the file tells how."""

    session: TrainerSession
    _warned_of_local_logs = False

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.session.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self.session.phase is Phase.BROKEN:
            return obj
        self.session.meet()
        return self.session.ranks.collectives.broadcast(
            obj, src, partial(super().broadcast, obj, src)
        )

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        self.session.check_process()
        self.session.meet()
        theirs = partial(super().all_gather, tensor, group, sync_grads)
        return self.session.ranks.collectives.all_gather(
            tensor, theirs, group=group, sync_grads=sync_grads
        )

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor) or not self.session.can_meet:
            return tensor
        if self._is_of_a_step():
            if not self.algorithm.traits.lockstep:
                self._warn_of_local_logs()
                return tensor
            self.session.ranks.collectives.check_in_step()
            if self.session.training is not None and self.session.training.is_uneven:
                raise ValueError(
                    "a value of a step must not be asked of ranks that have run out of batches, "
                    "got self.log(..., on_step=True, sync_dist=True) where ranks have different "
                    "numbers of batches; use on_epoch=True, on_step=False"
                )
        op = getattr(reduce_op, "name", str(reduce_op)).lower()
        theirs = partial(super().reduce, tensor, group, reduce_op)
        return self.session.ranks.collectives.reduce(tensor, op, theirs, group=group)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        # Not by `reduce`: callbacks also decide right after a batch, and all ranks must do the
        # same.
        if not self.session.can_meet:
            return decision
        return self.session.ranks.collectives.decide(decision, is_of_all=all)

    def _is_of_a_step(self) -> bool:
        """Returns whether a reduction now is of one batch; later hooks are past `end_batch`."""
        hook = seams.current_hook(self.lightning_module)
        return self.session.phase is Phase.IN_BATCH or hook == "on_train_batch_end"

    def _warn_of_local_logs(self) -> None:
        if not self._warned_of_local_logs:
            self._warned_of_local_logs = True
            rank_zero_warn(
                f'strategy="{self.algorithm.name}" does not wait for all ranks in every step, so '
                "self.log(..., on_step=True, sync_dist=True) logs the value of rank 0 alone; "
                "use on_epoch=True for a value over all ranks"
            )
