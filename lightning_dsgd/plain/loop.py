"""A loop that its user writes, on one rank: what all ranks do together in it, over a session.

    open       the network is there
    build      the model and its optimizers are there: all ranks take over rank 0's weights, or go
               on from what a checkpoint has restored
    finish     all ranks are done: the consensus is in the model, and the network is closed
    give_up    this rank has failed: the others are told

`training` makes one for a loop in plain PyTorch.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_dsgd.agreement import everyones, refuse_unless_alike
from lightning_dsgd.algorithm import ORDINARY, Algorithm, Conditions
from lightning_dsgd.algorithms.balanced import Balanced
from lightning_dsgd.data.loaders import has_indices
from lightning_dsgd.data.units.balancing import Balancing
from lightning_dsgd.data.workers import spare_workers
from lightning_dsgd.plain.claimed import LoopClaiming
from lightning_dsgd.plain.steps import Steps, failing
from lightning_dsgd.plain.units import UnitSteps
from lightning_dsgd.session import figures, notices, options
from lightning_dsgd.session.checkpoint import record
from lightning_dsgd.session.options import WholeOptions
from lightning_dsgd.session.session import Session
from lightning_dsgd.session.stopping import AgreedBatch
from lightning_dsgd.session.under_way import Training
from lightning_dsgd.transport import Transport

_log: Final = logging.getLogger("lightning_dsgd")

T = TypeVar("T")


class Loop:
    """Leads one rank's training loop; the head of the file tells how.

    Args:
        session: the session of this rank
        algorithm: how the ranks learn from one another
        chosen: the options of this face
        optimizers: returns all optimizers, as far as they are known

    Attributes:
        claiming: what claims this rank's batches, where ranks claim and training has begun
    """

    def __init__(
        self,
        session: Session[Any],
        algorithm: Algorithm,
        chosen: WholeOptions,
        optimizers: Callable[[], Sequence[Optimizer]],
    ) -> None:
        options.check_data(chosen, algorithm)
        self._session = session
        self._chosen = chosen
        session.samples = options.samples_of(chosen, optimizers)
        self.claiming: LoopClaiming | None = None
        self._algorithm = algorithm
        self._steps: Steps | None = None
        self._conditions: Conditions = ORDINARY
        self._num_builds = 0
        self._units: UnitSteps | None = None
        self._num_batches = 0
        """How many batches this rank has made."""

    @property
    def rank(self) -> int:
        """The rank of this process."""
        self._check_met("rank")
        return self._session.rank

    @property
    def world_size(self) -> int:
        """The number of ranks; with `on_loss="continue"`, the number of ranks that are left."""
        self._check_met("world_size")
        return self._session.world_size

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that train; with `on_loss="continue"`, the ranks that are left."""
        self._check_met("members")
        return self._session.ranks.members

    @property
    def is_first(self) -> bool:
        """Whether this rank is the lowest that trains, which prints, logs and writes files."""
        self._check_met("is_first")
        return self._session.ranks.is_first

    @property
    def claims(self) -> bool:
        """Whether ranks claim their batches."""
        return self._chosen["data"] == "claimed"

    @property
    def num_steps(self) -> int:
        """The number of steps that this rank's optimizers have made."""
        return 0 if self._steps is None else self._steps.num_steps

    def _check_met(self, what: str) -> None:
        """Raises where this rank has not met the others yet, and `what` needs that."""

    def _check_inside(self, what: str) -> None:
        """Raises where ranks do not train yet, or no more, and `what` needs that."""

    def check_may_load(self, way_out: str) -> None:
        """Raises after a step or the like, which a checkpoint would not restore."""
        if self.num_steps:
            raise RuntimeError(
                f"a checkpoint must be loaded before the first step, got {self.num_steps} steps; "
                f"{way_out}"
            )
        self._session.ranks.check_may_load(way_out)

    # ---- setting up ----

    def open(self, net: Transport, ranks_on_node: int | None, *, scales: bool) -> None:
        """Takes over a network that is open, and checks that all ranks have the same options."""
        session = self._session
        session.open(net)
        session.ranks.check_alike(options.describe(self._algorithm, self._chosen))
        alike = len(set(everyones(session.meetings, str(ranks_on_node)))) == 1
        self._conditions = Conditions(
            ranks_on_node if alike else None,
            skips_overflow=scales,
            claims_batches=self.claims,
            samples=None if session.samples is None else session.samples.newest,
        )

    def build(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        scaler: GradScaler | None,
        own: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins to train a model, with the weights that the model has now.

        Args:
            model: the model with all that is trained
            optimizers: all optimizers that step it
            scaler: the scaler of the loss, if there is one
            own: this rank's part of a checkpoint, whose weights and optimizers are loaded already;
                None: all ranks begin with rank 0's weights; with shards, with replica 0's
        """
        session, training = self._session, self._session.training
        exchanging = session.world_size if self._algorithm.traits.uses_gradient else 1
        scales = scaler is not None and scaler.is_enabled()
        options.check_optimizers(
            list(optimizers), exchanging, scaler if scales else None, self._algorithm
        )
        if training is not None:
            training.replica.stop()
        self._num_builds += 1
        net = session.net.sub(f"replica-{self._num_builds}")
        sharding = session.sharding
        layout = sharding.layout(net, model, optimizers, self._algorithm)
        if self._num_builds == 1 and layout.describe():
            self._announce(f"Sharded replicas: {layout.describe()}.")
        replica = session.ranks.make_replica(
            sharding.column(net),
            model,
            optimizers,
            self._algorithm,
            self._conditions,
            average_buffers=self._chosen["average_buffers"],
            check_finite=self._chosen["check_finite"],
            layout=layout,
            everyone=net if sharding.in_rows else None,
        )
        if training is not None:
            training.replica = replica
        else:
            if self.claims:
                self.claiming = LoopClaiming(session)
                self.claiming.open(session.net.sub("claims"))
            agreed = AgreedBatch(session.net.sub("stop"), is_of_each=self.claims)
            session.training = Training(self._algorithm, replica, agreed, claiming=self.claiming)
            self._share_units(session.training)
            self._steps = Steps(session, optimizers, scaler)
        if own is None:
            replica.synchronize()
        else:
            record.restore(own, replica)
        if self._num_builds == 1:
            notices.tell(session, self._announce)

    def _share_units(self, training: Training) -> None:
        if not isinstance(self._algorithm, Balanced):
            return
        net = self._session.net.sub("balancing")
        balancing = Balancing(
            net, training.replica, self._session.ranks, backups=self._algorithm.backups
        )
        training.balancing = balancing
        self._units = UnitSteps(self._session, balancing, self._algorithm.micro_batches)

    def _announce(self, text: str) -> None:
        if self._session.rank == 0:
            _log.info(text)

    # ---- training ----

    def batches(self, loader: Iterable[T]) -> _Batches[T]:
        """Yields a loader's batches; with SIGTERM or Ctrl-C all ranks stop after the same batch.

        Ranks raise SystemExit or KeyboardInterrupt there: catch it to `save`, and raise it again.
        With on_loss="continue" a rank that gets SIGTERM leaves alone: it ends with SystemExit.
        With weigh_by="samples" each batch counts as one that is trained on.
        """
        self._session.ranks.check_stays()
        self._check_inside("batches")
        self._session.signals.take()
        of_torch = getattr(loader, "_dataloader", loader)  # which Fabric wraps
        self._session.reads_indices = has_indices(of_torch)
        spare_workers(of_torch)
        if self.claiming is not None:
            loader = self.claiming.of(loader, self.meet_all)
        return _Batches(loader, self._session, self._count_batch)

    def _count_batch(self) -> None:
        self._num_batches += 1

    def steps(
        self, loader: Any, accumulate: int = 1, move: Callable[[Any], Any] | None = None
    ) -> Iterator[Iterator[Any]]:
        """Yields the steps of an epoch, each as the micro-batches that this rank computes.

        For `Balanced` alone.  Compute the backward pass of each, and then call `optimizer.step()`.

        Args:
            loader: a DataLoader with the batches that this rank would have with DDP
            accumulate: of how many batches of each rank a step is made; do not divide the loss
            move: brings a batch to the device, where the loop does not
        """
        if self._units is None:
            raise RuntimeError(
                "steps(...) is for an algorithm whose ranks share the micro-batches of a step, "
                f"inside of its `with`, got {self._algorithm.name}; use Balanced(), or loop over "
                "batches(loader)"
            )
        self._session.signals.take()
        spare_workers(loader)
        return self._units.of(loader, accumulate, move or _as_it_is)

    def count(self, num_samples: int) -> None:
        """Says how many samples the next backward pass has, with weigh_by="samples".

        Call it where a batch does not tell, or to count something else, such as tokens.
        """
        self._check_inside("count")
        self._session.count(num_samples)

    def reduce_gradients(self, *optimizers: Optimizer) -> None:
        """Has the algorithm exchange the gradients now, as clipping needs it; `step` follows.

        Args:
            *optimizers: the optimizers that step next; all, if left out
        """
        self._check_inside("reduce_gradients")
        assert self._steps is not None, "the optimizers are known where ranks train"
        for optimizer in optimizers or self._steps.optimizers:
            self._steps.exchange(optimizer)

    @property
    def nominal_batches(self) -> int:
        """The number of batches that each rank had made by now, if all made as many.

        With data="claimed" a learning rate that follows it is the same on all ranks for batches
        that lie beside each other in the epoch, whoever makes them.  With data="equal" it is the
        number of this rank's own batches, in all epochs.
        """
        self._check_inside("nominal_batches")
        if self.claiming is not None:
            return self.claiming.nominal_batches
        return self._num_batches

    # ---- where all ranks meet ----

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Has the model hold the consensus inside, and its own weights again afterwards.

        All ranks enter it together.
        """
        self.meet_all("consensus")
        with failing(self._session):
            self._session.show_consensus()
        try:
            yield
        finally:
            self._session.show_own()

    @overload
    def mean(self, value: Mapping[str, Any]) -> dict[str, Any]: ...
    @overload
    def mean(self, value: Tensor) -> Tensor: ...
    @overload
    def mean(self, value: float) -> float: ...
    def mean(self, value: Any) -> Any:
        """Returns the mean over all ranks of a number, a tensor, or a mapping of several."""
        if isinstance(value, Mapping):
            return {name: self.mean(each) for name, each in value.items()}
        self.meet_all("mean")
        if isinstance(value, Tensor):
            return self._reduced(value)
        return float(self._reduced(torch.tensor(float(value), dtype=torch.float64)))

    def _reduced(self, tensor: Tensor) -> Tensor:
        with failing(self._session):
            return self._session.reduce(tensor.detach(), is_mean=True)

    def barrier(self) -> None:
        """Waits until all ranks are here."""
        self.meet_all("barrier")

    def metrics(self) -> dict[str, float]:
        """Returns what this rank has sent and waited for so far, and the algorithm's figures."""
        return figures.own(self._session)

    def meet_all(self, what: str) -> None:
        """Waits until all ranks are here, and meanwhile serves ranks that still train.

        Raises:
            ValueError: on every rank, unless all do the same
        """
        session = self._session
        self._check_inside(what)
        with failing(session):
            if what != "load":  # which has the training begin anew
                session.begin_training()
            session.check_peers()
            if session.is_training:
                session.end_batch()
            session.ranks.together(lambda: self._meet_for(what))

    def _meet_for(self, what: str) -> None:
        session = self._session
        session.meet()
        refuse_unless_alike(
            session.meetings,
            what,
            "what the ranks meet for",
            "call whatever ranks meet in, such as consensus, barrier, save and load, on all ranks "
            "in the same order, and not once a batch where ranks have different numbers of batches",
        )

    # ---- leaving ----

    def finish(self) -> None:
        """Leaves the consensus in the model, once all ranks are here, and closes the network."""
        try:
            self.meet_all("end of training")
            self._session.end_training()
            self._session.ranks.end_leaver()
        except BaseException as error:
            self.give_up(error)
            raise
        self._leave()

    def give_up(self, exception: BaseException) -> None:
        """Ends this rank's part; the others are told, unless all stop together."""
        self._session.fail(exception)
        self._leave()

    def _leave(self) -> None:
        if self._steps is not None:
            self._steps.give_back()
        self._session.leave()


def _as_it_is(batch: Any) -> Any:
    return batch


class _Batches(Generic[T]):
    """Yields a loader's batches, between which all ranks can stop."""

    def __init__(
        self, loader: Iterable[T], session: Session[Any], count: Callable[[], None]
    ) -> None:
        self._loader = loader
        self._session = session
        self._count = count

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        for batch in self._loader:
            with failing(self._session):
                self._session.begin_batch(batch)
            try:
                yield batch
            finally:  # a loop may leave a batch by `break`
                self._count()
            self._session.end_batch()
