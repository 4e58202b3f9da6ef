"""What the strategies of the Trainer and of Fabric share: their options, and how ranks begin."""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_dsgd import devices
from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.algorithms.written import check_algorithm
from lightning_dsgd.session import options
from lightning_dsgd.session.figures import own
from lightning_dsgd.session.opening import Opening
from lightning_dsgd.session.phases import Phase
from lightning_dsgd.trainer import arguments, refusals, seams
from lightning_dsgd.trainer.children import Processes, start_method
from lightning_dsgd.transport.mpi_job import check_launch

_Lightnings: Any = object
"""A strategy of Lightning's, which stands behind this in a class that uses it."""


class LaunchedMixin(_Lightnings):  # type: ignore[misc]
    """Has the ranks of a strategy launched."""

    session: Any
    _start_method: Any

    def __init__(self, algorithm: Algorithm | str, table: type[Any], given: Any) -> None:
        name = type(self).__name__
        if isinstance(algorithm, str):
            algorithm = make_algorithm(algorithm)
        check_algorithm(algorithm, f"{name}({{}})")
        arguments.check(name, algorithm, table, given)
        the_trainers = {n: given[n] for n in arguments.THE_TRAINERS if n in given}
        chosen: Any = {n: v for n, v in given.items() if n not in the_trainers}
        self.in_force = options.choose(name, table, chosen)  # what trackers are told
        options.check_data(self.in_force, algorithm)
        method = self.in_force.get("start_method")
        super().__init__(**the_trainers, **({} if method is None else {"start_method": method}))
        self.algorithm = algorithm
        self._has_start_method = method is not None
        self._opening = Opening(self.in_force, rank_zero_info)
        self._processes = Processes()

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank prints, logs and writes files."""
        opens = self.session.phase is Phase.OPENING
        return bool(super().is_global_zero if opens else self.session.ranks.is_first)

    @property
    def ranks_on_node(self) -> int | None:
        """How many ranks each node has; None where it is not the same number everywhere.

        Ray tells how many ranks there are, and places them on nodes as it finds room.
        """
        is_by_ray = seams.is_a("RayLightningEnvironment", self.cluster_environment)
        if is_by_ray and self.num_processes != self.world_size:
            return None
        return int(self.num_processes)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments of a DistributedSampler that gives this rank its share."""
        given: dict[str, Any] = super().distributed_sampler_kwargs
        if self.ranks_on_node is None:  # else the devices of all nodes are as many
            given |= {"num_replicas": self.world_size, "rank": self.global_rank}
        return given

    def check_number_of_processes(self) -> None:
        """Raises unless each device has a process."""
        if self.ranks_on_node is not None:
            refusals.check_number_of_processes(self.world_size, self.num_nodes, self.num_processes)

    def _configure_launcher(self) -> None:
        # The first hook that knows the devices, and the last before a launcher could start ranks.
        if self.in_force["share_device"]:  # their indices are the ranks' places on the node
            lightnings: Any = self
            own = [devices.present(each) for each in lightnings.parallel_devices]
            lightnings.parallel_devices = own
        check_launch(self.cluster_environment, self.num_nodes, self.num_processes)
        self._start_method = start_method(
            self.cluster_environment, self._start_method, is_chosen=self._has_start_method
        )
        self.session.ranks.check_start(self._start_method)
        super()._configure_launcher()
        self._processes.take_over(self._launcher, self._start_method, self.fail)

    def setup_environment(self) -> None:
        """Has the device ready for this rank; CUDA is asked for its queues before that."""
        devices.take_queues(self.root_device)
        super().setup_environment()

    def _join(self, calls: str | None = None, num_shards: int = 1) -> None:
        """Makes the process group, unless a script has made one, or others train already."""
        session, environment = self.session, self.cluster_environment
        session.rank, session.world_size = self.global_rank, self.world_size
        if torch.distributed.is_initialized() or environment is None:
            return
        address = environment.main_address, environment.main_port
        session.ranks.find_training(address, calls, num_shards)
        if session.takes_part:
            backend = self._get_process_group_backend()
            where = (address, backend, self.root_device)
            self._opening.join_process_group(self.global_rank, self.world_size, *where)

    def count(self, num_samples: int) -> None:
        """Says how many samples the next backward pass has, with weigh_by="samples".

        Call it where a batch does not tell, or to count something else, such as tokens.
        """
        self.session.count(num_samples)

    def communication(self) -> dict[str, float]:
        """Returns what this rank has sent and waited for so far, and the algorithm's figures."""
        return own(self.session)

    def fail(self, exception: BaseException) -> str:
        """Ends this rank's part, for a reason that the others are told; returns the reason."""
        if self._processes.is_parent_alone and not self.session.is_fork:
            self._processes.end_forked()
            return ""
        reason = self.session.fail(exception)
        return f"[rank {self.global_rank}] {reason}"
