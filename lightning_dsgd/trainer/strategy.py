"""The algorithms as Lightning strategies: Lightning's hooks, and nothing else.

One optimizer step, and what is done where:

    closure: forward, zero_grad, backward, [fp16: unscale]
    on_before_optimizer_step    `Hooks`, the first callback    session.before_update
    clipping, optimizer.step
    return of optimizer_step                                   session.after_update

And at the end:

    on_train_end of `Hooks`        all ranks hold the consensus      session.end_training
    ... of callbacks, of the module: they may change it, as averages over time do
    on_train_end of the strategy   what differs becomes its mean     session.end_alike

`DecentralizedStrategy` is Lightning's DDPStrategy without its wrapper: launcher, process group,
samplers and devices are Lightning's.  What it takes away, and why:

- the broadcast before every batch, and the one inside the SIGTERM handler: they would make every
  algorithm wait for rank 0 in every step (`stopping.AgreedBatch` does their work, and `clock` that
  of the callbacks that would ask rank 0 for the time after every batch);
- `barrier`, `reduce` and the boolean decisions travel on channels of our own, and first let the
  algorithm serve ranks that are still training: a rank that waits at the end of its epoch must not
  stop others;
- a step's `self.log(..., sync_dist=True)` stays local, with a warning, unless the algorithm waits
  for all ranks in every step anyway.

`DecentralizedMixin` is the strategy for both of Lightning's packages; `pytorch_lightning`'s class
is in `lightning_dsgd.pytorch_lightning`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Unpack

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_dsgd import keywords
from lightning_dsgd.algorithm import Algorithm, Conditions
from lightning_dsgd.data.loaders import has_indices
from lightning_dsgd.data.workers import spare_workers
from lightning_dsgd.replica.flat import Whole
from lightning_dsgd.replica.replica import Replica
from lightning_dsgd.session import notices, options
from lightning_dsgd.session.checkpoint import record
from lightning_dsgd.session.phases import Phase
from lightning_dsgd.session.scaling import agree_on_overflow
from lightning_dsgd.session.stopping import AgreedBatch
from lightning_dsgd.trainer import claimed, joint, refusals, seams
from lightning_dsgd.trainer.arguments import TrainerOptions
from lightning_dsgd.trainer.checkpoints import CheckpointsMixin
from lightning_dsgd.trainer.claimed import ClaimedEpochs, TrainerClaiming
from lightning_dsgd.trainer.clock import Clock
from lightning_dsgd.trainer.collectives import CollectivesMixin
from lightning_dsgd.trainer.joint import JointEpochs
from lightning_dsgd.trainer.sessions import TrainerSession, TrainerTraining
from lightning_dsgd.transport import Transport


class DecentralizedMixin(CheckpointsMixin, CollectivesMixin):
    """Trains with an algorithm that does not wait for everyone at every step.

    Args:
        algorithm: how the ranks learn from one another, or its name
        **given: the options in `TrainerOptions`
    """

    _table: type[TrainerOptions] = TrainerOptions
    _takes_units: ClassVar[bool] = False

    def __init__(self, algorithm: Algorithm | str, **given: Unpack[TrainerOptions]) -> None:
        super().__init__(algorithm, self._table, given)
        refusals.check_units(self.algorithm, takes_units=self._takes_units)
        self._data = self.in_force.get("data", "equal")
        self.session = self._new_session()
        self._claiming: TrainerClaiming | None = None
        self._trainer: Any = None
        self._hooks = Hooks(self)
        self._resumes_own, self._random_states = False, None
        self._handed_over = None

    # ---- set-up ----

    def setup_environment(self) -> None:
        self._resumes_own, self._random_states = False, None
        self.session.ranks.check_unchanged()
        self.session = self._new_session()
        self._processes.become_rank()
        super().setup_environment()
        self.algorithm.check(self.num_replicas, self._conditions())
        ranks, chosen = self.session.ranks, self.in_force
        ranks.check(self.algorithm, self.num_replicas, self.root_device)
        self.session.open(ranks.open_network(self._open_network))
        ranks.check_alike(options.describe(self.algorithm, chosen))
        if self.lightning_module is not None:
            refusals.check_searches(self.lightning_module.trainer, self.algorithm)

    def _open_network(self) -> Transport:
        """Meets the other ranks, and opens the network."""
        return self._opening.open_network(self.world_size, self.root_device)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Takes the others' state on a newcomer that has built its model and optimizers."""
        return not self.session.takes_part or super().restore_checkpoint_after_setup

    def _new_session(self) -> TrainerSession:
        ranks = options.ranks_of(self.in_force, self._opening, "trainer.TrainerFace")
        session = TrainerSession(self._processes, ranks)
        session.samples = options.samples_of(self.in_force, lambda: self.optimizers)
        return session

    @property
    def num_replicas(self) -> int:
        """How many copies of the model there are."""
        return int(self.world_size)

    @property
    def _is_training(self) -> bool:
        """Whether loaders are prepared for training, and not before it to estimate its steps."""
        return self._trainer is not None and bool(self._trainer.training)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self._claiming is not None and self._is_training:
            return {"num_replicas": 1, "rank": 0}
        first: dict[str, Any] = super().distributed_sampler_kwargs
        return self.session.ranks.share(first)

    def process_dataloader(self, dataloader: Any) -> Any:
        loader = super().process_dataloader(dataloader)
        if self._trainer is not None:
            spare_workers(loader, partial(seams.seed_workers, self._trainer))
        if self._is_training and not has_indices(loader):
            self.session.reads_indices = False
        if self._claiming is None or not self._is_training:
            return loader
        return self._claiming.take(loader)

    def _conditions(self) -> Conditions:
        samples = self.session.samples
        return Conditions(
            self.ranks_on_node,
            skips_overflow=self._scaler is not None,
            claims_batches=self._data == "claimed",
            samples=None if samples is None else samples.newest,
        )

    @property
    def _scaler(self) -> Any:
        """The object that scales the loss for fp16, if there is one."""
        return getattr(self.precision_plugin, "scaler", None)

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._join(self._trainer_state(), self.world_size // self.num_replicas)
        super().setup_distributed()  # which finds the process group there
        if not self.session.takes_part:
            seams.be_silent()

    def setup(self, trainer: Any) -> None:
        self._trainer = trainer
        is_fitting = trainer.state.fn == "fit"
        if is_fitting:
            self.check_number_of_processes()
            refusals.check_trainer(trainer, self.algorithm)
            if self.session.ranks.go_on:
                refusals.check_may_be_lost(trainer)
            if self._layer_sync is not None:
                refusals.check_sync_batchnorm(self.algorithm, self.root_device)
        self._claiming = self._claim(trainer) if is_fitting and self._data == "claimed" else None
        if is_fitting and (self._takes_units or self._claiming is not None):
            seams.forget_loader(trainer)  # if a hook has asked for its length: it is no stand-in
        super().setup(trainer)
        trainer.callbacks.insert(0, self._hooks)
        joint.take_validation_data(trainer, partial(refusals.check_validation_data, self.session))
        self.session.take_signals(trainer)
        if is_fitting:
            self.session.signals.take_sigint()
            self.session.clip = partial(seams.clip, trainer)
            self.session.training = self._set_up_training(trainer)
            state = self.session.ranks.join()
            if state is not None:
                self._random_states = state["random_states"]
                self._handed_over = state["checkpoint"]
                seams.restore_from(trainer, self._handed_over)

    def _check_algorithm(self, algorithm: Algorithm) -> None:
        """Raises `ValueError` for an algorithm with which this Trainer cannot fit."""
        refusals.check_trainer(self._trainer, algorithm)
        if self._layer_sync is not None:
            refusals.check_sync_batchnorm(algorithm, self.root_device)

    def configure_ddp(self) -> None:
        """Does not wrap the model: the algorithm does what DDP's wrapper does."""

    def _set_up_training(self, trainer: Any) -> TrainerTraining:
        net = self.session.net
        options.check_optimizers(self.optimizers, self.world_size, self._scaler, self.algorithm)
        replica = self._make_replica(trainer, *self._lay_out(trainer, net.sub("replica")))
        if not self._resumes_own and self.session.takes_part:
            replica.synchronize()
        claims, is_there = self._claiming is not None, self.session.takes_part
        agreed = AgreedBatch(net.sub("stop"), serves=is_there, is_of_each=claims)
        seams.ask_nobody_for_sigterm(trainer)
        begin = self.check_numbers_of_batches
        if self._claiming is None:
            epochs = JointEpochs(self.session, trainer, begin)
        else:
            epochs = ClaimedEpochs(self.session, trainer, begin, self._claiming)
            if is_there:
                self._claiming.open(net.sub("claims"))
        clock = Clock(trainer, agreed, lambda: epochs.are_apart)
        return TrainerTraining(
            self.algorithm,
            replica,
            agreed,
            trainer,
            clock,
            epochs,
            claiming=self._claiming,
        )

    def _claim(self, trainer: Any) -> TrainerClaiming:
        """Returns what claims this rank's batches."""
        claimed.check_trainer(trainer, self.algorithm.name)
        is_newcomer = not self.session.takes_part
        return TrainerClaiming(self.session, trainer, self.world_size, is_newcomer=is_newcomer)

    def _lay_out(self, trainer: Any, net: Transport) -> tuple[Transport, Whole, Transport | None]:
        """Returns how replicas lie on ranks: their network, the layout, all ranks' network."""
        return net, Whole(), None

    def _make_replica(
        self, trainer: Any, net: Transport, layout: Whole, everyone: Transport | None
    ) -> Replica:
        return self.session.ranks.make_replica(
            net,
            trainer.lightning_module,
            self.optimizers,
            self.algorithm,
            self._conditions(),
            average_buffers=self.in_force["average_buffers"],
            check_finite=self.in_force["check_finite"] or seams.detects_anomalies(trainer),
            layout=layout,
            everyone=everyone,
        )

    # ---- training ----

    def on_train_start(self) -> None:
        self.session.begin_training()
        num_steps = seams.num_steps_planned(self._trainer)
        notices.tell(self.session, rank_zero_info, num_steps, self._check_algorithm)
        if self._random_states is not None:
            # The loader has drawn the seed of its epoch, as it had before the save.
            record.restore_random_states(self._random_states)
            self._random_states = None

    def before_update(self, optimizer: Optimizer) -> None:
        self.session.before_update(optimizer)
        training = self.session.training
        if (
            self._scaler is not None
            and training is not None
            and training.algorithm.traits.uses_gradient
        ):
            agree_on_overflow(self._scaler, optimizer, training.replica.parts)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self.session.after_update(optimizer)
        return output

    def end_epoch(self) -> None:
        self.session.end_epoch()
        # torchmetrics asks the other ranks by itself, and a rank that waits there serves nobody.
        if any(isinstance(m, Metric) for m in self._trainer.lightning_module.modules()):
            self.session.meet()  # on every rank, also on one that has not updated its metric

    def check_numbers_of_batches(self) -> None:
        training = self.session.training
        if training is not None and self.session.takes_part:
            training.is_uneven = refusals.check_numbers_of_batches(self.session, self.algorithm)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self.in_force["evaluate"] == "consensus":
            self.session.show_consensus()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self.session.show_own()

    # ---- the end ----

    def on_train_end(self) -> None:
        super().on_train_end()
        self.session.end_alike()
        self.session.ranks.end_leaver()
        self.session.signals.give_back()

    def teardown(self) -> None:
        if self.session.is_fork:
            return
        if self._trainer is not None:
            self._give_back(self._trainer)
        self.session.leave()
        if self.session.phase is Phase.BROKEN:
            self._processes.end_children()
        elif self.session.phase is Phase.STOPPING:
            self._processes.await_stop()
        super().teardown()

    def _give_back(self, trainer: Any) -> None:
        """Takes all hooks out of the trainer."""
        if self._hooks in trainer.callbacks:
            trainer.callbacks.remove(self._hooks)
        seams.give_back(trainer)
        joint.give_back(trainer)
        if self.session.training is not None:
            self.session.training.clock.give_back()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self.fail(exception)  # if that was raised before the hooks were in their place

    # ---- figures ----

    @property
    def consensus_distance(self) -> float | None:
        """The ranks' distance from their mean at the last evaluation, relative to its norm."""
        return self.session.consensus_distance


class Hooks(pl.Callback):
    """Tells a strategy of the Trainer's hooks, before all other callbacks."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._strategy.before_update(optimizer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        self._strategy.session.begin_batch(batch)

    def on_train_batch_end(self, *args: Any) -> None:
        session = self._strategy.session
        session.end_batch()
        for what, detail in session.training.agreed.take_due():
            session.do_together(what, detail)

    def on_train_epoch_end(self, *args: Any) -> None:
        self._strategy.end_epoch()

    def on_train_end(self, *args: Any) -> None:
        self._strategy.session.end_training()

    def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._strategy.session.check_peers()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._strategy.fail(exception)
        session = self._strategy.session
        if session.phase is Phase.STOPPING:
            session.training.epochs.before_stop()


@keywords.lists(TrainerOptions)
class DecentralizedStrategy(DecentralizedMixin, DDPStrategy):
    __doc__ = DecentralizedMixin.__doc__
