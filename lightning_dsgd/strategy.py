"""The algorithms as Lightning strategies: the only file that knows Lightning's hooks.

One optimizer step, and what is done where:

    closure: forward, zero_grad, backward, [fp16: unscale]
    on_before_optimizer_step    _Hooks, the first callback     replica.before_update
    clipping, optimizer.step
    return of optimizer_step                                   replica.after_update

`DecentralizedStrategy` is Lightning's DDPStrategy without its wrapper: launcher, process group,
samplers and devices are Lightning's.  What it takes away, and why:

- the broadcast before every batch, and the one inside the SIGTERM handler: they would make every
  algorithm wait for rank 0 in every step (`stopping.AgreedStop` does their work);
- `barrier`, `reduce` and the boolean decisions travel on channels of our own, and first let the
  algorithm serve ranks that are still training: a rank that waits at the end of its epoch must not
  stop others;
- a step's `self.log(..., sync_dist=True)` stays local, with a warning, unless the algorithm waits
  for all ranks in every step anyway.

Built twice, for `lightning` and for `pytorch_lightning`, which are two packages with two
registries.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn

import lightning.pytorch
import pytorch_lightning
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torchmetrics import Metric

from lightning_dsgd import checkpoint as files
from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms.adpsgd import ADPSGD
from lightning_dsgd.algorithms.allreduce import AllReduce
from lightning_dsgd.algorithms.dpsgd import DPSGD
from lightning_dsgd.algorithms.eager_sgd import EagerSGD
from lightning_dsgd.algorithms.hpsgd import HPSGD
from lightning_dsgd.algorithms.local_sgd import LocalSGD
from lightning_dsgd.algorithms.no_sync import NoSync
from lightning_dsgd.algorithms.oktopk import OkTopk
from lightning_dsgd.algorithms.popsgd import PopSGD
from lightning_dsgd.algorithms.sgp import SGP
from lightning_dsgd.algorithms.sparse_baselines import GaussianTopk, GTopk, TopkAllgather, TopkDSA
from lightning_dsgd.algorithms.wagma import WAGMA
from lightning_dsgd.replica import Replica, by_rank, everyones
from lightning_dsgd.stopping import AgreedStop
from lightning_dsgd.transport import PeerLost, TransportError
from lightning_dsgd.transport.mpi import MPITransport, check_launch, is_usable
from lightning_dsgd.transport.process_group import ProcessGroupTransport

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object

_ENDS: Final = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a training; another is SLURM's, which wants it saved and requeued."""
_NOTICE_WITHIN_S: Final = 15.0
"""How long a training thread may take to notice a loss before its process is ended."""
_CHILDREN_END_WITHIN_S: Final = 10.0
_POLL_CHILDREN_S: Final = 0.05
_ALIKE_WITHIN_S: Final = 1.0
"""How long a rank that fails before training waits to see whether all do."""

_NOT_OURS: Final = {
    "find_unused_parameters": "unused parameters need no search here: leave the option out",
    "static_graph": "there is no DDP wrapper to tell: leave the option out",
    "gradient_as_bucket_view": "there are no buckets: leave the option out",
    "bucket_cap_mb": "there are no buckets: leave the option out",
    "broadcast_buffers": 'use average_buffers, or strategy="ddp"',
    "ddp_comm_state": 'communication hooks belong to strategy="ddp"',
    "ddp_comm_hook": 'communication hooks belong to strategy="ddp"',
    "ddp_comm_wrapper": 'communication hooks belong to strategy="ddp"',
    "model_averaging_period": 'use strategy="local_sgd" with sync_period',
    "sharding_strategy": 'weights are replicated here: use strategy="fsdp" to shard them',
    "auto_wrap_policy": 'weights are replicated here: use strategy="fsdp" to shard them',
    "cpu_offload": 'weights stay on their device here: use strategy="fsdp" to offload them',
    "state_dict_type": 'this is an option of strategy="fsdp"',
    "stage": 'weights are replicated here: use strategy="deepspeed" to shard them',
    "zero_optimization": 'weights are replicated here: use strategy="deepspeed" to shard them',
    "offload_optimizer": 'this is an option of strategy="deepspeed"',
    "config": 'this is an option of strategy="deepspeed"',
}
"""Options of other strategies, and the way out."""

_OWN: Final = (
    "transport", "timeout_s", "heartbeat_timeout_s", "evaluate", "average_buffers", "check_finite",
)  # fmt: skip
_LIGHTNINGS: Final = frozenset(
    [
        "accelerator",
        "parallel_devices",
        "cluster_environment",
        "checkpoint_io",
        "precision_plugin",
        "process_group_backend",
        "timeout",
        "start_method",
    ]
)


class DecentralizedMixin(_Base):
    """Trains with an algorithm that does not wait for everyone at every step.

    Args:
        algorithm: how the ranks learn from one another
        transport: "mpi", "process_group", or "auto", which takes MPI where mpiexec or srun has
            started the ranks as one MPI world that mpi4py can join
        timeout_s: how long a rank waits for another before it gives up
        heartbeat_timeout_s: after how much silence a rank counts as lost
        evaluate: "consensus" validates, tests and monitors the weights that all ranks agree on;
            "local" each rank's own
        average_buffers: whether BatchNorm statistics are averaged with the weights; else rank 0's
            are evaluated and saved
        check_finite: looks for NaN and inf in gradients and weights before they are sent; one more
            pass
        **kwargs: what Lightning's own strategies take: cluster_environment, checkpoint_io,
            precision_plugin, process_group_backend, timeout, start_method
    """

    def __init__(
        self,
        algorithm: Algorithm,
        transport: str = "auto",
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 20.0,
        evaluate: str = "consensus",
        average_buffers: bool = True,
        check_finite: bool = False,
        **kwargs: Any,
    ) -> None:
        _check_options(type(self).__name__, algorithm, kwargs)
        _check_choice("transport", transport, ("auto", "process_group", "mpi"))
        _check_choice("evaluate", evaluate, ("consensus", "local"))
        _check_seconds("timeout_s", timeout_s, 1800)
        _check_seconds("heartbeat_timeout_s", heartbeat_timeout_s, 20)
        super().__init__(**kwargs)
        self.algorithm = algorithm
        self._transport = transport
        self._timeout_s = timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._evaluate = evaluate
        self._average_buffers = average_buffers
        self._check_finite = check_finite
        self._trainer: Any = None
        self._net: ProcessGroupTransport | None = None
        self._lightning_net: ProcessGroupTransport | None = None
        self._replica: Replica | None = None
        self._stop: AgreedStop | None = None
        self._hooks: Any = None
        self._in_batch = False
        self._in_training = False
        self._is_broken = False
        self._is_stopping = False
        self._is_uneven = False
        self._awaits_children = False
        self._last_resort: threading.Timer | None = None
        self._has_own_replica = False
        self._random_states: dict[str, Any] | None = None
        self._warned_of_local_logs = False
        self._original_sigint: Any = None
        self.consensus_distance: float | None = None
        """Of the last evaluation: the ranks' distance from their mean, relative to its norm."""

    # ---- set-up ----

    def setup_environment(self) -> None:
        self._is_broken = self._is_stopping = self._has_own_replica = False
        if self._children() and not self._awaits_children:
            self._awaits_children = True
            atexit.register(self._await_children, os.getpid())
        super().setup_environment()
        self.algorithm.check(self.world_size)
        self._random_states = None
        self._net = self._open_network()
        self._net.on_lost(self._await_notice)
        self._lightning_net = self._net.sub("lightning")
        self._check_alike(self._lightning_net)

    def _configure_launcher(self) -> None:
        # The first hook that knows the devices, and the last before a launcher could start ranks.
        check_launch(self.cluster_environment, self.num_nodes, self.num_processes)
        super()._configure_launcher()

    def _open_network(self) -> ProcessGroupTransport:
        takes_mpi = self._transport == "mpi" or (
            self._transport == "auto" and is_usable(self.world_size)
        )
        transport = MPITransport if takes_mpi else ProcessGroupTransport
        return transport(timeout_s=self._timeout_s, heartbeat_timeout_s=self._heartbeat_timeout_s)

    def _check_alike(self, net: ProcessGroupTransport) -> None:
        """Raises, on every rank, if not all have the same algorithm and options."""
        options = {
            **self.algorithm.hyperparameters(),
            "evaluate": self._evaluate,
            "average_buffers": self._average_buffers,
        }
        listed = ", ".join(f"{name}={value!r}" for name, value in options.items())
        mine = f'strategy="{self.algorithm.name}" with {listed}'
        texts = everyones(net, re.sub(" at 0x[0-9a-f]+", "", mine))
        if len(set(texts)) > 1:
            raise ValueError(
                f"the strategy must be the same on all ranks, got {by_rank(texts)}; give every "
                "rank the same arguments"
            )

    def setup(self, trainer: Any) -> None:
        self._trainer = trainer
        is_fitting = trainer.state.fn == "fit"
        if is_fitting:
            self._check_configuration(trainer)
        super().setup(trainer)
        self._hooks = _Hooks(self)
        trainer.callbacks.insert(0, self._hooks)
        trainer._signal_connector._sigterm_notifier_fn = self._on_sigterm
        trainer._signal_connector._slurm_sigusr_handler_fn = self._on_requeue
        if is_fitting:
            self._set_up_training(trainer)

    def configure_ddp(self) -> None:
        """Does not wrap the model: the algorithm does what DDP's wrapper does."""

    def _set_up_training(self, trainer: Any) -> None:
        assert self._net is not None
        assert self.lightning_module is not None
        self._check_optimizers()
        scaler = getattr(self.precision_plugin, "scaler", None)
        self.algorithm.skips_overflow = scaler is not None
        self._replica = Replica(
            self._net.sub("replica"),
            self.lightning_module,
            self.optimizers,
            self.algorithm,
            average_buffers=self._average_buffers,
            check_finite=self._check_finite or bool(trainer._detect_anomaly),
        )
        if not self._has_own_replica:
            self._replica.synchronize()
        self._stop = AgreedStop(self._net.sub("stop"))
        # Lightning broadcasts here before every batch; older versions have no such method.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None

    def _check_configuration(self, trainer: Any) -> None:
        name = self.algorithm.name
        plugin = type(self.precision_plugin).__name__
        if "FSDP" in plugin or "DeepSpeed" in plugin:
            raise ValueError(
                f"the precision plugin must work on whole parameters, got {plugin} with "
                f'strategy="{name}"; use precision="16-mixed" or "bf16-mixed"'
            )
        processes = self.num_nodes * self.num_processes
        if self.world_size != processes:
            raise ValueError(
                f"each device needs a process of its own, got {self.world_size} processes for "
                f"devices={self.num_processes} and num_nodes={self.num_nodes}; start {processes} "
                "processes, or set devices and num_nodes so that their product is "
                f"{self.world_size}"
            )
        if self._layer_sync is not None:
            self._check_sync_batchnorm()
        for callback in trainer.callbacks:
            if _is_a("LearningRateFinder", callback):
                raise ValueError(
                    "a learning rate must be searched on one device, got "
                    f'{type(callback).__name__} with strategy="{name}"; search with '
                    "Trainer(devices=1), then train with what was found"
                )
        if getattr(trainer, "_val_check_time_interval", None) is not None:
            raise ValueError(
                "ranks must evaluate after the same batch, got val_check_interval as a time, which "
                f'every rank measures by itself, with strategy="{name}"; use a number of batches'
            )
        if self.algorithm.lockstep:
            return
        for callback in trainer.callbacks:
            if getattr(callback, "_train_time_interval", None) is not None:
                raise ValueError(
                    "ModelCheckpoint must not ask rank 0 for the time after every batch, got "
                    f'train_time_interval with strategy="{name}"; use every_n_train_steps'
                )
            if _is_a("Timer", callback):
                raise ValueError(
                    "callbacks must not ask rank 0 after every batch, got "
                    f"{type(callback).__name__} or Trainer(max_time=...), which makes one, with "
                    f'strategy="{name}"; use Trainer(max_steps=...)'
                )

    def _check_sync_batchnorm(self) -> None:
        got = f'got sync_batchnorm=True with strategy="{self.algorithm.name}"'
        way_out = (
            "leave it out (BatchNorm statistics are averaged when the model is evaluated and saved)"
        )
        if not self.algorithm.lockstep:
            raise ValueError(
                f"sync_batchnorm must be off where ranks do not step together, {got}; {way_out}, "
                'or, on GPUs, use strategy="allreduce"'
            )
        if self.root_device.type == "cpu":
            raise ValueError(
                "sync_batchnorm must be off on CPUs, for which torch has no SyncBatchNorm, "
                f"{got}; {way_out}"
            )

    def _check_optimizers(self) -> None:
        scaler = getattr(self.precision_plugin, "scaler", None)
        for optimizer in self.optimizers:
            if isinstance(optimizer, LBFGS) and self.world_size > 1:
                raise ValueError(
                    "the optimizer must compute one gradient a step, got LBFGS, whose number of "
                    "gradients differs between ranks; use SGD or Adam"
                )
            if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
                raise ValueError(
                    'with precision="16-mixed" gradients must be unscaled before the step, got '
                    f"a fused {type(optimizer).__name__}; use fused=False"
                )

    def check_numbers_of_batches(self) -> None:
        """Raises, on every rank, where ranks with different numbers of batches wait for each other.

        They may have them, but then they must evaluate and save as often as each other.
        """
        assert self._lightning_net is not None
        trainer = self._trainer
        texts = everyones(self._lightning_net, f"{trainer.num_training_batches} batches an epoch")
        self._is_uneven = len(set(texts)) > 1
        if not self._is_uneven:
            return
        got = f'got {by_rank(texts)}, with strategy="{self.algorithm.name}" and'
        assert self._replica is not None
        assert self._net is not None
        parts = self._replica.parts
        if len(parts) > 1 and self._net.is_native(self.root_device):
            raise ValueError(
                "torch's collectives need the same order on all ranks, and ranks that have run out "
                f"of batches do not know in which the others go on, {got} {len(parts)} optimizers "
                'or dtypes of parameters; use transport="mpi", or give every rank as many batches'
            )
        for callback in trainer.checkpoint_callbacks:
            every = getattr(callback, "_every_n_train_steps", 0)
            if every:
                raise ValueError(
                    "ranks must save as often as each other, "
                    f"{got} every_n_train_steps={every}; use every_n_epochs, or give every rank "
                    "as many batches"
                )
        if not trainer.enable_validation:
            return
        interval = trainer.val_check_interval
        if isinstance(interval, int) and interval != 1:
            raise ValueError(
                f"ranks must evaluate as often as each other, {got} val_check_interval={interval}; "
                "use a fraction of an epoch or check_val_every_n_epoch, or give every rank as many "
                "batches"
            )
        epochs = everyones(self._lightning_net, str(self._num_whole_epochs()))
        if len(set(epochs)) > 1:
            raise ValueError(
                f"ranks must evaluate as often as each other, {got} max_steps={trainer.max_steps}, "
                f"which are {by_rank([f'{epoch} whole epochs' for epoch in epochs])}; use "
                "max_epochs, or give every rank as many batches"
            )

    def _num_whole_epochs(self) -> int | None:
        """How often this rank gets to the end of its epoch; None: until others stop it."""
        trainer = self._trainer
        is_bounded = trainer.max_epochs is not None and trainer.max_epochs >= 0
        most = int(trainer.max_epochs) if is_bounded else None
        if trainer.max_steps < 0:
            return most
        steps = trainer.num_training_batches / trainer.accumulate_grad_batches
        num_epochs = 0 if math.isinf(steps) else trainer.max_steps // max(1, math.ceil(steps))
        return num_epochs if most is None else min(num_epochs, most)

    # ---- a step ----

    def begin_batch(self) -> None:
        """Stops here, as every rank does at the same batch, if one of them was told to."""
        assert self._net is not None
        self._net.check()
        self._in_batch = False
        if self._stop is not None and not self._stop.may_begin_batch():
            self._settle(is_stopping=True)
        self._in_batch = True

    def end_batch(self) -> None:
        self._in_batch = False

    def end_epoch(self) -> None:
        """Serves the others until all are here, where a torchmetrics object will ask them.

        For it asks them by itself, and a rank that waits there serves nobody.
        """
        self.end_batch()  # if a batch was skipped with the rest of its epoch
        assert self.lightning_module is not None
        if any(isinstance(module, Metric) for module in self.lightning_module.modules()):
            self._settle()  # on every rank, also on one that has not updated its metric

    def check_peers(self) -> None:
        if self._net is not None:
            self._net.check()

    def before_update(self, optimizer: Optimizer) -> None:
        assert self._replica is not None
        self._replica.before_update(optimizer)
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None and self.algorithm.uses_gradient:
            self._agree_on_overflow(scaler, optimizer)

    def _agree_on_overflow(self, scaler: Any, optimizer: Optimizer) -> None:
        """One rank's inf has reached all with the reduced gradient: all skip the step together."""
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        finite = all(bool(grad.isfinite().all()) for grad in grads if grad is not None)
        for flag in found.values():
            flag.fill_(0.0 if finite else 1.0)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self._replica is not None
        self._replica.after_update(optimizer)
        return output

    # ---- evaluation and the end ----

    def on_train_start(self) -> None:
        self._in_training = True
        if self._random_states is not None:
            # The loader has drawn the seed of its epoch, as it had before the save.
            files.restore_random_states(self._random_states)
            self._random_states = None
        if threading.current_thread() is threading.main_thread():
            self._original_sigint = signal.signal(signal.SIGINT, self._on_sigint)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._replica is not None and self._evaluate == "consensus":
            self._settle()
            self._replica.show_consensus()
            self.consensus_distance = self._replica.consensus_distance

    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self._replica is not None:
            self._replica.show_own()

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._replica is not None and self._stop is not None and not self._is_broken:
            self._settle(is_stopping=self._stop.is_asked)
            self._in_training = False
            if self._stop.requested in _ENDS:  # since: the others may know, or may not
                self._interrupt(self._stop.requested, f"rank {self.global_rank} received")
            self._replica.finish()
        self._restore_sigint()

    def teardown(self) -> None:
        self._in_training = self._in_batch = False
        if self._trainer is not None:
            self._give_back(self._trainer)
        try:
            self._leave()
        finally:
            self._restore_sigint()
        if self._is_broken:
            self._end_children()
        super().teardown()

    def _leave(self) -> None:
        """Ends what runs beside the training, once all ranks are here or one is lost."""
        replica, self._replica = self._replica, None
        stop, self._stop = self._stop, None
        net = self._net
        try:
            if net is not None and not self._is_broken:
                net.barrier().wait()  # a rank that fails from here on is noticed by its launcher
            for lanes in (replica.stop if replica else None, stop.close if stop else None):
                # In a broken network lanes have failed too, all for the same reason.
                with contextlib.suppress(*[Exception] * self._is_broken):
                    if lanes is not None:
                        lanes()
        except BaseException as exception:
            self.fail(exception)
            raise
        finally:
            self._net = self._lightning_net = None
            if net is not None:
                net.close()
            if self._last_resort is not None:
                self._last_resort.cancel()

    def _give_back(self, trainer: Any) -> None:
        """Leaves the trainer as it was."""
        if self._hooks in trainer.callbacks:
            trainer.callbacks.remove(self._hooks)
        vars(trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)
        for name in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"):
            vars(trainer._signal_connector).pop(name, None)

    # ---- failure ----

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self.fail(exception)  # if that was raised before the hooks were in their place

    def fail(self, exception: BaseException) -> None:
        """This rank will not go on: tells the others why, unless all stop together."""
        if self._is_broken or self._is_stopping:
            return
        self._is_broken = True
        if isinstance(exception, PeerLost):
            _say(f"[rank {self.global_rank}] training ends: {exception}")
        self._quiet_observer()
        net, replica = self._net, self._replica
        if net is not None:
            if not self._in_training and not isinstance(exception, PeerLost) and _all_fail(net):
                net.close()
            else:
                net.fail(self._reason(exception))
        if replica is not None:
            with contextlib.suppress(Exception):  # lanes fail with the network
                replica.stop()

    def _reason(self, exception: BaseException) -> str:
        """What became of this rank, for the others, who put its name before it."""
        if isinstance(exception, KeyboardInterrupt):
            return "was interrupted"
        text = str(exception)
        if isinstance(exception, SystemExit) and "received SIGTERM" in text:
            return text.removeprefix(f"rank {self.global_rank} ")
        return f"failed: {type(exception).__name__}: {text}".removesuffix(": ")

    def _await_notice(self, lost: PeerLost) -> None:
        """The last resort: the training thread may hang in a library that cannot know of it."""
        net = self._net
        if net is not None and net.ends_with_peers:
            _say(f"[rank {self.global_rank}] {lost}")

        def end() -> None:
            if self._net is net and not self._is_broken:
                _say(
                    f"[rank {self.global_rank}] ends: {lost}, and training did not come back to "
                    f"notice within {_NOTICE_WITHIN_S:g} s"
                )
                self._end_children(within_s=0.0)
                os._exit(1)

        self._quiet_observer()
        self._last_resort = threading.Timer(_NOTICE_WITHIN_S, end)
        self._last_resort.daemon = True
        self._last_resort.start()

    def _children(self) -> list[subprocess.Popen[bytes]]:
        return list(getattr(self._launcher, "procs", []))

    def _end_children(self, within_s: float = _CHILDREN_END_WITHIN_S) -> None:
        deadline = time.monotonic() + within_s
        for child in self._children():
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _quiet_observer(self) -> None:
        """Lightning's observer kills this process when a child has died, before it can say why."""
        for thread in threading.enumerate():
            if thread.name == "child-process-observer" and hasattr(thread, "_child_processes"):
                thread._child_processes = []

    def _await_children(self, pid: int) -> None:
        """A job is done when all its ranks are; it has failed when one of them has."""
        if os.getpid() != pid:
            return  # a fork, to which nobody is a child
        self._quiet_observer()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # ends the waits of others for this rank
        children = self._children()
        while any(child.poll() is None for child in children):
            if any(child.returncode for child in children):
                self._end_children()
            time.sleep(_POLL_CHILDREN_S)
        failed = [
            f"rank {rank} with {child.returncode}"
            for rank, child in enumerate(children, 1)
            if child.returncode
        ]
        if failed:
            _say(f"lightning_dsgd: ended badly: {', '.join(failed)}")
            sys.stdout.flush()
            os._exit(1)

    def _on_sigterm(self, signum: int, _: Any) -> None:
        if self._is_broken or self._is_stopping:
            return  # it ends already
        if self._in_training and self._stop is not None and not self._trainer.validating:
            self._stop.request(signum)
        else:
            self._interrupt(signum, f"rank {self.global_rank} received")

    def _on_requeue(self, signum: int, _: Any) -> None:
        """SLURM says that the time is up soon: all stop together, then save and are requeued.

        Lightning would save in the middle of whatever this rank does.
        """
        if self._stop is None:
            _say(f"[rank {self.global_rank}] {signal.Signals(signum).name}: no training to requeue")
        elif not (self._is_broken or self._is_stopping):
            self._stop.request(signum)

    def _requeue(self, signum: int) -> None:
        connector = self._trainer._signal_connector
        type(connector)._slurm_sigusr_handler_fn(connector, signum, None)

    def _interrupt(self, signum: int, begin: str, end: str = "") -> NoReturn:
        text = f"{begin} {signal.Signals(signum).name}{end}"
        if signum == signal.SIGINT:
            raise KeyboardInterrupt(text)
        raise self._exceptions.SIGTERMException(text)

    def _on_sigint(self, signum: int, _: Any) -> None:
        """The first Ctrl-C lets all ranks stop together, the second interrupts at once."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._stop is None or self._trainer.validating:
            raise KeyboardInterrupt
        self._stop.request(signum)

    def _restore_sigint(self) -> None:
        if self._original_sigint is not None:
            signal.signal(signal.SIGINT, self._original_sigint)
            self._original_sigint = None

    @property
    def _exceptions(self) -> Any:
        package = type(self._trainer).__module__.removesuffix(".trainer.trainer")
        return importlib.import_module(f"{package}.utilities.exceptions")

    # ---- Lightning's collectives ----

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._lightning_net is not None and not self._is_broken:
            self._settle()
            self._lightning_net.barrier().wait()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._is_broken:
            return obj
        self._settle()
        with self._blaming("a broadcast"):
            return super().broadcast(obj, src)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if not self._in_batch:
            self._settle()
        with self._blaming("an all_gather"):
            return super().all_gather(tensor, group, sync_grads)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor) or self._is_broken or self._lightning_net is None:
            return tensor
        if self._is_of_a_step():
            if not self.algorithm.lockstep:
                self._warn_of_local_logs()
                return tensor
            if self._is_uneven:
                raise ValueError(
                    "a value of a step must not be asked of ranks that have run out of batches, "
                    "got self.log(..., on_step=True, sync_dist=True) where ranks have different "
                    "numbers of batches; use on_epoch=True, on_step=False"
                )
        return self._reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        # Not by `reduce`: callbacks also decide right after a batch, and all ranks must do the
        # same.
        if self._is_broken or self._lightning_net is None:
            return decision
        votes = int(self._reduce(torch.tensor(int(decision)), None, "sum"))
        return votes == self.world_size if all else votes > 0

    def _is_of_a_step(self) -> bool:
        """Whether what is reduced now belongs to one batch; hooks after it are past `end_batch`."""
        hook = getattr(self.lightning_module, "_current_fx_name", None)
        return self._in_batch or hook == "on_train_batch_end"

    def _reduce(self, tensor: Tensor, group: Any, reduce_op: Any) -> Any:
        assert self._lightning_net is not None
        self._settle()
        op = getattr(reduce_op, "name", str(reduce_op)).lower()
        if op not in ("mean", "avg", "sum") or group is not None:
            with self._blaming("a reduction"):
                return super().reduce(tensor, group, reduce_op)
        is_mean = op != "sum"
        total = (tensor.float() if is_mean and not tensor.is_floating_point() else tensor).clone()
        flat = total.reshape(-1).contiguous()
        self._lightning_net.all_reduce(flat).wait()
        return (flat / self.world_size if is_mean else flat).view(total.shape)

    def _blaming(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._net is None else self._net.blaming(what)

    def _settle(self, *, is_stopping: bool = False) -> None:
        """Serves ranks that still train until all are here; all stop here if one of them has to.

        For a rank that is out of data, and waits at the end of its epoch, never comes to the batch
        at which the others stop.
        """
        if self._replica is None or self._in_batch or self._is_stopping:
            return
        self._replica.settle()
        if self._stop is None or self._lightning_net is None or self._replica.shows_consensus:
            return
        num_stopping = torch.tensor([int(is_stopping)])
        if self._lightning_net.all_reduce(num_stopping).wait():
            self._stop.await_decision()
            self._is_stopping = True
            self._quiet_observer()
            if self._stop.signum not in _ENDS:
                self._requeue(self._stop.signum)
            where = f"rank {self.global_rank} after {self._stop.num_begun} batches"
            begin, end = f"rank {self._stop.origin} received", f"; all ranks stopped, {where}"
            self._interrupt(self._stop.signum, begin, end)

    def _warn_of_local_logs(self) -> None:
        if not self._warned_of_local_logs:
            self._warned_of_local_logs = True
            rank_zero_warn(
                f'strategy="{self.algorithm.name}" does not wait for all ranks in every step, so '
                "self.log(..., on_step=True, sync_dist=True) logs the value of rank 0 alone; "
                "use on_epoch=True for a value over all ranks"
            )

    # ---- checkpoints ----

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if self._replica is None or self._is_broken:
            if self._is_broken and self.is_global_zero:
                rank_zero_warn(
                    f"saving the weights of rank 0 alone to {filepath}: the other ranks are gone"
                )
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        assert self._net is not None
        # Ranks that have made other numbers of steps have other names for it.
        filepath = self.broadcast(filepath)
        mark = {
            "algorithm": self.algorithm.name,
            "hyperparameters": self.algorithm.hyperparameters(),
        }
        shared = {**self._replica.consensus(checkpoint), files.KEY: mark}
        own = None
        if "optimizer_states" in checkpoint:
            own = {
                **self._replica.own(checkpoint),
                files.KEY: {
                    **mark,
                    "algorithms": self._replica.state_dict(),
                    "parameters": self._replica.names(),
                    "random_states": files.random_states(),
                },
            }
        assert self._lightning_net is not None
        files.save(self.checkpoint_io, self._lightning_net, filepath, shared, own, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            files.remove(self.checkpoint_io, filepath)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint_path = self.broadcast(checkpoint_path)  # as it was when it was saved
        shared: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn != "fit":
            return shared
        assert self._lightning_net is not None
        files.check_algorithm(shared, checkpoint_path, self.algorithm.name)
        own, reason = files.load_replica(
            self.checkpoint_io, self._lightning_net, checkpoint_path, shared, weights_only
        )
        self._has_own_replica = own is not None
        if own is None:
            rank_zero_info(f"All ranks start from the one model in {checkpoint_path}: {reason}.")
            return shared
        return own

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self._has_own_replica and self._replica is not None:
            own = checkpoint[files.KEY]
            self._replica.load_state_dict(own["algorithms"], own["parameters"])
            states = own["random_states"]
            files.restore_random_states(states)
            if files.is_within_epoch(checkpoint):
                self._random_states = states

    # ---- figures ----

    def communication(self) -> dict[str, float]:
        """What was sent and waited for so far, by this rank, and the algorithm's own figures."""
        assert self._net is not None
        counters = self._net.counters
        hidden = 1 - counters.wait_s / counters.comm_s if counters.comm_s > 0 else 1.0
        figures = {
            "bytes_sent": float(counters.bytes_sent),
            "messages_sent": float(counters.messages_sent),
            "wait_s": counters.wait_s,
            "comm_overlap": max(0.0, hidden),
        }
        if self.consensus_distance is not None:
            figures["consensus_distance"] = self.consensus_distance
        return figures | (self._replica.metrics() if self._replica is not None else {})

    def gather_figures(self, figures: dict[str, float]) -> list[dict[str, float]]:
        """Those of every rank, by rank; to be called between steps, by all ranks."""
        assert self._lightning_net is not None
        self._settle()
        return [json.loads(text) for text in everyones(self._lightning_net, json.dumps(figures))]


class _Hooks(lightning.pytorch.Callback):
    """The first of the trainer's callbacks: where strategies have no hook of their own."""

    def __init__(self, strategy: DecentralizedMixin) -> None:
        self._strategy = strategy

    def on_train_start(self, *args: Any) -> None:
        self._strategy.check_numbers_of_batches()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._strategy.before_update(optimizer)

    def on_train_batch_start(self, *args: Any) -> None:
        self._strategy.begin_batch()

    def on_train_batch_end(self, *args: Any) -> None:
        self._strategy.end_batch()

    def on_train_epoch_end(self, *args: Any) -> None:
        self._strategy.end_epoch()

    def on_validation_batch_start(self, *args: Any) -> None:
        self._strategy.check_peers()

    def on_test_batch_start(self, *args: Any) -> None:
        self._strategy.check_peers()

    def on_predict_batch_start(self, *args: Any) -> None:
        self._strategy.check_peers()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._strategy.fail(exception)


class _AllReduce(DecentralizedMixin):
    """Synchronous SGD: the baseline in this frame; Lightning's own "ddp" stays the reference."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(AllReduce(), **kwargs)


class _NoSync(DecentralizedMixin):
    """Independent SGD on every rank: the lower bound on the time of a step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(NoSync(), **kwargs)


class _LocalSGD(DecentralizedMixin):
    """Local SGD: averages the weights of all ranks every `sync_period` steps."""

    def __init__(self, sync_period: int = 8, **kwargs: Any) -> None:
        super().__init__(LocalSGD(sync_period=sync_period), **kwargs)


class _DPSGD(DecentralizedMixin):
    """D-PSGD: averages the weights with those of two neighbours on a ring, in every step."""

    def __init__(self, topology: str = "ring", **kwargs: Any) -> None:
        super().__init__(DPSGD(topology=topology), **kwargs)


class _SGP(DecentralizedMixin):
    """Stochastic Gradient Push: pushes shares of the weights along a directed graph, in every step.

    Args:
        num_peers: to how many ranks a rank sends in each step, fewer where the graph has fewer
        overlap: how many steps late a message may be taken; 0 waits for those of the step
        hierarchical: averages gradients inside a node, and pushes from node to node
        topology: "exponential", "ring", "bipartite_exponential", "complete", "random_exponential",
            "random"
        node_size: how many ranks a node has, with `hierarchical`; None takes the Trainer's
            `devices`
        **kwargs: as for every strategy
    """

    def __init__(
        self,
        num_peers: int = 1,
        overlap: int = 0,
        hierarchical: bool = False,
        topology: str = "exponential",
        node_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(SGP(num_peers, overlap, hierarchical, topology, node_size), **kwargs)

    def setup_environment(self) -> None:
        assert isinstance(self.algorithm, SGP)
        if self.algorithm.hierarchical and self.algorithm.node_size is None:
            self.algorithm.node_size = self.num_processes
        super().setup_environment()


class _ADPSGD(DecentralizedMixin):
    """AD-PSGD: averages the weights with those of random neighbours, beside the training.

    Args:
        seed: of the neighbours that are asked
        **kwargs: as for every strategy
    """

    def __init__(self, seed: int = 0, **kwargs: Any) -> None:
        super().__init__(ADPSGD(seed), **kwargs)


class _PopSGD(DecentralizedMixin):
    """PopSGD: averages the weights in random pairs that nobody else waits for.

    Args:
        local_steps: how many steps lie between two interactions
        blocking: whether to wait for the partner; False averages with what it published last
        topology: "complete", anyone may meet anyone, or "cycle"
        wire_dtype: None sends the weights as they are, "bfloat16" rounded, "int8" a byte an element
        seed: of the pairs
        **kwargs: as for every strategy
    """

    def __init__(
        self,
        local_steps: int = 1,
        blocking: bool = True,
        topology: str = "complete",
        wire_dtype: str | None = None,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(PopSGD(local_steps, blocking, topology, wire_dtype, seed), **kwargs)


class _WAGMA(DecentralizedMixin):
    """WAGMA-SGD: averages the weights in small, changing groups that nobody waits for.

    Args:
        group_size: S; None takes the power of two nearest sqrt(P)
        sync_period: tau, how many steps lie between two global averages
        wait_avoiding: False waits for every rank of the group instead of contributing what is stale
        dynamic_groups: False keeps the groups of the first step
        grace_s: how long an activated round waits for this rank before it contributes what is
            stale; None takes a share of the measured step time
        overlap: whether training goes on before the group's answer is there
        **kwargs: as for every strategy
    """

    def __init__(
        self,
        group_size: int | None = None,
        sync_period: int = 10,
        wait_avoiding: bool = True,
        dynamic_groups: bool = True,
        grace_s: float | None = None,
        overlap: bool = False,
        **kwargs: Any,
    ) -> None:
        algorithm = WAGMA(group_size, sync_period, wait_avoiding, dynamic_groups, grace_s, overlap)
        super().__init__(algorithm, **kwargs)


class _EagerSGD(DecentralizedMixin):
    """Eager-SGD: averages the gradients of those ranks that are there, not waiting for the last.

    Args:
        quorum: "solo" fires with the first rank, "majority" with one drawn at random for each round
        sync_period: after how many rounds the weights are averaged over all ranks; None: never
        **kwargs: as for every strategy
    """

    def __init__(
        self, quorum: str = "majority", sync_period: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(EagerSGD(quorum=quorum, sync_period=sync_period), **kwargs)


class _HPSGD(DecentralizedMixin):
    """HPSGD: trains on while the sum of what all ranks have learnt travels; nobody waits for it.

    Args:
        max_local_steps: after how many steps since the last synchronisation a rank waits; None:
            never
        outer_lr: learning rate of the outer optimizer, which steps once a synchronisation
        outer_momentum: its Nesterov momentum
        **kwargs: as for every strategy
    """

    def __init__(
        self,
        max_local_steps: int | None = None,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(HPSGD(max_local_steps, outer_lr, outer_momentum), **kwargs)


class _OkTopk(DecentralizedMixin):
    """Ok-Topk: all-reduces the largest entries of the gradient, in a volume that P does not change.

    Args:
        density: which share of the entries
        threshold_period: how many steps lie between two exact thresholds
        repartition_period: how many steps lie between two partitions of the gradient into regions
        balance_ratio: entries are spread evenly before they are gathered where one rank has so many
            times the mean
        warmup_steps: how many steps reduce the whole gradient first
        wire_dtype: "float32", or "bfloat16", which rounds the values that are sent
        **kwargs: as for every strategy
    """

    def __init__(
        self,
        density: float = 0.01,
        threshold_period: int = 32,
        repartition_period: int = 64,
        balance_ratio: float = 4.0,
        warmup_steps: int = 0,
        wire_dtype: str = "float32",
        **kwargs: Any,
    ) -> None:
        algorithm = OkTopk(
            density, threshold_period, repartition_period, balance_ratio, warmup_steps, wire_dtype
        )
        super().__init__(algorithm, **kwargs)


class _TopkAllgather(DecentralizedMixin):
    """Sends the largest entries of every rank's gradient to all: a baseline for Ok-Topk."""

    def __init__(self, density: float = 0.01, **kwargs: Any) -> None:
        super().__init__(TopkAllgather(density), **kwargs)


class _TopkDSA(DecentralizedMixin):
    """SparCML's dynamic sparse all-reduce of the largest entries: a baseline for Ok-Topk."""

    def __init__(self, density: float = 0.01, **kwargs: Any) -> None:
        super().__init__(TopkDSA(density), **kwargs)


class _GTopk(DecentralizedMixin):
    """Sums the ranks' largest entries up a tree, keeping as many of each sum: a baseline."""

    def __init__(self, density: float = 0.01, **kwargs: Any) -> None:
        super().__init__(GTopk(density), **kwargs)


class _GaussianTopk(DecentralizedMixin):
    """Sends what a normal distribution has for the largest entries to all: a baseline."""

    def __init__(self, density: float = 0.01, **kwargs: Any) -> None:
        super().__init__(GaussianTopk(density), **kwargs)


class DecentralizedStrategy(DecentralizedMixin, lightning.pytorch.strategies.DDPStrategy):
    __doc__ = DecentralizedMixin.__doc__


class AllReduceStrategy(_AllReduce, DecentralizedStrategy):
    __doc__ = _AllReduce.__doc__


class NoSyncStrategy(_NoSync, DecentralizedStrategy):
    __doc__ = _NoSync.__doc__


class LocalSGDStrategy(_LocalSGD, DecentralizedStrategy):
    __doc__ = _LocalSGD.__doc__


class DPSGDStrategy(_DPSGD, DecentralizedStrategy):
    __doc__ = _DPSGD.__doc__


class SGPStrategy(_SGP, DecentralizedStrategy):
    __doc__ = _SGP.__doc__


class ADPSGDStrategy(_ADPSGD, DecentralizedStrategy):
    __doc__ = _ADPSGD.__doc__


class PopSGDStrategy(_PopSGD, DecentralizedStrategy):
    __doc__ = _PopSGD.__doc__


class WAGMAStrategy(_WAGMA, DecentralizedStrategy):
    __doc__ = _WAGMA.__doc__


class EagerSGDStrategy(_EagerSGD, DecentralizedStrategy):
    __doc__ = _EagerSGD.__doc__


class HPSGDStrategy(_HPSGD, DecentralizedStrategy):
    __doc__ = _HPSGD.__doc__


class OkTopkStrategy(_OkTopk, DecentralizedStrategy):
    __doc__ = _OkTopk.__doc__


class TopkAllgatherStrategy(_TopkAllgather, DecentralizedStrategy):
    __doc__ = _TopkAllgather.__doc__


class TopkDSAStrategy(_TopkDSA, DecentralizedStrategy):
    __doc__ = _TopkDSA.__doc__


class GTopkStrategy(_GTopk, DecentralizedStrategy):
    __doc__ = _GTopk.__doc__


class GaussianTopkStrategy(_GaussianTopk, DecentralizedStrategy):
    __doc__ = _GaussianTopk.__doc__


STRATEGIES: Final[dict[str, type[DecentralizedStrategy]]] = {
    "allreduce": AllReduceStrategy,
    "no_sync": NoSyncStrategy,
    "local_sgd": LocalSGDStrategy,
    "hpsgd": HPSGDStrategy,
    "dpsgd": DPSGDStrategy,
    "sgp": SGPStrategy,
    "adpsgd": ADPSGDStrategy,
    "popsgd": PopSGDStrategy,
    "eager_sgd": EagerSGDStrategy,
    "wagma": WAGMAStrategy,
    "oktopk": OkTopkStrategy,
    "topk_allgather": TopkAllgatherStrategy,
    "topk_dsa": TopkDSAStrategy,
    "gtopk": GTopkStrategy,
    "gaussian_topk": GaussianTopkStrategy,
}
"""The names that `Trainer(strategy=...)` takes."""


def register() -> None:
    """Makes the names known to the Trainers of both packages."""
    twin = type(
        "DecentralizedStrategy", (DecentralizedMixin, pytorch_lightning.strategies.DDPStrategy), {}
    )
    for name, strategy in STRATEGIES.items():
        description = (strategy.__doc__ or "").splitlines()[0]
        lightning.pytorch.strategies.StrategyRegistry.register(
            name, strategy, description=description, override=True
        )
        pytorch_lightning.strategies.StrategyRegistry.register(
            name,
            type(strategy.__name__, (strategy.__bases__[0], twin), {"__doc__": strategy.__doc__}),
            description=description,
            override=True,
        )


def _check_options(strategy: str, algorithm: Algorithm, kwargs: dict[str, Any]) -> None:
    """Raises for options that are not ours or Lightning's; drops those that say nothing."""
    ours = [*algorithm.hyperparameters(), *_OWN]
    defaults = inspect.signature(DistributedDataParallel).parameters
    for name, value in list(kwargs.items()):
        says_nothing = value is None or (name in defaults and value == defaults[name].default)
        if says_nothing and (name in _NOT_OURS or name in defaults):
            del kwargs[name]  # a command line passes the defaults of the base classes
        elif name in _NOT_OURS:
            raise ValueError(
                f"{strategy} cannot honour {name}, got {name}={value!r}: {_NOT_OURS[name]}"
            )
        elif name not in _LIGHTNINGS:
            raise ValueError(
                f"{strategy} has no option {name}, got {name}={value!r}; it takes "
                f"{', '.join(ours)}, and of Lightning's {', '.join(sorted(_LIGHTNINGS))}"
            )


def _is_a(name: str, callback: object) -> bool:
    """Whether it is one of Lightning's of this name, from whichever of its two packages."""
    return any(base.__name__ == name for base in type(callback).__mro__)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def _all_fail(net: ProcessGroupTransport) -> bool:
    """Whether every rank fails, as all do that refuse a configuration: each says so itself."""
    try:
        net.sub("failing").barrier().wait(_ALIKE_WITHIN_S)
    except TransportError:
        return False
    return True


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        listed = " or ".join(f'"{choice}"' for choice in choices)
        raise ValueError(f"{name} must be {listed}, got {name}={value!r}")


def _check_seconds(name: str, value: float, example: float) -> None:
    if not 0 < value <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"{name} must be positive and at most {threading.TIMEOUT_MAX:.0f}, got {name}={value}; "
            f"try {name}={example}"
        )
