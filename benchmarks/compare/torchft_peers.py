"""torchft's Local SGD and DiLoCo as strategies, to be measured beside ours.

    torchft_local_sgd:period=8                      weights averaged every `period` steps
    torchft_diloco:period=8:lr=0.7:momentum=0.9     progress averaged and given to Nesterov's SGD
    torchft_diloco:period=8:fragments=2:delay=2     streaming: every 4 steps one half of the model,
                                                    summed during the next 2 steps

Every rank is a replica group of its own, and waits for all others at a synchronisation.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.compare.peer import Peer
from lightning_dsgd.transport.connections import own_address

_TIMEOUT = timedelta(seconds=300)


class TorchFTStrategy(Peer):
    """Trains with torchft's synchronisation."""

    def __init__(self, period: int = 8) -> None:
        super().__init__()
        self.period = period
        self._open: list[Any] = []

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        # An extra, which only these strategies need, so it is not imported with this module.
        from torchft.coordination import LighthouseServer
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        address = own_address()
        where: list[Any] = [None]
        if self.global_rank == 0:
            lighthouse = LighthouseServer(bind=f"{address}:0", min_replicas=self.world_size)
            port = lighthouse.address().rpartition(":")[2]  # its host is a name that nodes lack
            where = [f"http://{address}:{port}"]
            self._open.append(lighthouse)
        dist.broadcast_object_list(where, src=0)
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            address, 0, is_master=True, wait_for_workers=False
        )
        group = ProcessGroupGloo(timeout=_TIMEOUT)
        manager = Manager(
            pg=group,
            load_state_dict=None,
            state_dict=None,
            min_replica_size=self.world_size,
            use_async_quorum=False,
            init_sync=False,
            timeout=_TIMEOUT,
            quorum_timeout=_TIMEOUT,
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=store.port,
            lighthouse_addr=where[0],
            hostname=address,
            replica_id=f"rank-{self.global_rank}",
        )
        assert self.model is not None
        synchronisation = self.synchronisation(manager, self.model, self.optimizers[0])
        synchronisation.__enter__()
        self._open += [store, manager, synchronisation]

    def synchronisation(self, manager: Any, model: Any, optimizer: Any) -> Any:
        """Returns the context manager of torchft."""
        from torchft.local_sgd import LocalSGD

        return LocalSGD(manager, model, optimizer, sync_every=self.period)

    def teardown(self) -> None:
        super().teardown()
        if self._open:
            dist.barrier()  # the lighthouse stays until nobody asks it any more
        for opened in reversed(self._open):
            if hasattr(opened, "__exit__"):
                opened.__exit__(None, None, None)
            elif hasattr(opened, "shutdown"):
                opened.shutdown()
        self._open.clear()


class DiLoCoStrategy(TorchFTStrategy):
    """Trains with torchft's DiLoCo, with Nesterov's SGD as the outer optimizer."""

    def __init__(
        self,
        lr: float = 0.7,
        momentum: float = 0.9,
        fragments: int = 1,
        delay: int = 0,
        **local: Any,
    ) -> None:
        super().__init__(**local)
        self.lr = lr
        self.momentum = momentum
        self.fragments = fragments
        self.delay = delay

    def synchronisation(self, manager: Any, model: Any, optimizer: Any) -> Any:
        from torchft.local_sgd import DiLoCo

        fragments = fragments_of(model, self.fragments)
        outer = [
            torch.optim.SGD(
                fragment.parameters(), self.lr, self.momentum, nesterov=self.momentum > 0
            )
            for fragment in fragments
        ]
        return DiLoCo(
            manager,
            fragments,
            optimizer,
            outer,
            self.period,
            pin_memory=False,
            fragment_sync_delay=self.delay,
        )


def fragments_of(model: nn.Module, count: int) -> list[nn.Module]:
    """Splits the model into so many parts, of equally many consecutive layers."""
    layers = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    if count == 1:
        return [model]
    if not 1 <= count <= len(layers):
        raise ValueError(
            f"fragments must be from 1 to the number of layers with parameters, {len(layers)}, "
            f"got {count}"
        )
    bounds = [len(layers) * i // count for i in range(count + 1)]
    return [nn.ModuleList(layers[first:last]) for first, last in pairwise(bounds)]
