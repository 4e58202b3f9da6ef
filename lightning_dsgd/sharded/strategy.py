"""Sharded replicas under Lightning's Trainer: its ModelParallelStrategy inside a replica.

    mesh of all ranks               replica x data_parallel x tensor_parallel
    what `configure_model` is given           data_parallel x tensor_parallel, of this replica
    mesh of newcomers                     1 x data_parallel x tensor_parallel

The user's `configure_model` is the one for ModelParallelStrategy.  This strategy differs from
the strategies whose ranks hold the whole model:

- ModelParallelStrategy loads a checkpoint into the model after `setup`: the replica is made anew
  then, as its algorithm must begin with what was loaded;
- checkpoints are those of `sharded.together`, and not Lightning's, whose collectives are of all
  ranks;
- the ranks of a replica wait for each other in every layer, so they must have as many batches.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any, Final, Unpack

import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.strategy import Strategy
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from lightning_dsgd import keywords
from lightning_dsgd.agreement import by_rank, everyones
from lightning_dsgd.algorithm import Algorithm, Conditions
from lightning_dsgd.replica.flat import Whole
from lightning_dsgd.session.checkpoint import files
from lightning_dsgd.session.phases import Phase
from lightning_dsgd.sharded.mesh_sharding import MeshSharding, check_algorithm
from lightning_dsgd.sharded.shards import Shards
from lightning_dsgd.sharded.together import blaming, gathered, in_shards, lost_behind, save
from lightning_dsgd.trainer import seams
from lightning_dsgd.trainer.arguments import Evaluated
from lightning_dsgd.trainer.strategy import DecentralizedMixin
from lightning_dsgd.transport import Transport

_NAMES: Final = ("replica", "data_parallel", "tensor_parallel")


class MeshStrategy(ModelParallelStrategy):
    """Lays a ModelParallelStrategy's mesh over one of several replicas."""

    whole_mesh: DeviceMesh | None = None
    """The mesh of all ranks, once they have met; on newcomers, of those of this replica."""

    @property
    @abstractmethod
    def num_replicas(self) -> int:
        """How many copies of the model there are at the start."""

    def setup_environment(self) -> None:
        """Has the ranks meet, and lays the mesh over them."""
        # ModelParallelStrategy's own method would lay a mesh over all ranks.
        Strategy.setup_environment(self)
        self.setup_distributed()
        replicas, *sizes = self._shape()
        # The process group of newcomers is of their replica alone.
        there = replicas * dist.get_world_size() // self.world_size
        shape = there, *sizes
        self.whole_mesh = self._laid(shape)
        self._device_mesh = self.whole_mesh["data_parallel", "tensor_parallel"]
        if self.lightning_module is not None:
            seams.give_mesh(self.lightning_module, self._device_mesh)

    def setup_distributed(self) -> None:
        """Makes the process group, or finds it there."""
        self._setup_distributed()

    def _laid(self, shape: tuple[int, ...]) -> DeviceMesh:
        """Returns the mesh of a shape; all ranks of the process group call it."""
        return init_device_mesh(self.root_device.type, shape, mesh_dim_names=_NAMES)

    def _shape(self) -> tuple[int, int, int]:
        """Returns the number of replicas, and of a replica's ranks along both dimensions."""
        replicas, tensor = self.num_replicas, self._tensor_parallel_size
        data = self._data_parallel_size
        if data == "auto":
            data = max(1, self.world_size // (replicas * int(tensor)))
        if replicas * int(data) * int(tensor) != self.world_size:
            raise ValueError(
                "num_replicas * data_parallel_size * tensor_parallel_size must be the number of "
                f"ranks, got num_replicas={replicas}, data_parallel_size={data} and "
                f"tensor_parallel_size={tensor} with {self.world_size} ranks; start "
                f"{replicas * int(data) * int(tensor)} ranks, or choose other sizes"
            )
        return replicas, int(data), int(tensor)


@keywords.lists(Evaluated)
class ShardedStrategy(DecentralizedMixin, MeshStrategy):
    """Trains replicas of a model that several ranks hold together, by an algorithm between them.

    Inside a replica it is Lightning's ModelParallelStrategy: FSDP2 and tensor parallelism are
    applied in `configure_model`, to `self.device_mesh`.  See the page "Sharded models".

    Args:
        algorithm: how the replicas learn from one another, or its name
        num_replicas: how many there are
        data_parallel_size: how many ranks of a replica see data of their own; "auto": as many as
            there are, for the other sizes
        tensor_parallel_size: how many ranks compute with the same data
        **given: the options in `Evaluated`; with `on_loss="continue"` a lost rank takes its
            replica with it
    """

    _table = Evaluated  # type: ignore[assignment]

    def __init__(
        self,
        algorithm: Algorithm | str,
        num_replicas: int,
        data_parallel_size: int | str = "auto",
        tensor_parallel_size: int = 1,
        **given: Unpack[Evaluated],
    ) -> None:
        _check_size("num_replicas", num_replicas)
        _check_size("tensor_parallel_size", tensor_parallel_size)
        if data_parallel_size != "auto":
            _check_size("data_parallel_size", data_parallel_size)
        max_ranks = dict(given).get("max_ranks")
        if max_ranks is not None:
            raise ValueError(
                "a training of sharded models must have as many replicas as at its start, of which "
                f"a lost one comes back, got max_ranks={max_ranks!r}; leave it out"
            )
        super().__init__(algorithm, **given)
        check_algorithm(self.algorithm)
        self._start_method = "popen"
        self._num_replicas = num_replicas
        self._data_parallel_size = data_parallel_size  # type: ignore[assignment]
        self._tensor_parallel_size = tensor_parallel_size
        self._save_distributed_checkpoint = False
        self._num_builds = 0

    @property
    def num_replicas(self) -> int:
        """How many copies of the model there are at the start."""
        return self._num_replicas

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method != "popen":
            raise ValueError(
                "sharded models must be trained by a script, as Lightning starts their ranks "
                "anew, got an interactive session; put the training into a file"
            )

    # ---- ranks ----

    def _laid(self, shape: tuple[int, ...]) -> DeviceMesh:
        return self.session.ranks.in_row(partial(super()._laid, shape), "lay their mesh")

    @property
    def _mesh(self) -> DeviceMesh:
        if self.whole_mesh is None:
            raise RuntimeError(
                "the mesh is made when the ranks meet, got a question before that; ask it in "
                "configure_model or later"
            )
        return self.whole_mesh

    @property
    def _num_shards(self) -> int:
        """How many ranks hold a replica together."""
        return int(self.world_size) // self._num_replicas

    @property
    def _replica(self) -> int:
        """Which replica of the start this rank holds, or was started again to hold."""
        return int(self.global_rank) // self._num_shards

    @property
    def _sharding(self) -> MeshSharding:
        """Which ranks of the start hold this rank's shard."""
        column = range(self.global_rank % self._num_shards, self.world_size, self._num_shards)
        return MeshSharding(tuple(column), self.world_size)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The sampler's arguments: ranks that compute with the same data get the same."""
        data = self._mesh["data_parallel"]
        rank = self._replica * data.size() + data.get_local_rank()
        first = {"num_replicas": self._num_replicas * data.size(), "rank": rank}
        return self.session.ranks.share(first)

    def _conditions(self) -> Conditions:
        if self._scaler is not None:
            raise ValueError(
                "sharded replicas must be trained without a GradScaler, whose scale would differ "
                'between them, got precision="16-mixed"; use "bf16-mixed" or "bf16-true"'
            )
        return Conditions(None)

    def check_numbers_of_batches(self) -> None:
        """Raises, on every rank, unless all ranks of a replica have equally many batches."""
        super().check_numbers_of_batches()
        if not self.session.takes_part:
            return
        mine = f"{self._replica} {self._trainer.num_training_batches}"
        texts = everyones(self.session.meetings, mine)
        if len(set(texts)) > len({text.split()[0] for text in texts}):
            listed = by_rank([f"{text.split()[1]} batches" for text in texts])
            raise ValueError(
                "the ranks of a replica must have as many batches as each other, as they wait for "
                f"each other in every layer, got {listed}; give them a sampler with "
                "trainer.strategy.distributed_sampler_kwargs, or leave that to the Trainer"
            )

    # ---- training ----

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if self._handed_over is not None:  # which Lightning leaves to `load_checkpoint`
            self._load_states(self._handed_over)

    def _lay_out(self, trainer: Any, net: Transport) -> tuple[Transport, Whole, Transport | None]:
        sharding, module = self._sharding, trainer.lightning_module
        self._num_builds += 1
        self.session.sharding = sharding
        if not self.session.takes_part:  # the others have checked what is to be checked
            return net, Shards(module), net
        net = net.sub(f"build-{self._num_builds}")
        shards = sharding.layout(net, module, self.optimizers, self.algorithm)
        if self._num_builds == 1:
            rank_zero_info(f"Sharded replicas: {shards.describe()}.")
        return sharding.column(net), shards, net

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with blaming(self.session):
            return super().training_step(*args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with blaming(self.session):
            return super().optimizer_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with blaming(self.session):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with blaming(self.session):
            return super().test_step(*args, **kwargs)

    def fail(self, exception: BaseException) -> str:
        # A collective of the shards may also have failed in a hook of the user's.
        return super().fail(lost_behind(self.session, exception) or exception)

    # ---- checkpoints ----

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the model's state in shards; saving gathers whole tensors."""
        assert self.lightning_module is not None
        return dict(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the optimizer's state in shards."""
        inner: Optimizer = getattr(optimizer, "_optimizer", optimizer)
        return dict(inner.state_dict())

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Saves the consensus in whole tensors, and each rank's shards beside it."""
        if storage_options is not None:
            raise TypeError(
                f"{type(self).__name__} writes its files by itself, got "
                f"storage_options={storage_options!r}; leave them out"
            )
        self.session.check_process()
        if self.session.phase is Phase.BROKEN:
            rank_zero_warn(f"{filepath} is not saved: other ranks, with their shards, are gone")
        elif self.session.training is None:
            first = self.session.ranks.members[0]
            if self.session.rank // self._num_shards == first // self._num_shards:
                whole = gathered(checkpoint)
                if self.is_global_zero:
                    files.TorchFiles().save_checkpoint(whole, filepath)
        else:
            has_replicas = "optimizer_states" in checkpoint
            save(self.session, str(filepath), lambda: checkpoint, has_replicas=has_replicas)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads into the model and its optimizers, which are set up; returns the rest."""
        if weights_only is False:
            raise ValueError(
                "a sharded checkpoint must hold tensors and plain values, got weights_only=False; "
                "leave it out"
            )
        if self._handed_over is not None:
            return self._handed_over
        io, sharding, session = files.TorchFiles(maps=True), self._sharding, self.session
        path = session.text_of_rank_0(str(checkpoint_path))
        shared = io.load_checkpoint(path)
        own = None
        if self._trainer_state() == "fit":
            own = files.load_replica(
                io,
                session.meetings,
                path,
                shared,
                self.algorithm,
                announce=rank_zero_info,
                num_shards=sharding.num_shards,
            )
        checkpoint = shared if own is None else own
        self._load_states(checkpoint)
        if session.training is not None:
            self._begin_with_loaded(own)
        return checkpoint

    def _load_states(self, checkpoint: dict[str, Any]) -> None:
        """Takes the states of the model and its optimizers out of a checkpoint, and loads them."""
        sharding, module = self._sharding, self.lightning_module
        assert module is not None
        state = checkpoint.pop("state_dict")
        sharding.load_model(module, state, strict=module.strict_loading)
        states = checkpoint.pop("optimizer_states", [])
        for optimizer, state in zip(self.optimizers, states, strict=False):
            sharding.load_optimizer(optimizer, state)

    def noted(self, checkpoint: dict[str, Any], trainer: Any) -> dict[str, Any]:
        """Returns a checkpoint with this rank's shards, for one that is to hold the same."""
        return dict(in_shards(super().noted(checkpoint, trainer)))

    def _begin_with_loaded(self, own: dict[str, Any] | None) -> None:
        """Makes the replica anew, from what the model and its optimizers hold now."""
        training = self.session.training
        assert training is not None
        training.replica.stop()
        laid_out = self._lay_out(self._trainer, self.session.net.sub("replica"))
        training.replica = self._make_replica(self._trainer, *laid_out)
        if own is None:
            training.replica.synchronize()
        else:
            self._restore(own)


def _check_size(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"{name} must be a number of ranks, at least 1, got {name}={value!r}; try 2"
        )
