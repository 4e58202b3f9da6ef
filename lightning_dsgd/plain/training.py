"""Decentralised training of a loop in plain PyTorch.

    with decentralized(model, optimizer, WAGMA(group_size=4)) as replica:
        for x, y in replica.batches(loader):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()              the algorithm has its turn before it and after it
        with replica.consensus():
            evaluate(model)

What the Trainer is told by its hooks, this face is told by those of torch's optimizers (`steps`).
All ranks do the same in the same order where they meet: `consensus`, `mean`, `barrier`, `save`,
`load` and the end of the `with`.  Between those each rank makes as many steps as it has batches.
With `on_loss="continue"` the others go on where one is lost: `elastic.members`.

From `decentralized(...)` on until its `with` is entered each optimizer refuses to step: a step
there would train one rank alone, in silence.  The refusal is held by the optimizer, as the
`decentralized(...)` may be kept by nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, Unpack

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_dsgd import devices, keywords, wings
from lightning_dsgd.algorithm import Algorithm, Conditions
from lightning_dsgd.algorithms.written import check_algorithm
from lightning_dsgd.plain.launch import Launch, find_launch
from lightning_dsgd.plain.loop import Loop
from lightning_dsgd.plain.steps import failing
from lightning_dsgd.session import options
from lightning_dsgd.session.checkpoint import files, record
from lightning_dsgd.session.opening import Opening
from lightning_dsgd.session.options import WholeOptions
from lightning_dsgd.session.phases import Phase
from lightning_dsgd.session.session import Session
from lightning_dsgd.session.under_way import Training, trained

_HELD: Final = "_refusal_of_lightning_dsgd"
"""The optimizer's attribute that holds the handle of its refusal."""
_PLACE: Final = "`with decentralized(...) as replica:`"


@keywords.lists(WholeOptions)
class decentralized(Loop):
    """Trains a model with an algorithm, from entering the `with` to leaving it.

    On entering, all ranks meet and get the weights of rank 0.  On leaving, all ranks have met again
    and the model holds the consensus; after an exception the other ranks have been told.

    Args:
        model: on its device, not wrapped; the same on all ranks but for its values
        optimizers: all that step it
        algorithm: how the ranks learn from one another
        scaler: torch's GradScaler, if the loss is scaled; all ranks then skip the same steps where
            they exchange gradients
        replicas: for a model in shards, the dimension of its DeviceMesh along which its replicas
            lie, as in `mesh["replica"]`; see the page "Sharded models"
        **given: the options in `WholeOptions`

    Attributes:
        rank: the rank of this process, inside the `with`
        world_size: how many ranks there are, inside the `with`
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        algorithm: Algorithm,
        *,
        scaler: GradScaler | None = None,
        replicas: Any = None,
        **given: Unpack[WholeOptions],
    ) -> None:
        chosen = options.choose("decentralized", WholeOptions, given)
        check_algorithm(algorithm, "decentralized(model, optimizer, {})")
        _check_model(model)
        self._opening = Opening(chosen, self._announce)
        session: Session[Training] = Session(options.ranks_of(chosen, self._opening))
        super().__init__(session, algorithm, chosen, lambda: self._optimizers)
        self._model = model
        self._optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        if replicas is not None:  # an optimizer trains shards, also after an evaluation
            wing = wings.load("sharded.shards", "replicas=...")
            wing.reshard(wing.sharding_of(model))
        _check_optimizers(self._optimizers, model)
        self._scaler = scaler
        self._replicas = replicas
        if replicas is not None and self.claims:
            raise ValueError(
                "ranks that hold a replica together must read the same number of batches, got "
                'data="claimed" with replicas=...; use data="equal"'
            )
        if replicas is not None and self._session.samples is not None:
            raise ValueError(
                "ranks that hold a replica together average its gradients by themselves, each "
                'counting alike, got weigh_by="samples" with replicas=...; use weigh_by="ranks"'
            )
        if replicas is not None and scaler is not None:
            raise ValueError(
                "sharded replicas must be trained without a GradScaler, whose scale would differ "
                "between them, got scaler=...; use bfloat16, as in "
                "fully_shard(..., mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))"
            )
        _refuse_steps(self._optimizers)

    def _check_met(self, what: str) -> None:
        if self._session.phase is Phase.OPENING:
            raise _must_be_inside(what)

    def _check_inside(self, what: str) -> None:
        if self._session.phase in (Phase.OPENING, Phase.OVER):
            raise _must_be_inside(what)

    # ---- entering ----

    def __enter__(self) -> Self:
        if self._session.phase is not Phase.OPENING:
            raise RuntimeError(
                "decentralized(...) must be entered once, got a second time; make another one"
            )
        _allow_steps(self._optimizers)
        try:
            self._open()
        except BaseException as error:
            self.give_up(error)
            raise
        return self

    def _open(self) -> None:
        launch, session = find_launch(), self._session
        session.rank, session.world_size = launch.rank, launch.world_size
        scales = self._scaler is not None and self._scaler.is_enabled()
        ranks_on_node = launch.ranks_on_node
        if self._replicas is None:
            num_replicas = session.world_size
        else:
            wing = wings.load("sharded.mesh_sharding", "replicas=...")
            sharding: Any = wing.MeshSharding.of_mesh(self._replicas, session.world_size)
            wing.check_algorithm(self._algorithm)
            session.sharding = sharding
            num_replicas = sharding.num_replicas
            ranks_on_node = None
        self._algorithm.check(num_replicas, Conditions(ranks_on_node, scales))
        device = next(self._model.parameters(), torch.empty(0)).device
        session.ranks.check(self._algorithm, num_replicas, device)
        self._join(launch, device)
        net = self._opening.open_network(session.world_size, device)
        self.open(net, ranks_on_node, scales=scales)
        session.sharding.check_ranks(session.meetings)
        self.build(self._model, self._optimizers, self._scaler)

    def _join(self, launch: Launch, device: torch.device) -> None:
        if launch.address is not None:
            self._session.ranks.find_training(launch.address)
            backend = devices.backend_for(device)
            self._opening.join_process_group(
                launch.rank, launch.world_size, launch.address, backend, device
            )

    # ---- checkpoints ----

    def save(self, path: str | Path, **extras: Any) -> None:
        """Saves the consensus, and beside it what each rank needs to go on.

        `torch.load(path, weights_only=True)["state_dict"]` is the consensus model.

        Args:
            path: the path of the file; replicas lie in a folder beside it
            **extras: what `load` is to give back: numbers, texts, tensors, and lists and dicts of
                these; each rank gets its own
        """
        _check_extras(extras)
        self.meet_all("save")
        with failing(self._session):
            sharding = self._session.sharding
            sharding.save(self._session, str(path), lambda: self._state(extras))

    def _state(self, extras: dict[str, Any]) -> dict[str, Any]:
        checkpoint = {
            "state_dict": self._model.state_dict(),
            "optimizer_states": [optimizer.state_dict() for optimizer in self._optimizers],
            "extras": extras,
            "num_batches": self._num_batches,
        }
        if self._scaler is not None:
            checkpoint["scaler"] = self._scaler.state_dict()
        return checkpoint

    def load(self, path: str | Path) -> dict[str, Any]:
        """Goes on from a checkpoint, exactly if as many ranks have saved it, before the first step.

        Otherwise all ranks start from its one model, and from rank 0's optimizers and extras.

        Returns:
            The extras that `save` was given.
        """
        way_out = "call load as the first in `with decentralized(...) as replica:`"
        self._check_inside("load")
        self.check_may_load(way_out)
        self.meet_all("load")
        with failing(self._session):
            return self._load(self._session.text_of_rank_0(str(path)))

    def _load(self, path: str) -> dict[str, Any]:
        session, sharding = self._session, self._session.sharding
        io = files.TorchFiles(maps=sharding.in_rows)
        shared = io.load_checkpoint(path)
        own = files.load_replica(
            io,
            session.meetings,
            path,
            shared,
            self._algorithm,
            announce=self._announce,
            num_shards=sharding.num_shards,
        )
        checkpoint = shared if own is None else own
        sharding.load_model(self._model, checkpoint["state_dict"])
        states = checkpoint.get("optimizer_states", [])
        if len(states) not in (0, len(self._optimizers)):
            raise ValueError(
                f"a checkpoint must be of the same optimizers, got {len(states)} in {path} for "
                f"{len(self._optimizers)} here; give decentralized those that it was saved with"
            )
        for optimizer, state in zip(self._optimizers, states, strict=False):
            sharding.load_optimizer(optimizer, state)
        if self._scaler is not None and "scaler" in checkpoint:
            self._scaler.load_state_dict(checkpoint["scaler"])
        self.build(self._model, self._optimizers, self._scaler, own)
        self._num_batches = checkpoint.get("num_batches", 0)
        if self.claiming is not None:
            self.claiming.restore(checkpoint)
        record.carry_over(checkpoint, trained(session.training).replica)
        extras: dict[str, Any] = checkpoint.get("extras", {})
        return extras

    # ---- leaving ----

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exception is None:
            self.finish()
            return
        lost = self._session.sharding.lost_behind(self._session, exception)
        self.give_up(exception if lost is None else lost)
        if lost is not None:
            raise lost from exception


def _check_model(model: nn.Module) -> None:
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "the model must not be wrapped, got DistributedDataParallel; give the module itself, "
            "whose gradients or weights the algorithm exchanges"
        )


def _check_optimizers(optimizers: Sequence[Any], model: nn.Module) -> None:
    if not optimizers:
        raise ValueError("there must be something to train, got no optimizer; give one or several")
    for optimizer in optimizers:
        try:
            optimizer.register_step_pre_hook(lambda *_: None).remove()
        except AttributeError as err:  # a wrapper has torch's methods, but not what they need
            raise TypeError(
                "an optimizer must be torch's, or a subclass that calls its __init__, got "
                f"{type(optimizer).__name__}; give the optimizer in it, as in optimizer.optimizer"
            ) from err
    # One of several may train what is no part of the model, such as the weights of a loss.
    of_model = set(map(id, model.parameters()))
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    if not any(id(parameter) in of_model for group in groups for parameter in group):
        kinds = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ValueError(
            f"the optimizer must train the model, got {kinds} with {sum(map(len, groups))} "
            f"parameters, none of which is one of the {len(of_model)} of the "
            f"{type(model).__name__}; make it from model.parameters(), and after what gives the "
            "model other parameters"
        )


def _check_extras(extras: dict[str, Any]) -> None:
    """Raises unless plain torch can read the extras with `weights_only=True`."""
    for name, value in extras.items():
        found = _foreign(value)
        if found is not None:
            raise ValueError(
                "what is saved beside the model must be numbers, texts, tensors, or lists and "
                f"dicts of these, got {name} with a {type(found).__name__}; save its state_dict()"
            )


def _foreign(value: Any) -> Any:
    """Returns a value in the extras that is none of these types; None if there is none."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set):
        return next((found for each in value if (found := _foreign(each)) is not None), None)
    plain = value is None or type(value) in (bool, int, float, complex, str, bytes)
    return None if plain or type(value) in (Tensor, nn.Parameter, torch.Size) else value


def _refuse_steps(optimizers: Sequence[Optimizer]) -> None:
    """Has optimizers refuse to step until `_allow_steps` is called."""
    _allow_steps(optimizers)
    for optimizer in optimizers:
        vars(optimizer)[_HELD] = optimizer.register_step_pre_hook(_uncompiled_refusal)


def _allow_steps(optimizers: Sequence[Optimizer]) -> None:
    """Has optimizers step again, whichever `decentralized(...)` has them refuse to."""
    for optimizer in optimizers:
        handle = vars(optimizer).pop(_HELD, None)
        if handle is not None:
            handle.remove()


def _refuse(*args: Any) -> None:
    raise RuntimeError(
        f"steps must be made inside of {_PLACE}, got one outside, which would train this rank "
        "alone; write `with` before decentralized(...), and train in it"
    )


_uncompiled_refusal: Any = torch.compiler.disable(_refuse)  # type: ignore[no-untyped-call]


def _must_be_inside(what: str) -> RuntimeError:
    """Returns the error about a call that needs the other ranks, or this rank's number."""
    return RuntimeError(f"replica.{what} must be called inside of {_PLACE}, got it outside")
