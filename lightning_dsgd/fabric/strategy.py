"""The algorithms as strategies of Lightning's Fabric.

    fabric.launch()                    the ranks meet, and the network is opened
    fabric.setup(model, optimizer)     the model stays as it is, without a wrapper
    the first optimizer.step()         all ranks take over rank 0's weights; from here on as in a
                                       loop in plain PyTorch: `plain.loop`
    fabric.strategy.finish()           leaves the consensus in the model: Fabric has no end of
                                       training; `with fabric.strategy:` does it too

Fabric calls no strategy when an error ends the script.  `with fabric.strategy:` tells the others;
without it, that happens when the process ends.

For `lightning.fabric` here, and for `lightning_fabric` in `twin`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Self, Unpack

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.utilities import move_data_to_device
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dsgd import keywords
from lightning_dsgd.algorithm import Algorithm, Conditions
from lightning_dsgd.algorithms.written import written
from lightning_dsgd.fabric.collectives import CollectivesMixin, FabricSession
from lightning_dsgd.plain.loop import Loop
from lightning_dsgd.plain.steps import failing
from lightning_dsgd.session import options
from lightning_dsgd.session.checkpoint import files, record
from lightning_dsgd.session.checkpoint.saving import save
from lightning_dsgd.session.ending import say
from lightning_dsgd.session.phases import Phase
from lightning_dsgd.session.under_way import trained
from lightning_dsgd.trainer import names
from lightning_dsgd.trainer.arguments import FabricOptions


class FabricMixin(CollectivesMixin):
    """Trains a Fabric loop with an algorithm that does not wait for everyone at every step.

    Args:
        algorithm: how the ranks learn from one another, or its name
        **given: the options in `FabricOptions`
    """

    def __init__(self, algorithm: Algorithm | str, **given: Unpack[FabricOptions]) -> None:
        super().__init__(algorithm, FabricOptions, given)
        self._backward_sync_control: Any = _NothingToSync()
        self._clips: dict[int, Callable[[Iterable[Tensor]], Any]] = {}
        ranks = options.ranks_of(self.in_force, self._opening)
        self.session = FabricSession(self._processes, ranks)
        self.session.clip = self._clip
        self._loop = Loop(self.session, self.algorithm, self.in_force, lambda: self._optimizers)
        self._modules: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._num_epochs: dict[int, int] = {}  # of each loader, where ranks share micro-batches

    # ---- set-up ----

    def setup_environment(self) -> None:
        if self.session.is_open:  # `fabric run` sets it up before `fabric.launch` does
            return
        self._processes.become_rank()
        super().setup_environment()
        self.check_number_of_processes()
        scales = self._scaler is not None
        self.algorithm.check(self.world_size, Conditions(self.ranks_on_node, scales))
        self.session.ranks.check(self.algorithm, self.world_size, self.root_device)
        net = self._opening.open_network(self.world_size, self.root_device)
        self._loop.open(net, self.ranks_on_node, scales=scales)
        atexit.register(self._end_with_process, os.getpid())

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        self._join()
        super()._setup_distributed()  # which finds the process group there

    @property
    def _scaler(self) -> Any:
        """The object that scales the loss for fp16, if there is one."""
        return getattr(self.precision, "scaler", None)

    def setup_module(self, module: nn.Module) -> Any:
        self._check_new("model")
        self._modules.append(module)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self._check_new("optimizer")
        self._optimizers.append(optimizer)
        return optimizer

    def _check_new(self, what: str) -> None:
        if self.session.training is not None:
            raise RuntimeError(
                f"everything must be set up before the first step, got one more {what}; call "
                "fabric.setup for all models and optimizers first"
            )

    def _build(self, own: Any = None) -> None:
        """Begins training, once all that is trained is there."""
        if not self._optimizers:
            raise RuntimeError(
                "there must be something to train, got no optimizer; call "
                "fabric.setup(model, optimizer) first"
            )
        several = len(self._modules) > 1
        model = nn.ModuleList(self._modules) if several else self._modules[0]
        with failing(self.session):
            self._loop.build(model, self._optimizers, self._scaler, own)

    # ---- training ----

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        if self.session.training is None:
            self._build()
        return super().optimizer_step(optimizer, **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Any:
        self._reduce_gradients(optimizer)
        self._clips[id(optimizer)] = partial(
            nn.utils.clip_grad_norm_,
            max_norm=max_norm,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )
        return self._clip(optimizer)

    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float
    ) -> None:
        self._reduce_gradients(optimizer)
        self._clips[id(optimizer)] = partial(nn.utils.clip_grad_value_, clip_value=clip_val)
        self._clip(optimizer)

    def _clip(self, optimizer: Optimizer) -> Any:
        """Clips an optimizer's gradients as the script has done last."""
        clip = self._clips.get(id(optimizer))
        return None if clip is None else clip(self.precision.main_params(optimizer))

    def _reduce_gradients(self, optimizer: Optimizer) -> None:
        if self.session.training is None:
            self._build()
        self._loop.reduce_gradients(optimizer)

    def batches(self, loader: Iterable[Any]) -> Iterable[Any]:
        """Yields a loader's batches; with SIGTERM or Ctrl-C all ranks stop after the same batch.

        With on_loss="continue" a rank that gets SIGTERM leaves alone.  With data="claimed" ranks
        claim the batches of an epoch: set the loader up with `use_distributed_sampler=False`.
        """
        if self._loop.claims and self.session.training is None:
            self._build()
        return self._loop.batches(loader)

    def steps(self, loader: Any, accumulate: int = 1) -> Iterator[Iterator[Any]]:
        """Yields the steps of an epoch, each as the micro-batches that this rank computes.

        For strategy="balanced" alone: see `lightning_dsgd.decentralized.steps`.

        Args:
            loader: has been set up by `fabric.setup_dataloaders`
            accumulate: of how many batches of each rank a step is made; do not divide the loss
        """
        if self.session.training is None:
            self._build()
        inner = getattr(loader, "_dataloader", loader)
        move = None
        if inner is not loader:  # else the script moves batches, and shuffles
            move = partial(move_data_to_device, device=self.root_device)
            number = self._num_epochs.setdefault(id(loader), 0)
            self._num_epochs[id(loader)] += 1
            if hasattr(inner.sampler, "set_epoch"):
                inner.sampler.set_epoch(number)
        return self._loop.steps(inner, accumulate, move)

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Has the models hold the consensus inside, and their own weights again afterwards."""
        self.session.ranks.check_stays()
        if not self.session.is_open:  # training has ended: they hold it
            yield
            return
        if self.session.training is None:
            self._build()
        with self._loop.consensus():
            yield

    # ---- the end ----

    def finish(self) -> None:
        """Ends training: leaves the consensus in the models, once all ranks are here."""
        self.session.ranks.check_stays()
        if not self.session.is_open:
            return
        if self.session.training is None and self._optimizers:
            self._build()
        self._loop.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, exception: BaseException | None, traceback: Any) -> None:
        if exception is None:
            self.finish()
        else:
            self.fail(exception)

    def fail(self, exception: BaseException) -> str:
        reason = super().fail(exception)
        if reason:
            self._loop.give_up(exception)
            self._processes.end_children()
        return reason

    def _end_with_process(self, pid: int) -> None:
        """Ends training at the end of the script, if nobody has ended it before."""
        if os.getpid() != pid or not self.session.is_open:
            return
        error: BaseException | None = getattr(sys, "last_value", None)
        if error is not None or self.session.phase is Phase.BROKEN:
            self.fail(error or RuntimeError("training was not ended"))
            return
        if self.is_global_zero:
            say(
                "lightning_dsgd: training ends with the script; call fabric.strategy.finish(), or "
                "train in `with fabric.strategy:`, to have the consensus in the model before"
            )
        self.finish()

    # ---- checkpoints ----

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        self.session.ranks.check_stays()
        if self.session.training is None:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        self._meet_all("save")
        checkpoint = self._convert_stateful_objects_in_state(state, filter=filter or {})
        has_replicas = any(isinstance(each, Optimizer) for each in state.values())
        with failing(self.session):
            save(
                self.session,
                self.checkpoint_io,
                str(path),
                checkpoint,
                storage_options,
                has_replicas=has_replicas,
            )

    def load_checkpoint(
        self,
        path: Any,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        resumes = isinstance(state, dict) and any(
            isinstance(each, Optimizer) for each in state.values()
        )
        if not resumes or not self.session.is_open:
            return dict(super().load_checkpoint(path, state, strict, weights_only=weights_only))
        self._loop.check_may_load("call fabric.load right after fabric.setup")
        self._meet_all("load")
        with failing(self.session):
            path = self.session.text_of_rank_0(str(path))
            shared = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
            own = files.load_replica(
                self.checkpoint_io,
                self.session.meetings,
                path,
                shared,
                self.algorithm,
                announce=rank_zero_info,
                weights_only=weights_only,
            )
        content = shared if own is None else own
        with self._reading(dict(content)):
            rest = super().load_checkpoint(path, state, strict, weights_only=weights_only)
        self._build(own)
        record.carry_over(content, trained(self.session.training).replica)
        if self._loop.claiming is not None:
            self._loop.claiming.restore(rest)
        return record.without_record(rest)

    @contextlib.contextmanager
    def _reading(self, content: dict[str, Any]) -> Iterator[None]:
        """Has Fabric read a checkpoint that is in memory already."""
        own: Any = self
        real, own.checkpoint_io = own.checkpoint_io, _Given(content)
        try:
            yield
        finally:
            own.checkpoint_io = real


class _Given(files.TorchFiles):
    """Holds a checkpoint that was read before."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._content


class _NothingToSync:
    """Makes `no_backward_sync` do nothing, as a backward pass sends nothing."""

    def no_backward_sync(self, *args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext()


@keywords.lists(FabricOptions)
class FabricStrategy(FabricMixin, DDPStrategy):
    __doc__ = FabricMixin.__doc__


names.make_known(STRATEGY_REGISTRY, FabricStrategy, FabricStrategy)
names.hint_in(
    "lightning.fabric.connector",
    "_Connector",
    lambda algorithm: f"lightning_dsgd.FabricStrategy({written(algorithm)})",
)
