"""`strategy="balanced"` in the Trainer: Lightning's loops see DDP with accumulation.

Each rank goes through as many batches as with DDP, and makes as many optimizer steps.  So whatever
Lightning counts is DDP's: `global_step`, the progress bar, validations, savers, schedulers.  A
batch of Lightning's is a slot of the step.  What a rank computes in a slot differs:

    next batch of the loader      the unit that this rank begins, or none: see `data.units`
    training_step, backward       of that unit; nothing where there is none
    the last slot of a step       after it, more units until all of the step are finished; the sum
    optimizer step                with the sum, as with DDP: fp16, clipping, hooks

Callbacks see a slot's batch; where a rank has no unit in a slot, they see the batch before once
more, and what `training_step` returned for it.  Where there is none before, `training_step` is
called with the rank's own batch for them alone.  Units beyond one a slot are seen by
`training_step` and by the hooks of a backward pass, not by the hooks of a batch.

What a step logs: see `step_logs`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dsgd import keywords
from lightning_dsgd.algorithm import Algorithm, Conditions
from lightning_dsgd.algorithms.balanced import Balanced
from lightning_dsgd.data.loaders import StandIn
from lightning_dsgd.data.units.balancing import Balancing, longest
from lightning_dsgd.data.units.loaders import UnitLoader, check, check_can_draw_for_others
from lightning_dsgd.data.units.protocol import NONE
from lightning_dsgd.session import notices
from lightning_dsgd.session.options import check_is_first
from lightning_dsgd.session.under_way import opened
from lightning_dsgd.trainer import seams, step_sizes
from lightning_dsgd.trainer.arguments import TrainerOptions
from lightning_dsgd.trainer.sessions import TrainerTraining
from lightning_dsgd.trainer.step_logs import StepLogs
from lightning_dsgd.trainer.strategy import DecentralizedMixin, DecentralizedStrategy


class BalancedMixin(DecentralizedMixin):
    """Trains with `Balanced`: the ranks share the micro-batches of each step.

    Args:
        algorithm: a `Balanced` with its hyperparameters, or its name
        **given: the options in `TrainerOptions`
    """

    algorithm: Balanced
    _takes_units: ClassVar[bool] = True
    _balancing: Balancing | None = None
    _loader: BalancedLoader | None = None
    _num_homes: int | None = None  # of a training that began with another number of ranks
    _is_in_unit = False
    _begins_step = False
    _output: Any = None

    def __init__(
        self, algorithm: Algorithm | str = Balanced.name, **given: Unpack[TrainerOptions]
    ) -> None:
        super().__init__(algorithm, **given)

    # ---- set-up ----

    def setup(self, trainer: Any) -> None:
        if trainer.state.fn == "fit":
            _check_trainer(trainer)
            self._loader, self._balancing, self._output = None, None, None
        super().setup(trainer)

    def process_dataloader(self, dataloader: Any) -> Any:
        loader = super().process_dataloader(dataloader)
        if not self._is_training:
            return loader
        check(loader)
        session = self.session
        if session.ranks.go_on or self.num_homes != self.world_size:
            check_can_draw_for_others(loader, self.num_homes)
        num_slots = session.ranks.together(
            lambda: longest(session.meetings, loader), apart=len(loader)
        )
        self._loader = BalancedLoader(loader, num_slots, self._slots)
        return self._loader

    def _set_up_training(self, trainer: Any) -> TrainerTraining:
        training = super()._set_up_training(trainer)
        self._balancing = Balancing(
            self.session.net.sub("balancing"),
            training.replica,
            self.session.ranks,
            backups=self.algorithm.backups,
            num_homes=self.num_homes,
        )
        training.balancing = self._balancing
        return training

    # ---- a resume on another number of ranks ----

    @property
    def num_homes(self) -> int:
        """How many ranks would train with DDP: as many as there were when training began."""
        return int(self.world_size if self._num_homes is None else self._num_homes)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        given: dict[str, Any] = super().distributed_sampler_kwargs
        if self._num_homes is None or not self.lightning_module.trainer.training:
            return given
        return given | {"num_replicas": self.num_homes, "rank": self.global_rank % self.num_homes}

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if self._trainer is not None and "loops" in checkpoint:
            checkpoint = self.noted(checkpoint, self._trainer)
            seams.leave_loaders_out(checkpoint)
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def noted(self, checkpoint: dict[str, Any], trainer: Any) -> dict[str, Any]:
        return step_sizes.noted(checkpoint, trainer, self.num_homes)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        if self.session.is_open and self._trainer_state() == "fit":
            trainer = self.lightning_module.trainer
            num_homes = step_sizes.kept(trainer, checkpoint, self.world_size)
            self._num_homes = None if num_homes == self.world_size else num_homes
        return checkpoint

    def _conditions(self) -> Conditions:
        conditions: Conditions = super()._conditions()
        return replace(conditions, num_homes=self.num_homes)

    @property
    def _shared(self) -> Balancing:
        """What shares the micro-batches of this training."""
        return opened(self._balancing)

    # ---- slots ----

    def _slots(self) -> Iterator[Any]:
        """Yields the batch of each slot of an epoch."""
        trainer, balancing, loader = self._trainer, self._shared, opened(self._loader)
        _check_is_one(trainer.train_dataloader, loader)
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        balancing.begin_epoch(
            loader.units(self.session.rank),
            limit=int(trainer.num_training_batches),
            num_slots_of_step=trainer.accumulate_grad_batches,
            micro_batches=self.algorithm.micro_batches,
            first_slot=progress.ready,
        )
        notices.tell_of_parts(self.session, balancing, self.algorithm.micro_batches)
        before = None
        for slot in range(progress.ready, balancing.plan.num_slots):
            self._begins_step = balancing.plan.begins_step(slot)
            if balancing.begin_slot(slot) != NONE:
                before = balancing.batch()
            elif before is None:
                before = balancing.own_batch()
            yield before

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._begins_step:  # the hooks of a batch may have frozen parameters, or unfrozen them
            self.session.follow()

    # ---- units ----

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        has_unit = self._balancing is not None and self._balancing.unit != NONE
        if not has_unit and (self._balancing is None or self._output is not None):
            return self._output_before()
        self._logs.begin_unit()
        with self._computing():
            output = super().training_step(*args, **kwargs)
        # A slot without a unit computes for callbacks, which are to see an output of their batch.
        counts = has_unit and (output is not None or self._shared.finish_without_gradient())
        if not counts:
            self._logs.forget_unit()
        if output is None:
            return self._output_before()
        self._output = _detached(output)
        return output if has_unit else self._output

    def _output_before(self) -> Any:
        """Returns what `training_step` has returned last, where there is nothing new."""
        return torch.zeros((), device=self.root_device) if self._output is None else self._output

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Asks nothing of other ranks inside, as each computes as many units as it has time for."""
        self._is_in_unit = True
        try:
            with self._logs.metrics.asking_nobody():
                yield
        finally:
            self._is_in_unit = False

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        balancing = self._shared
        if balancing.unit == NONE:
            return closure_loss
        opened(self.session.training).replica.drop_gradients()
        loss = closure_loss if balancing.weight == 1 else closure_loss * balancing.weight
        with self._computing():
            super().backward(loss, optimizer, *args, **kwargs)
        self._first.note = int(self._logs.asks_all_ranks())
        if balancing.finish():
            self._logs.keep_unit()
        else:
            self._logs.forget_unit()
        return closure_loss

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        is_complete = False

        def complete() -> Any:
            nonlocal is_complete
            check_is_first(optimizer, is_first=not is_complete)
            is_complete = True
            output = closure()
            with torch.enable_grad():
                self._compute_the_rest(optimizer)
            return output

        output = super().optimizer_step(optimizer, complete, model, **kwargs)
        self._logs.show(asks_all_ranks=self._first.notes > 0)
        return output

    def before_update(self, optimizer: Optimizer) -> None:
        # All ranks have the same sum, so fp16's scaling overflows on all or on none.
        self.session.before_update(optimizer)

    def _compute_the_rest(self, optimizer: Optimizer) -> None:
        """Computes units until all of the step are finished, and its sum is there."""
        trainer, balancing = self._trainer, self._shared
        while balancing.next_unit() != NONE:
            output = seams.training_step(trainer, balancing.batch())
            loss = output["loss"] if isinstance(output, Mapping) else output
            seams.backward(trainer, loss / trainer.accumulate_grad_batches, optimizer)

    # ---- logs of a step ----

    def on_train_start(self) -> None:
        super().on_train_start()
        self._logs = StepLogs(self._trainer, self.session)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self._is_in_unit:
            return tensor  # after the step, over all units of it
        return super().reduce(tensor, group, reduce_op)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._check_is_between_units("a barrier")
        super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._check_is_between_units("a broadcast")
        return super().broadcast(obj, src)

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._check_is_between_units("all_gather")
        gathered: Tensor = super().all_gather(tensor, *args, **kwargs)
        return gathered

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self._check_is_between_units("a decision of all ranks")
        return bool(super().reduce_boolean_decision(decision, all))

    def _check_is_between_units(self, what: str) -> None:
        if self._is_in_unit and self.world_size > 1:
            raise ValueError(
                "ranks compute different numbers of micro-batches, so training_step and the hooks "
                f"of a backward pass must not wait for all ranks, got {what} there with "
                'strategy="balanced"; do that in on_train_batch_end, or use strategy="allreduce" '
                'or "ddp"'
            )

    @property
    def _first(self) -> Any:
        """The algorithm of the replica's first part."""
        return opened(self.session.training).replica.parts[0].algorithm

    def end_epoch(self) -> None:
        super().end_epoch()
        self._logs.end_epoch()

    # ---- the end ----

    def teardown(self) -> None:
        super().teardown()
        self._balancing = self._loader = self._output = None


@keywords.lists(TrainerOptions)
class BalancedStrategy(BalancedMixin, DecentralizedStrategy):
    __doc__ = BalancedMixin.__doc__


class BalancedLoader(StandIn):
    """What Lightning's loop reads: as many batches as DDP's rank has.

    Args:
        source: the loader that Lightning has prepared for this rank
        num_slots: how many batches the rank with the most has
        slots: yields an epoch's batches
    """

    def __init__(self, source: Any, num_slots: int, slots: Callable[[], Iterator[Any]]) -> None:
        super().__init__(source)
        self._num_slots, self._slots = num_slots, slots
        self._units: UnitLoader | None = None

    def __len__(self) -> int:
        return self._num_slots

    def __iter__(self) -> Iterator[Any]:
        return self._slots()

    def units(self, rank: int) -> UnitLoader:
        """Returns what loads the units of this loader's batches."""
        if self._units is None:
            self._units = UnitLoader(self.source, rank)
        return self._units

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: how far the epoch is stands in the Trainer's own progress."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes nothing over."""


def _detached(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.detach()
    return {k: v.detach() if isinstance(v, Tensor) else v for k, v in output.items()}


def _check_is_one(given: Any, loader: BalancedLoader) -> None:
    if given is not loader:
        raise ValueError(
            f"ranks share the micro-batches of one loader, got a {type(given).__name__} of loaders "
            'with strategy="balanced"; return one DataLoader, of a dataset that holds the samples '
            'of all of them, or use strategy="allreduce" or "ddp"'
        )


def _check_trainer(trainer: Any) -> None:
    if not trainer.lightning_module.automatic_optimization:
        raise ValueError(
            "ranks share the micro-batches of a step that Lightning makes, got a module with "
            'automatic_optimization=False and strategy="balanced"; use strategy="allreduce" or '
            '"ddp"'
        )
    if seams.fetches_itself(trainer.lightning_module):
        raise ValueError(
            "training_step must be given its micro-batch, as ranks share them, got "
            'training_step(dataloader_iter) with strategy="balanced"; use training_step(batch, '
            'batch_idx), or strategy="allreduce" or "ddp"'
        )
