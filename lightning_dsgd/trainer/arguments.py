"""What strategies for Lightning take beside the options of every face, and what they refuse."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Annotated, Any, Final

from torch.nn.parallel import DistributedDataParallel

from lightning_dsgd import hyperparameters, keywords
from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.algorithms import ALL_ALGORITHMS
from lightning_dsgd.algorithms.written import written
from lightning_dsgd.hyperparameters import at_least, one_of
from lightning_dsgd.session.options import Options, WholeOptions


class FabricOptions(WholeOptions, total=False):
    """The options of Fabric's strategies."""

    start_method: Annotated[
        str | None,
        one_of(
            *("popen", "fork", "spawn", "forkserver"),
            default=None,
            doc='how ranks are started where no launcher does it: "popen" runs the script once for '
            "each; with the others they are child processes, and the script goes on after `fit` "
            'with the trained weights. None means "popen", and "fork" in a notebook',
        ),
    ]


class Evaluated(Options, total=False):
    """The options of strategies whose Trainer evaluates."""

    evaluate: Annotated[
        str,
        one_of(
            *("consensus", "local"),
            default="consensus",
            doc='"consensus" validates, tests and monitors the weights that all ranks agree on; '
            '"local" each rank\'s own',
        ),
    ]


class TrainerOptions(Evaluated, FabricOptions, total=False):
    """The options of the Trainer's strategies."""

    max_ranks: Annotated[
        int | None,
        at_least(
            1,
            default=None,
            doc='with on_loss="continue", how many ranks there may be, where others join; None '
            "means as many as at the start",
        ),
    ]


THE_TRAINERS: Final = ("accelerator", "parallel_devices")
"""The options that the Trainer and Fabric set by themselves, and Lightning's strategies take."""

_A_PLUGIN: Final = "give it to the Trainer, or to Fabric, in plugins=[...]"

_OF_DDP: Final = 'communication hooks belong to strategy="ddp"'
_SHARDS: Final = (
    "weights are replicated here: use lightning_dsgd.ShardedStrategy to shard them inside each "
    'replica, or strategy="fsdp" or "deepspeed"'
)
_OFFLOADS: Final = 'weights stay on their device here: "fsdp" and "deepspeed" offload them'
_NOT_OURS: Final = {
    **dict.fromkeys(
        ("cluster_environment", "checkpoint_io", "precision_plugin", "precision"), _A_PLUGIN
    ),
    "process_group_backend": "it follows from the device: leave the option out",
    "timeout": "torch's own collectives wait as long as timeout_s says, and half an hour at least",
    "find_unused_parameters": "unused parameters need no search here: leave the option out",
    "static_graph": "there is no DDP wrapper to tell: leave the option out",
    "gradient_as_bucket_view": "there are no buckets: leave the option out",
    "bucket_cap_mb": "there are no buckets: leave the option out",
    "broadcast_buffers": 'use average_buffers, or strategy="ddp"',
    **dict.fromkeys(("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper"), _OF_DDP),
    "model_averaging_period": 'use strategy="local_sgd" with sync_period',
    **dict.fromkeys(
        ("sharding_strategy", "auto_wrap_policy", "stage", "zero_optimization"), _SHARDS
    ),
    **dict.fromkeys(("cpu_offload", "offload_optimizer"), _OFFLOADS),
    **dict.fromkeys(("state_dict_type", "config"), 'belongs to strategy="fsdp" or "deepspeed"'),
}
"""Options of other strategies, and the way out."""


def check(strategy: str, algorithm: Algorithm, table: type, given: Any) -> None:
    """Raises for options that are not ours or Lightning's; drops those that say nothing.

    Args:
        strategy: the name of its class
        algorithm: the algorithm that it trains with
        table: the options that it takes
        given: the options that it was given, by name
    """
    defaults = inspect.signature(DistributedDataParallel).parameters
    ours = keywords.names(table)
    for name, value in list(given.items()):
        says_nothing = value is None or (name in defaults and value == defaults[name].default)
        if name in ours:
            continue
        if name in algorithm.hyperparameters():
            meant = written(replace(algorithm, **{name: value}))  # type: ignore[type-var]
            raise ValueError(
                f"the option {name} is one of the algorithm, got {name}={value!r} for the "
                f"strategy; write {strategy}({meant})"
            )
        if says_nothing and (name in _NOT_OURS or name in defaults):
            del given[name]  # a command line passes the defaults of the base classes
        elif name in _NOT_OURS:
            raise ValueError(
                f"{strategy} cannot honour {name}, got {name}={value!r}: {_NOT_OURS[name]}"
            )
        elif takers := [
            each.name for each in ALL_ALGORITHMS.values() if name in hyperparameters.names(each)
        ]:
            raise ValueError(
                f"{name} is an option of {', '.join(takers)}, got {name}={value!r} with "
                f'"{algorithm.name}"; leave it out'
            )
        elif name not in THE_TRAINERS:
            its = [*algorithm.hyperparameters()]
            raise ValueError(hyperparameters.unknown(strategy, name, value, ours, its))
