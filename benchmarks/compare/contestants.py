"""What a measurement compares: our strategies, and their peers in Lightning and torch, by name.

    wagma:overlap=true:grace_s=0.02     a strategy of ours, with hyperparameters
    ddp, single_device                  Lightning's own
    ddp_fp16, ddp_bf16                  its gradients compressed to half precision on the wire
    ddp_powersgd:rank=2                 its gradients as products of low rank (Vogels et al. 2019)
    post_local_sgd:period=8:start=0     DDP; from step `start` on, weights averaged every `period`
    torchft_local_sgd, torchft_diloco   from torchft (the extra `bench`): `torchft_peers.py`
    decent_dp:topology=ring             from Decent-DP (the same extra): `decent_dp_peer.py`
    hivemind:period=8                   from hivemind (the same extra): `hivemind_peer.py`

The three in the middle use torch's own code: communication hooks and PeriodicModelAverager.
Lightning registers communication hooks on CUDA only; here they also run on CPUs.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Final

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from benchmarks.compare.decent_dp_peer import DecentDPStrategy
from benchmarks.compare.hivemind_peer import HivemindStrategy
from benchmarks.compare.torchft_peers import DiLoCoStrategy, TorchFTStrategy
from lightning_dsgd.algorithm import Conditions
from lightning_dsgd.hyperparameters import parse
from lightning_dsgd.lab.jobs import fit


def strategy(spec: str) -> Any:
    """Returns what `Trainer(strategy=...)` takes."""
    return fit.strategy(spec, PEERS)


def check(spec: str, ranks: int) -> None:
    """Raises `ValueError` or `TypeError` for a strategy that so many ranks could not measure.

    A strategy whose package is not installed is one of these.
    """
    name, _ = parse(spec)
    module, package = _PACKAGES.get(name, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        raise ValueError(
            f"{name} needs the package {package}, which is not installed; "
            f"install it (pip install {package}), or leave {name} out"
        )
    algorithm = getattr(strategy(spec), "algorithm", None)
    if algorithm is not None:
        algorithm.check(ranks, Conditions(ranks_per_node=ranks))


def trainer(spec: str, ranks: int, **options: Any) -> L.Trainer:
    """Makes a Trainer that does nothing but train with a strategy; see `fit.trainer`."""
    return fit.trainer(strategy(spec), ranks, **options)


class _DDPWithHook(DDPStrategy):
    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        self.add_hook(self.model)

    def add_hook(self, model: DistributedDataParallel) -> None:
        raise NotImplementedError


class _DDPFp16(_DDPWithHook):
    def add_hook(self, model: DistributedDataParallel) -> None:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)


class _DDPBf16(_DDPWithHook):
    def add_hook(self, model: DistributedDataParallel) -> None:
        # DDP refuses torch's hook by its name where NCCL is missing; gloo sums bfloat16 too.
        hook = default_hooks.bf16_compress_hook
        model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))


class _DDPPowerSGD(_DDPWithHook):
    def __init__(self, rank: int = 1, start: int = 2) -> None:
        # One bucket: gloo would make the later sums of several buckets in another order on each
        # rank, and mix them up.
        super().__init__(bucket_cap_mb=1 << 20)
        self._rank = rank
        self._start = start

    def add_hook(self, model: DistributedDataParallel) -> None:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=self._rank, start_powerSGD_iter=self._start
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class _PostLocalSGD(_DDPWithHook):
    def __init__(self, period: int = 8, start: int = 0) -> None:
        super().__init__()
        self._period = period
        self._start = start

    def add_hook(self, model: DistributedDataParallel) -> None:
        self._averager = PeriodicModelAverager(self._period, self._start)
        # One rank is a group of its own: no gradient is reduced once local steps have begun.
        alone, _ = torch.distributed.new_subgroups(1)  # type: ignore[no-untyped-call]
        state = post_localSGD_hook.PostLocalSGDState(  # type: ignore[no-untyped-call]
            process_group=None, subgroup=alone, start_localSGD_iter=self._start
        )
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        assert self.model is not None
        self._averager.average_parameters(iter(self.model.parameters()))
        return result


PEERS: dict[str, Any] = {
    "single_device": SingleDeviceStrategy,
    "ddp": DDPStrategy,
    "ddp_fp16": _DDPFp16,
    "ddp_bf16": _DDPBf16,
    "ddp_powersgd": _DDPPowerSGD,
    "post_local_sgd": _PostLocalSGD,
    "torchft_local_sgd": TorchFTStrategy,
    "torchft_diloco": DiLoCoStrategy,
    "decent_dp": DecentDPStrategy,
    "hivemind": HivemindStrategy,
}
_PACKAGES: Final = {
    "torchft_local_sgd": ("torchft", "torchft-nightly"),
    "torchft_diloco": ("torchft", "torchft-nightly"),
    "decent_dp": ("decent_dp", "decent-dp"),
    "hivemind": ("hivemind", "hivemind"),
}
"""What the peers of the extra `bench` need: the module, and the package that pip installs."""
