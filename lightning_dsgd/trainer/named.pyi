# Made by `python docs/stub.py` from the algorithms' dataclasses.
from collections.abc import Mapping
from inspect import Parameter
from typing import Any, Final

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.trainer.strategy import DecentralizedStrategy

__all__: list[str] = [
    "STRATEGIES",
    "WAGMAStrategy",
    "EagerSGDStrategy",
    "HPSGDStrategy",
    "SGPStrategy",
    "ADPSGDStrategy",
    "PopSGDStrategy",
    "LocalSGDStrategy",
    "DiLoCoStrategy",
    "DPSGDStrategy",
    "OkTopkStrategy",
    "TopkAllgatherStrategy",
    "TopkDSAStrategy",
    "GTopkStrategy",
    "GaussianTopkStrategy",
    "AllReduceStrategy",
    "NoSyncStrategy",
]

def named(algorithm: type[Algorithm], base: type, module: str) -> type: ...
def options(base: type) -> list[Parameter]: ...
def make_all(base: type, module: str) -> dict[str, type]: ...
def register(package: str, strategies: Mapping[str, type]) -> None: ...

STRATEGIES: Final[dict[str, type[DecentralizedStrategy]]]

class WAGMAStrategy(DecentralizedStrategy):
    """Averages the weights in small, changing groups that do not wait for late ranks.

    Every `sync_period` steps all ranks average together.

    Memory per rank in addition to plain training (|x|: the weights, |g|: the gradient): 2 |x|; 3
    |x| with `overlap`, on a device 6 |x|; none with `wait_avoiding=False`; with a `wire_dtype` |x|
    more, 4 |x| during a sum; with `hierarchical` that of a shard, and |g|.

    Args:
        group_size: number of ranks in a group; None means the power of two nearest to
            sqrt(world_size): 2 for 2 to 7 ranks, 4 for 8 to 31
        sync_period: number of steps from one global average to the next
        wait_avoiding: if False, wait for every rank of the group instead of using the weights that
            a late rank published last
        dynamic_groups: if False, use the groups of the first step in every step
        grace_s: seconds that a started round waits for this rank before it uses the rank's last
            published weights; None means an eighth of the duration of its last step
        overlap: if True, do not wait for the group's average; apply it when it arrives
        rule: how a late rank merges its group's average; "conserving" keeps all updates, "paper"
            loses a part of them
        group_period: number of steps from one average to the next, in groups or global;
            `sync_period` must be a multiple of it
        wire_dtype: data type of what is sent; "float32" does not round, "int8" and "int4" send a
            byte and half a byte per weight; what is rounded off stays in the weights of the rank
            that has rounded
        hierarchical: if True, average gradients within a node, and have each rank average one shard
            of the weights with ranks of other nodes; groups are of nodes
        node_size: number of ranks per node, for `hierarchical`; the ranks of a node are
            consecutive; None means the Trainer's `devices`
        scale_steps: if True, steps are scaled so that their mean over the ranks is as large as one
            of them, for Adam, AdamW and other optimizers that divide by a second moment; takes |x|
            more memory, and |x| / 30 more is sent
        transport: "process_group" (TCP), "mpi", or "auto", which takes MPI where mpiexec or srun
            has started the ranks as one MPI world that mpi4py can join, else TCP
        timeout_s: how long a rank waits for another before it gives up
        heartbeat_timeout_s: after how much silence a rank counts as lost
        startup_timeout_s: how long a rank waits for all others to start, and then to connect
        evaluate: "consensus" validates, tests and monitors the weights that all ranks agree on;
            "local" each rank's own
        average_buffers: whether BatchNorm statistics are averaged with the weights; else rank 0's
            are evaluated and saved
        check_finite: looks for NaN and inf in gradients and weights before they are sent; one more
            pass
        on_loss: "end" ends the job, on all ranks, when one is lost; "continue" goes on without it,
            on CPUs: see the page "Going on without a rank"
        min_ranks: with on_loss="continue", how many ranks must be left; None means more than half
            of those before the loss. With shards a number counts the ranks in whole replicas, and
            None all that are left to vote, those of the broken replica included
        max_ranks: with on_loss="continue", how many ranks there may be, where others join; None
            means as many as at the start
        **kwargs: what Lightning's own strategies take: cluster_environment, checkpoint_io,
            precision_plugin, process_group_backend, timeout, start_method (left out, an interactive
            session forks its ranks)
    """

    def __init__(
        self,
        group_size: int | None = None,
        sync_period: int = 100,
        wait_avoiding: bool = True,
        dynamic_groups: bool = True,
        grace_s: float | None = None,
        overlap: bool = False,
        rule: str = "conserving",
        group_period: int = 1,
        wire_dtype: str = "float32",
        hierarchical: bool = False,
        node_size: int | None = None,
        scale_steps: bool = False,
        *,
        transport: str = "auto",
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 20.0,
        startup_timeout_s: float = 300.0,
        evaluate: str = "consensus",
        average_buffers: bool = True,
        check_finite: bool = False,
        on_loss: str = "end",
        min_ranks: int | None = None,
        max_ranks: int | None = None,
        **kwargs: Any,
    ) -> None: ...

class EagerSGDStrategy(DecentralizedStrategy):
    """Averages the gradients without waiting for late ranks; theirs join the next round.

    Memory per rank in addition to plain training (|x|: the weights, |g|: the gradient): 4 |g|.

    Args:
        quorum: which rank starts a round: the first to arrive ("solo"), or one drawn at random for
            each round ("majority")
        sync_period: number of rounds from one average of the weights over all ranks to the next;
            None means never
        grace_s: seconds that a started round waits for this rank before it contributes only what is
            pending; None means an eighth of the duration of its last step
        transport: "process_group" (TCP), "mpi", or "auto", which takes MPI where mpiexec or srun
            has started the ranks as one MPI world that mpi4py can join, else TCP
        timeout_s: how long a rank waits for another before it gives up
        heartbeat_timeout_s: after how much silence a rank counts as lost
        startup_timeout_s: how long a rank waits for all others to start, and then to connect
        evaluate: "consensus" validates, tests and monitors the weights that all ranks agree on;
            "local" each rank's own
        average_buffers: whether BatchNorm statistics are averaged with the weights; else rank 0's
            are evaluated and saved
        check_finite: looks for NaN and inf in gradients and weights before they are sent; one more
            pass
        on_loss: "end" ends the job, on all ranks, when one is lost; "continue" goes on without it,
            on CPUs: see the page "Going on without a rank"
        min_ranks: with on_loss="continue", how many ranks must be left; None means more than half
            of those before the loss. With shards a number counts the ranks in whole replicas, and
            None all that are left to vote, those of the broken replica included
        max_ranks: with on_loss="continue", how many ranks there may be, where others join; None
            means as many as at the start
        **kwargs: what Lightning's own strategies take: cluster_environment, checkpoint_io,
            precision_plugin, process_group_backend, timeout, start_method (left out, an interactive
            session forks its ranks)
    """

    def __init__(
        self,
        quorum: str = "majority",
        sync_period: int | None = None,
        grace_s: float | None = None,
        *,
        transport: str = "auto",
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 20.0,
        startup_timeout_s: float = 300.0,
        evaluate: str = "consensus",
        average_buffers: bool = True,
        check_finite: bool = False,
        on_loss: str = "end",
        min_ranks: int | None = None,
        max_ranks: int | None = None,
        **kwargs: Any,
    ) -> None: ...

class HPSGDStrategy(DecentralizedStrategy):
    """Averages the weights in the background and merges the result while training continues.

    Memory per rank in addition to plain training (|x|: the weights, |g|: the gradient): 2 |x|; 4
    |x| with an outer optimizer or a `wire_dtype`, 5 |x| with both.

    Args:
        max_local_steps: a rank waits once it has made this many steps since the last
            synchronisation; None means never
        outer_lr: learning rate of the outer optimizer, which steps once per synchronisation
        outer_momentum: Nesterov momentum of the outer optimizer
        wire_dtype: data type of what is sent; "float32" does not round, "int8" and "int4" send a
            byte and half a byte per weight; what is rounded off is sent the next time
        scale_steps: if True, steps are scaled so that their mean over the ranks is as large as one
            of them, for Adam, AdamW and other optimizers that divide by a second moment; takes |x|
            more memory, and |x| / 30 more is sent
        transport: "process_group" (TCP), "mpi", or "auto", which takes MPI where mpiexec or srun
            has started the ranks as one MPI world that mpi4py can join, else TCP
        timeout_s: how long a rank waits for another before it gives up
        heartbeat_timeout_s: after how much silence a rank counts as lost
        startup_timeout_s: how long a rank waits for all others to start, and then to connect
        evaluate: "consensus" validates, tests and monitors the weights that all ranks agree on;
            "local" each rank's own
        average_buffers: whether BatchNorm statistics are averaged with the weights; else rank 0's
            are evaluated and saved
        check_finite: looks for NaN and inf in gradients and weights before they are sent; one more
            pass
        on_loss: "end" ends the job, on all ranks, when one is lost; "continue" goes on without it,
            on CPUs: see the page "Going on without a rank"
        min_ranks: with on_loss="continue", how many ranks must be left; None means more than half
            of those before the loss. With shards a number counts the ranks in whole replicas, and
            None all that are left to vote, those of the broken replica included
        max_ranks: with on_loss="continue", how many ranks there may be, where others join; None
            means as many as at the start
        **kwargs: what Lightning's own strategies take: cluster_environment, checkpoint_io,
            precision_plugin, process_group_backend, timeout, start_method (left out, an interactive
            session forks its ranks)
    """

    def __init__(
        self,
        max_local_steps: int | None = None,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        wire_dtype: str = "float32",
        scale_steps: bool = False,
        *,
        transport: str = "auto",
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 20.0,
        startup_timeout_s: float = 300.0,
        evaluate: str = "consensus",
        average_buffers: bool = True,
        check_finite: bool = False,
        on_loss: str = "end",
        min_ranks: int | None = None,
        max_ranks: int | None = None,
        **kwargs: Any,
    ) -> None: ...

class SGPStrategy(DecentralizedStrategy):
    """Sends a share of the weights to another rank in every step, to a different one each time.

    A message that arrives early stays in memory until its step.

    Memory per rank in addition to plain training (|x|: the weights, |g|: the gradient): 2 |x|; 3
    |x| with `overlap`, random graphs or different numbers of batches; |g| more with `hierarchical`.

    Args:
        num_peers: number of ranks that a rank sends to in each step; fewer where the graph has
            fewer
        overlap: number of steps that a message may be late; 0 means to wait for the messages of
            this step
        hierarchical: if True, average gradients within a node, and exchange weights between nodes
            only
        topology: the graph: exponential, ring, bipartite_exponential, complete, random_exponential,
            random
        node_size: number of ranks per node, for `hierarchical`; the ranks of a node are
            consecutive; None means the Trainer's `devices`
        wire_dtype: data type of what is sent; "float32" does not round, "int8" and "int4" send a
            byte and half a byte per weight; what is rounded off stays with the rank that sends
        scale_steps: if True, steps are scaled so that their mean over the ranks is as large as one
            of them, for Adam, AdamW and other optimizers that divide by a second moment; takes |x|
            more memory, and |x| / 30 more is sent
        transport: "process_group" (TCP), "mpi", or "auto", which takes MPI where mpiexec or srun
            has started the ranks as one MPI world that mpi4py can join, else TCP
        timeout_s: how long a rank waits for another before it gives up
        heartbeat_timeout_s: after how much silence a rank counts as lost
        startup_timeout_s: how long a rank waits for all others to start, and then to connect
        evaluate: "consensus" validates, tests and monitors the weights that all ranks agree on;
            "local" each rank's own
        average_buffers: whether BatchNorm statistics are averaged with the weights; else rank 0's
            are evaluated and saved
        check_finite: looks for NaN and inf in gradients and weights before they are sent; one more
            pass
        on_loss: "end" ends the job, on all ranks, when one is lost; "continue" goes on without it,
            on CPUs: see the page "Going on without a rank"
        min_ranks: with on_loss="continue", how many ranks must be left; None means more than half
            of those before the loss. With shards a number counts the ranks in whole replicas, and
            None all that are left to vote, those of the broken replica included
        max_ranks: with on_loss="continue", how many ranks there may be, where others join; None
            means as many as at the start
        **kwargs: what Lightning's own strategies take: cluster_environment, checkpoint_io,
            precision_plugin, process_group_backend, timeout, start_method (left out, an interactive
            session forks its ranks)
    """

    def __init__(
        self,
        num_peers: int = 1,
        overlap: int = 0,
        hierarchical: bool = False,
        topology: str = "exponential",
        node_size: int | None = None,
        wire_dtype: str = "float32",
        scale_steps: bool = False,
        *,
        transport: str = "auto",
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 20.0,
        startup_timeout_s: float = 300.0,
        evaluate: str = "consensus",
        average_buffers: bool = True,
        check_finite: bool = False,
        on_loss: str = "end",
        min_ranks: int | None = None,
        max_ranks: int | None = None,
        **kwargs: Any,
    ) -> None: ...

class ADPSGDStrategy(DecentralizedStrategy):
    """Averages the weights with random neighbours in the background, while training continues.

    Memory per rank in addition to plain training (|x|: the weights, |g|: the gradient): 2 |x|; 4
    |x| during an exchange; on a device 2 |x| more.

    Args:
        seed: seed of the random choice of neighbours
        wire_dtype: data type of what is sent; "float32" does not round, "int8" and "int4" send a
            byte and half a byte per weight; what is rounded off is not averaged
        scale_steps: if True, steps are scaled so that their mean over the ranks is as large as one
            of them, for Adam, AdamW and other optimizers that divide by a second moment; takes |x|
            more memory, and |x| / 30 more is sent
        transport: "process_group" (TCP), "mpi", or "auto", which takes MPI where mpiexec or srun
            has started the ranks as one MPI world that mpi4py can join, else TCP
        timeout_s: how long a rank waits for another before it gives up
        heartbeat_timeout_s: after how much silence a rank counts as lost
        startup_timeout_s: how long a rank waits for all others to start, and then to connect
        evaluate: "consensus" validates, tests and monitors the weights that all ranks agree on;
            "local" each rank's own
        average_buffers: whether BatchNorm statistics are averaged with the weights; else rank 0's
            are evaluated and saved
        check_finite: looks for NaN and inf in gradients and weights before they are sent; one more
            pass
        on_loss: "end" ends the job, on all ranks, when one is lost; "continue" goes on without it,
            on CPUs: see the page "Going on without a rank"
        min_ranks: with on_loss="continue", how many ranks must be left; None means more than half
            of those before the loss. With shards a number counts the ranks in whole replicas, and
            None all that are left to vote, those of the broken replica included
        max_ranks: with on_loss="continue", how many ranks there may be, where others join; None
            means as many as at the start
        **kwargs: what Lightning's own strategies take: cluster_environment, checkpoint_io,
            precision_plugin, process_group_backend, timeout, start_method (left out, an interactive
            session forks its ranks)
    """

    def __init__(
        self,
        seed: int = 0,
        wire_dtype: str = "float32",
        scale_steps: bool = False,
        *,
        transport: str = "auto",
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 20.0,
        startup_timeout_s: float = 300.0,
        evaluate: str = "consensus",
        average_buffers: bool = True,
        check_finite: bool = False,
        on_loss: str = "end",
        min_ranks: int | None = None,
        max_ranks: int | None = None,
        **kwargs: Any,
    ) -> None: ...

class PopSGDStrategy(DecentralizedStrategy):
    """Averages the weights of random pairs of ranks; no rank waits for another.

    Memory per rank in addition to plain training (|x|: the weights, |g|: the gradient): 2 |x|, 5
    |x| during an exchange, on a device 2 |x| more; |x| with `blocking`; |x| more with a
    `wire_dtype`.

    Args:
        local_steps: number of steps from one exchange to the next
        blocking: if True, wait for the partner; if False, use the weights that it published last
        topology: which ranks can be partners: any two ("complete"), or neighbours on a ring
            ("cycle")
        wire_dtype: data type of the weights that are sent; "float32" sends them unchanged,
            "bfloat16" rounded, "int8" as one byte per weight, relative to the receiver's
        seed: seed of the random pairs
        scale_steps: if True, steps are scaled so that their mean over the ranks is as large as one
            of them, for Adam, AdamW and other optimizers that divide by a second moment; takes |x|
            more memory, and |x| / 30 more is sent
        transport: "process_group" (TCP), "mpi", or "auto", which takes MPI where mpiexec or srun
            has started the ranks as one MPI world that mpi4py can join, else TCP
        timeout_s: how long a rank waits for another before it gives up
        heartbeat_timeout_s: after how much silence a rank counts as lost
        startup_timeout_s: how long a rank waits for all others to start, and then to connect
        evaluate: "consensus" validates, tests and monitors the weights that all ranks agree on;
            "local" each rank's own
        average_buffers: whether BatchNorm statistics are averaged with the weights; else rank 0's
            are evaluated and saved
        check_finite: looks for NaN and inf in gradients and weights before they are sent; one more
            pass
        on_loss: "end" ends the job, on all ranks, when one is lost; "continue" goes on without it,
            on CPUs: see the page "Going on without a rank"
        min_ranks: with on_loss="continue", how many ranks must be left; None means more than half
            of those before the loss. With shards a number counts the ranks in whole replicas, and
            None all that are left to vote, those of the broken replica included
        max_ranks: with on_loss="continue", how many ranks there may be, where others join; None
            means as many as at the start
        **kwargs: what Lightning's own strategies take: cluster_environment, checkpoint_io,
            precision_plugin, process_group_backend, timeout, start_method (left out, an interactive
            session forks its ranks)
    """

    def __init__(
        self,
        local_steps: int = 1,
        blocking: bool = False,
        topology: str = "complete",
        wire_dtype: str = "float32",
        seed: int = 0,
        scale_steps: bool = False,
        *,
        transport: str = "auto",
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 20.0,
        startup_timeout_s: float = 300.0,
        evaluate: str = "consensus",
        average_buffers: bool = True,
        check_finite: bool = False,
        on_loss: str = "end",
        min_ranks: int | None = None,
        max_ranks: int | None = None,
        **kwargs: Any,
    ) -> None: ...

class LocalSGDStrategy(DecentralizedStrategy):
    """Averages the weights of all ranks every `sync_period` steps.

    Memory per rank in addition to plain training (|x|: the weights, |g|: the gradient): none; |x|
    with an outer optimizer, |x| more with momentum, 2 |x| with a `wire_dtype`, 2 |x| /
    `num_fragments` with `overlap_steps`.

    Args:
        sync_period: number of steps from one average to the next
        outer_lr: learning rate of the outer optimizer, which steps once per average
        outer_momentum: momentum of the outer optimizer
        outer_nesterov: whether that momentum is Nesterov's, as in DiLoCo
        num_fragments: number of pieces into which the weights are cut; each is averaged once per
            period, one after the other, so that fewer bytes are sent at once
        overlap_steps: number of steps that a rank makes while a sum travels; 0 waits for the sum
        wire_dtype: data type of what is sent; "float32" does not round, "int8" and "int4" send a
            byte and half a byte per weight; what is rounded off is sent the next time
        scale_steps: if True, steps are scaled so that their mean over the ranks is as large as one
            of them, for Adam, AdamW and other optimizers that divide by a second moment; takes |x|
            more memory, and |x| / 30 more is sent
        transport: "process_group" (TCP), "mpi", or "auto", which takes MPI where mpiexec or srun
            has started the ranks as one MPI world that mpi4py can join, else TCP
        timeout_s: how long a rank waits for another before it gives up
        heartbeat_timeout_s: after how much silence a rank counts as lost
        startup_timeout_s: how long a rank waits for all others to start, and then to connect
        evaluate: "consensus" validates, tests and monitors the weights that all ranks agree on;
            "local" each rank's own
        average_buffers: whether BatchNorm statistics are averaged with the weights; else rank 0's
            are evaluated and saved
        check_finite: looks for NaN and inf in gradients and weights before they are sent; one more
            pass
        on_loss: "end" ends the job, on all ranks, when one is lost; "continue" goes on without it,
            on CPUs: see the page "Going on without a rank"
        min_ranks: with on_loss="continue", how many ranks must be left; None means more than half
            of those before the loss. With shards a number counts the ranks in whole replicas, and
            None all that are left to vote, those of the broken replica included
        max_ranks: with on_loss="continue", how many ranks there may be, where others join; None
            means as many as at the start
        **kwargs: what Lightning's own strategies take: cluster_environment, checkpoint_io,
            precision_plugin, process_group_backend, timeout, start_method (left out, an interactive
            session forks its ranks)
    """

    def __init__(
        self,
        sync_period: int = 8,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        outer_nesterov: bool = True,
        num_fragments: int = 1,
        overlap_steps: int = 0,
        wire_dtype: str = "float32",
        scale_steps: bool = False,
        *,
        transport: str = "auto",
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 20.0,
        startup_timeout_s: float = 300.0,
        evaluate: str = "consensus",
        average_buffers: bool = True,
        check_finite: bool = False,
        on_loss: str = "end",
        min_ranks: int | None = None,
        max_ranks: int | None = None,
        **kwargs: Any,
    ) -> None: ...

class DiLoCoStrategy(DecentralizedStrategy):
    """Averages the progress of hundreds of local steps, and steps with outer Nesterov momentum.

    Memory per rank in addition to plain training (|x|: the weights, |g|: the gradient): 2 |x|; |x|
    more with a `wire_dtype`, 2 |x| / `num_fragments` with `overlap_steps`.

    Args:
        sync_period: number of steps from one average to the next
        outer_lr: learning rate of the outer optimizer, which steps once per average
        outer_momentum: momentum of the outer optimizer
        outer_nesterov: whether that momentum is Nesterov's, as in DiLoCo
        num_fragments: number of pieces into which the weights are cut; each is averaged once per
            period, one after the other, so that fewer bytes are sent at once
        overlap_steps: number of steps that a rank makes while a sum travels; 0 waits for the sum
        wire_dtype: data type of what is sent; "float32" does not round, "int8" and "int4" send a
            byte and half a byte per weight; what is rounded off is sent the next time
        scale_steps: if True, steps are scaled so that their mean over the ranks is as large as one
            of them, for Adam, AdamW and other optimizers that divide by a second moment; takes |x|
            more memory, and |x| / 30 more is sent
        transport: "process_group" (TCP), "mpi", or "auto", which takes MPI where mpiexec or srun
            has started the ranks as one MPI world that mpi4py can join, else TCP
        timeout_s: how long a rank waits for another before it gives up
        heartbeat_timeout_s: after how much silence a rank counts as lost
        startup_timeout_s: how long a rank waits for all others to start, and then to connect
        evaluate: "consensus" validates, tests and monitors the weights that all ranks agree on;
            "local" each rank's own
        average_buffers: whether BatchNorm statistics are averaged with the weights; else rank 0's
            are evaluated and saved
        check_finite: looks for NaN and inf in gradients and weights before they are sent; one more
            pass
        on_loss: "end" ends the job, on all ranks, when one is lost; "continue" goes on without it,
            on CPUs: see the page "Going on without a rank"
        min_ranks: with on_loss="continue", how many ranks must be left; None means more than half
            of those before the loss. With shards a number counts the ranks in whole replicas, and
            None all that are left to vote, those of the broken replica included
        max_ranks: with on_loss="continue", how many ranks there may be, where others join; None
            means as many as at the start
        **kwargs: what Lightning's own strategies take: cluster_environment, checkpoint_io,
            precision_plugin, process_group_backend, timeout, start_method (left out, an interactive
            session forks its ranks)
    """

    def __init__(
        self,
        sync_period: int = 500,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        outer_nesterov: bool = True,
        num_fragments: int = 1,
        overlap_steps: int = 0,
        wire_dtype: str = "float32",
        scale_steps: bool = False,
        *,
        transport: str = "auto",
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 20.0,
        startup_timeout_s: float = 300.0,
        evaluate: str = "consensus",
        average_buffers: bool = True,
        check_finite: bool = False,
        on_loss: str = "end",
        min_ranks: int | None = None,
        max_ranks: int | None = None,
        **kwargs: Any,
    ) -> None: ...

class DPSGDStrategy(DecentralizedStrategy):
    """Averages the weights with the two neighbours on a ring in every step.

    Memory per rank in addition to plain training (|x|: the weights, |g|: the gradient): 2 |x|.

    Args:
        topology: the communication graph; the paper's is the only one
        transport: "process_group" (TCP), "mpi", or "auto", which takes MPI where mpiexec or srun
            has started the ranks as one MPI world that mpi4py can join, else TCP
        timeout_s: how long a rank waits for another before it gives up
        heartbeat_timeout_s: after how much silence a rank counts as lost
        startup_timeout_s: how long a rank waits for all others to start, and then to connect
        evaluate: "consensus" validates, tests and monitors the weights that all ranks agree on;
            "local" each rank's own
        average_buffers: whether BatchNorm statistics are averaged with the weights; else rank 0's
            are evaluated and saved
        check_finite: looks for NaN and inf in gradients and weights before they are sent; one more
            pass
        on_loss: "end" ends the job, on all ranks, when one is lost; "continue" goes on without it,
            on CPUs: see the page "Going on without a rank"
        min_ranks: with on_loss="continue", how many ranks must be left; None means more than half
            of those before the loss. With shards a number counts the ranks in whole replicas, and
            None all that are left to vote, those of the broken replica included
        max_ranks: with on_loss="continue", how many ranks there may be, where others join; None
            means as many as at the start
        **kwargs: what Lightning's own strategies take: cluster_environment, checkpoint_io,
            precision_plugin, process_group_backend, timeout, start_method (left out, an interactive
            session forks its ranks)
    """

    def __init__(
        self,
        topology: str = "ring",
        *,
        transport: str = "auto",
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 20.0,
        startup_timeout_s: float = 300.0,
        evaluate: str = "consensus",
        average_buffers: bool = True,
        check_finite: bool = False,
        on_loss: str = "end",
        min_ranks: int | None = None,
        max_ranks: int | None = None,
        **kwargs: Any,
    ) -> None: ...

class OkTopkStrategy(DecentralizedStrategy):
    """All-reduces only the k largest gradient entries; the bytes sent hardly grow with P.

    The rest of the gradient is kept in a residual, in fp32 or wider, and added to the next one.

    Memory per rank in addition to plain training (|x|: the weights, |g|: the gradient): 2 |g|, |g|
    / P to |g| for the region, and 1 byte per element.

    Args:
        density: share of the gradient entries that is selected in an exchange, k / n; None means
            0.01 for each of the `local_steps`, at most 1
        local_steps: number of steps from one exchange to the next; with more than 1, what these
            steps have changed in the weights takes the place of the gradient
        scale_steps: if True, steps are scaled so that their mean over the ranks is as large as one
            of them, for Adam, AdamW and other optimizers that divide by a second moment; takes |x|
            more memory, and |x| / 30 more is sent
        threshold_period: number of exchanges from one exact threshold to the next
        repartition_period: number of exchanges after which the regions are divided again
        balance_ratio: entries are spread evenly over the ranks before the all-gather if one rank
            has more than this many times the mean
        warmup_steps: number of steps at the start whose exchanges are dense
        wire_dtype: data type of what is sent; "float32" does not round, "int8" and "int4" send a
            byte and half a byte per value; what is rounded off stays in the residual
        transport: "process_group" (TCP), "mpi", or "auto", which takes MPI where mpiexec or srun
            has started the ranks as one MPI world that mpi4py can join, else TCP
        timeout_s: how long a rank waits for another before it gives up
        heartbeat_timeout_s: after how much silence a rank counts as lost
        startup_timeout_s: how long a rank waits for all others to start, and then to connect
        evaluate: "consensus" validates, tests and monitors the weights that all ranks agree on;
            "local" each rank's own
        average_buffers: whether BatchNorm statistics are averaged with the weights; else rank 0's
            are evaluated and saved
        check_finite: looks for NaN and inf in gradients and weights before they are sent; one more
            pass
        on_loss: "end" ends the job, on all ranks, when one is lost; "continue" goes on without it,
            on CPUs: see the page "Going on without a rank"
        min_ranks: with on_loss="continue", how many ranks must be left; None means more than half
            of those before the loss. With shards a number counts the ranks in whole replicas, and
            None all that are left to vote, those of the broken replica included
        max_ranks: with on_loss="continue", how many ranks there may be, where others join; None
            means as many as at the start
        **kwargs: what Lightning's own strategies take: cluster_environment, checkpoint_io,
            precision_plugin, process_group_backend, timeout, start_method (left out, an interactive
            session forks its ranks)
    """

    def __init__(
        self,
        density: float | None = None,
        local_steps: int = 1,
        scale_steps: bool = False,
        threshold_period: int = 32,
        repartition_period: int = 64,
        balance_ratio: float = 4.0,
        warmup_steps: int = 0,
        wire_dtype: str = "float32",
        *,
        transport: str = "auto",
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 20.0,
        startup_timeout_s: float = 300.0,
        evaluate: str = "consensus",
        average_buffers: bool = True,
        check_finite: bool = False,
        on_loss: str = "end",
        min_ranks: int | None = None,
        max_ranks: int | None = None,
        **kwargs: Any,
    ) -> None: ...

class TopkAllgatherStrategy(DecentralizedStrategy):
    """All-gathers the k largest gradient entries of each rank and sums them.

    Memory per rank in addition to plain training (|x|: the weights, |g|: the gradient): 2 |g|.

    Args:
        density: share of the gradient entries that is selected in an exchange, k / n; None means
            0.01 for each of the `local_steps`, at most 1
        local_steps: number of steps from one exchange to the next; with more than 1, what these
            steps have changed in the weights takes the place of the gradient
        scale_steps: if True, steps are scaled so that their mean over the ranks is as large as one
            of them, for Adam, AdamW and other optimizers that divide by a second moment; takes |x|
            more memory, and |x| / 30 more is sent
        transport: "process_group" (TCP), "mpi", or "auto", which takes MPI where mpiexec or srun
            has started the ranks as one MPI world that mpi4py can join, else TCP
        timeout_s: how long a rank waits for another before it gives up
        heartbeat_timeout_s: after how much silence a rank counts as lost
        startup_timeout_s: how long a rank waits for all others to start, and then to connect
        evaluate: "consensus" validates, tests and monitors the weights that all ranks agree on;
            "local" each rank's own
        average_buffers: whether BatchNorm statistics are averaged with the weights; else rank 0's
            are evaluated and saved
        check_finite: looks for NaN and inf in gradients and weights before they are sent; one more
            pass
        on_loss: "end" ends the job, on all ranks, when one is lost; "continue" goes on without it,
            on CPUs: see the page "Going on without a rank"
        min_ranks: with on_loss="continue", how many ranks must be left; None means more than half
            of those before the loss. With shards a number counts the ranks in whole replicas, and
            None all that are left to vote, those of the broken replica included
        max_ranks: with on_loss="continue", how many ranks there may be, where others join; None
            means as many as at the start
        **kwargs: what Lightning's own strategies take: cluster_environment, checkpoint_io,
            precision_plugin, process_group_backend, timeout, start_method (left out, an interactive
            session forks its ranks)
    """

    def __init__(
        self,
        density: float | None = None,
        local_steps: int = 1,
        scale_steps: bool = False,
        *,
        transport: str = "auto",
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 20.0,
        startup_timeout_s: float = 300.0,
        evaluate: str = "consensus",
        average_buffers: bool = True,
        check_finite: bool = False,
        on_loss: str = "end",
        min_ranks: int | None = None,
        max_ranks: int | None = None,
        **kwargs: Any,
    ) -> None: ...

class TopkDSAStrategy(DecentralizedStrategy):
    """Sums the k largest gradient entries by regions, then all-gathers the regions (SparCML).

    A region is sent dense as soon as that takes fewer bytes.

    Memory per rank in addition to plain training (|x|: the weights, |g|: the gradient): 2 |g|, and
    |g| / P for the region.

    Args:
        density: share of the gradient entries that is selected in an exchange, k / n; None means
            0.01 for each of the `local_steps`, at most 1
        local_steps: number of steps from one exchange to the next; with more than 1, what these
            steps have changed in the weights takes the place of the gradient
        scale_steps: if True, steps are scaled so that their mean over the ranks is as large as one
            of them, for Adam, AdamW and other optimizers that divide by a second moment; takes |x|
            more memory, and |x| / 30 more is sent
        transport: "process_group" (TCP), "mpi", or "auto", which takes MPI where mpiexec or srun
            has started the ranks as one MPI world that mpi4py can join, else TCP
        timeout_s: how long a rank waits for another before it gives up
        heartbeat_timeout_s: after how much silence a rank counts as lost
        startup_timeout_s: how long a rank waits for all others to start, and then to connect
        evaluate: "consensus" validates, tests and monitors the weights that all ranks agree on;
            "local" each rank's own
        average_buffers: whether BatchNorm statistics are averaged with the weights; else rank 0's
            are evaluated and saved
        check_finite: looks for NaN and inf in gradients and weights before they are sent; one more
            pass
        on_loss: "end" ends the job, on all ranks, when one is lost; "continue" goes on without it,
            on CPUs: see the page "Going on without a rank"
        min_ranks: with on_loss="continue", how many ranks must be left; None means more than half
            of those before the loss. With shards a number counts the ranks in whole replicas, and
            None all that are left to vote, those of the broken replica included
        max_ranks: with on_loss="continue", how many ranks there may be, where others join; None
            means as many as at the start
        **kwargs: what Lightning's own strategies take: cluster_environment, checkpoint_io,
            precision_plugin, process_group_backend, timeout, start_method (left out, an interactive
            session forks its ranks)
    """

    def __init__(
        self,
        density: float | None = None,
        local_steps: int = 1,
        scale_steps: bool = False,
        *,
        transport: str = "auto",
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 20.0,
        startup_timeout_s: float = 300.0,
        evaluate: str = "consensus",
        average_buffers: bool = True,
        check_finite: bool = False,
        on_loss: str = "end",
        min_ranks: int | None = None,
        max_ranks: int | None = None,
        **kwargs: Any,
    ) -> None: ...

class GTopkStrategy(DecentralizedStrategy):
    """Sums the k largest gradient entries pairwise up a binomial tree and keeps k of each sum.

    Differs from the paper: any P; what a rank drops from a sum goes into its own residual.  (The
    paper returns a rank's entry to it if its index is not in the result.  So it loses what was
    dropped in one branch at an index that reached the root through another.)

    Memory per rank in addition to plain training (|x|: the weights, |g|: the gradient): 2 |g|.

    Args:
        density: share of the gradient entries that is selected in an exchange, k / n; None means
            0.01 for each of the `local_steps`, at most 1
        local_steps: number of steps from one exchange to the next; with more than 1, what these
            steps have changed in the weights takes the place of the gradient
        scale_steps: if True, steps are scaled so that their mean over the ranks is as large as one
            of them, for Adam, AdamW and other optimizers that divide by a second moment; takes |x|
            more memory, and |x| / 30 more is sent
        transport: "process_group" (TCP), "mpi", or "auto", which takes MPI where mpiexec or srun
            has started the ranks as one MPI world that mpi4py can join, else TCP
        timeout_s: how long a rank waits for another before it gives up
        heartbeat_timeout_s: after how much silence a rank counts as lost
        startup_timeout_s: how long a rank waits for all others to start, and then to connect
        evaluate: "consensus" validates, tests and monitors the weights that all ranks agree on;
            "local" each rank's own
        average_buffers: whether BatchNorm statistics are averaged with the weights; else rank 0's
            are evaluated and saved
        check_finite: looks for NaN and inf in gradients and weights before they are sent; one more
            pass
        on_loss: "end" ends the job, on all ranks, when one is lost; "continue" goes on without it,
            on CPUs: see the page "Going on without a rank"
        min_ranks: with on_loss="continue", how many ranks must be left; None means more than half
            of those before the loss. With shards a number counts the ranks in whole replicas, and
            None all that are left to vote, those of the broken replica included
        max_ranks: with on_loss="continue", how many ranks there may be, where others join; None
            means as many as at the start
        **kwargs: what Lightning's own strategies take: cluster_environment, checkpoint_io,
            precision_plugin, process_group_backend, timeout, start_method (left out, an interactive
            session forks its ranks)
    """

    def __init__(
        self,
        density: float | None = None,
        local_steps: int = 1,
        scale_steps: bool = False,
        *,
        transport: str = "auto",
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 20.0,
        startup_timeout_s: float = 300.0,
        evaluate: str = "consensus",
        average_buffers: bool = True,
        check_finite: bool = False,
        on_loss: str = "end",
        min_ranks: int | None = None,
        max_ranks: int | None = None,
        **kwargs: Any,
    ) -> None: ...

class GaussianTopkStrategy(DecentralizedStrategy):
    """Like `topk_allgather`, with a threshold estimated from a normal distribution.

    The threshold is the one that k of n normally distributed entries would reach.  It is lowered
    until more than 3k/4 entries reach it, as in Ok-Topk's comparison.  More than k entries may
    reach it.

    Memory per rank in addition to plain training (|x|: the weights, |g|: the gradient): 2 |g|.

    Args:
        density: share of the gradient entries that is selected in an exchange, k / n; None means
            0.01 for each of the `local_steps`, at most 1
        local_steps: number of steps from one exchange to the next; with more than 1, what these
            steps have changed in the weights takes the place of the gradient
        scale_steps: if True, steps are scaled so that their mean over the ranks is as large as one
            of them, for Adam, AdamW and other optimizers that divide by a second moment; takes |x|
            more memory, and |x| / 30 more is sent
        transport: "process_group" (TCP), "mpi", or "auto", which takes MPI where mpiexec or srun
            has started the ranks as one MPI world that mpi4py can join, else TCP
        timeout_s: how long a rank waits for another before it gives up
        heartbeat_timeout_s: after how much silence a rank counts as lost
        startup_timeout_s: how long a rank waits for all others to start, and then to connect
        evaluate: "consensus" validates, tests and monitors the weights that all ranks agree on;
            "local" each rank's own
        average_buffers: whether BatchNorm statistics are averaged with the weights; else rank 0's
            are evaluated and saved
        check_finite: looks for NaN and inf in gradients and weights before they are sent; one more
            pass
        on_loss: "end" ends the job, on all ranks, when one is lost; "continue" goes on without it,
            on CPUs: see the page "Going on without a rank"
        min_ranks: with on_loss="continue", how many ranks must be left; None means more than half
            of those before the loss. With shards a number counts the ranks in whole replicas, and
            None all that are left to vote, those of the broken replica included
        max_ranks: with on_loss="continue", how many ranks there may be, where others join; None
            means as many as at the start
        **kwargs: what Lightning's own strategies take: cluster_environment, checkpoint_io,
            precision_plugin, process_group_backend, timeout, start_method (left out, an interactive
            session forks its ranks)
    """

    def __init__(
        self,
        density: float | None = None,
        local_steps: int = 1,
        scale_steps: bool = False,
        *,
        transport: str = "auto",
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 20.0,
        startup_timeout_s: float = 300.0,
        evaluate: str = "consensus",
        average_buffers: bool = True,
        check_finite: bool = False,
        on_loss: str = "end",
        min_ranks: int | None = None,
        max_ranks: int | None = None,
        **kwargs: Any,
    ) -> None: ...

class AllReduceStrategy(DecentralizedStrategy):
    """Averages the gradients of all ranks in every step.

    Memory per rank in addition to plain training (|x|: the weights, |g|: the gradient): |g|.

    Args:
        transport: "process_group" (TCP), "mpi", or "auto", which takes MPI where mpiexec or srun
            has started the ranks as one MPI world that mpi4py can join, else TCP
        timeout_s: how long a rank waits for another before it gives up
        heartbeat_timeout_s: after how much silence a rank counts as lost
        startup_timeout_s: how long a rank waits for all others to start, and then to connect
        evaluate: "consensus" validates, tests and monitors the weights that all ranks agree on;
            "local" each rank's own
        average_buffers: whether BatchNorm statistics are averaged with the weights; else rank 0's
            are evaluated and saved
        check_finite: looks for NaN and inf in gradients and weights before they are sent; one more
            pass
        on_loss: "end" ends the job, on all ranks, when one is lost; "continue" goes on without it,
            on CPUs: see the page "Going on without a rank"
        min_ranks: with on_loss="continue", how many ranks must be left; None means more than half
            of those before the loss. With shards a number counts the ranks in whole replicas, and
            None all that are left to vote, those of the broken replica included
        max_ranks: with on_loss="continue", how many ranks there may be, where others join; None
            means as many as at the start
        **kwargs: what Lightning's own strategies take: cluster_environment, checkpoint_io,
            precision_plugin, process_group_backend, timeout, start_method (left out, an interactive
            session forks its ranks)
    """

    def __init__(
        self,
        *,
        transport: str = "auto",
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 20.0,
        startup_timeout_s: float = 300.0,
        evaluate: str = "consensus",
        average_buffers: bool = True,
        check_finite: bool = False,
        on_loss: str = "end",
        min_ranks: int | None = None,
        max_ranks: int | None = None,
        **kwargs: Any,
    ) -> None: ...

class NoSyncStrategy(DecentralizedStrategy):
    """Never communicates while training.

    Memory per rank in addition to plain training (|x|: the weights, |g|: the gradient): none.

    Args:
        transport: "process_group" (TCP), "mpi", or "auto", which takes MPI where mpiexec or srun
            has started the ranks as one MPI world that mpi4py can join, else TCP
        timeout_s: how long a rank waits for another before it gives up
        heartbeat_timeout_s: after how much silence a rank counts as lost
        startup_timeout_s: how long a rank waits for all others to start, and then to connect
        evaluate: "consensus" validates, tests and monitors the weights that all ranks agree on;
            "local" each rank's own
        average_buffers: whether BatchNorm statistics are averaged with the weights; else rank 0's
            are evaluated and saved
        check_finite: looks for NaN and inf in gradients and weights before they are sent; one more
            pass
        on_loss: "end" ends the job, on all ranks, when one is lost; "continue" goes on without it,
            on CPUs: see the page "Going on without a rank"
        min_ranks: with on_loss="continue", how many ranks must be left; None means more than half
            of those before the loss. With shards a number counts the ranks in whole replicas, and
            None all that are left to vote, those of the broken replica included
        max_ranks: with on_loss="continue", how many ranks there may be, where others join; None
            means as many as at the start
        **kwargs: what Lightning's own strategies take: cluster_environment, checkpoint_io,
            precision_plugin, process_group_backend, timeout, start_method (left out, an interactive
            session forks its ranks)
    """

    def __init__(
        self,
        *,
        transport: str = "auto",
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 20.0,
        startup_timeout_s: float = 300.0,
        evaluate: str = "consensus",
        average_buffers: bool = True,
        check_finite: bool = False,
        on_loss: str = "end",
        min_ranks: int | None = None,
        max_ranks: int | None = None,
        **kwargs: Any,
    ) -> None: ...
