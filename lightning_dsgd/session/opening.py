"""How ranks open their network: they meet at a rendezvous, then in torch's process group."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch

from lightning_dsgd import devices, wings
from lightning_dsgd.devices import port_of
from lightning_dsgd.session.options import Options
from lightning_dsgd.transport import Transport
from lightning_dsgd.transport.host_names import source_of
from lightning_dsgd.transport.mpi_job import is_usable
from lightning_dsgd.transport.process_group import ProcessGroupTransport
from lightning_dsgd.transport.rendezvous import Rendezvous

_TORCH_WAITS_S: Final = 1800.0
"""So long a collective of torch's own process group waits at least, as with other strategies."""
_TORCH_WAITS_AT_MOST_S: Final = 1e8
"""About three years; torch counts in nanoseconds, of which a sum must not overflow."""


class Opening:
    """Opens the network among all ranks; a process keeps it from one training to the next.

    Args:
        chosen: what carries messages, and how long this rank waits
        announce: tells the user, on rank 0
    """

    def __init__(self, chosen: Options, announce: Callable[[str], None]) -> None:
        self.chosen = chosen
        self._sends_all = chosen["share_device"] or chosen["on_loss"] == "continue"
        self._announce = announce
        self._rendezvous: Rendezvous | None = None  # if the ranks have met by themselves

    @property
    def _limits(self) -> tuple[float, float]:
        return self.chosen["timeout_s"], self.chosen["heartbeat_timeout_s"]

    @property
    def torch_waits_s(self) -> float:
        """How long a collective of torch's own process group waits."""
        return min(max(self.chosen["timeout_s"], _TORCH_WAITS_S), _TORCH_WAITS_AT_MOST_S)

    def join_process_group(
        self,
        rank: int,
        world_size: int,
        address: tuple[str, int],
        backend: str,
        device: torch.device,
    ) -> None:
        """Makes the default process group, once all ranks are known to have started."""
        host, port = address
        source = source_of(host)  # before the next line, after which a variable always has it
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
        limit = self.chosen["startup_timeout_s"]
        self._rendezvous = Rendezvous(rank, world_size, host, port, limit, source)
        store = self._rendezvous.join()
        shares = self.chosen["share_device"]
        if self._sends_all and device.type != "cpu":
            backend = "gloo"

        def connect() -> None:
            port_of(device).enter()
            if not shares and device.type != "cpu":
                _claim(store, rank, device)
            torch.distributed.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=self.torch_waits_s),
                device_id=None if backend == "gloo" else device,
            )

        self._rendezvous.watch(connect, "connect the process group")
        if backend == "nccl":  # which complains of a group that is not destroyed
            atexit.register(_destroy_process_group)
        self._announce(f"All {world_size} ranks have started (process group: {backend}).")

    @property
    def has_met(self) -> bool:
        """Whether the ranks have met here; not where a script has made the process group."""
        return self._rendezvous is not None

    def open_network(self, world_size: int, device: torch.device) -> Transport:
        """Opens the network; names a rank that does not open it, if the ranks met by themselves."""
        rendezvous = self._rendezvous
        open_transport = partial(self._open_transport, world_size, device)
        devices.take_queues(device)
        port_of(device).enter()  # in plain PyTorch nobody may have done so
        if rendezvous is None:
            return self._tell(open_transport())

        def open_in_thread() -> ProcessGroupTransport:
            port_of(device).enter()
            return open_transport()

        # A later training finds the others in whatever their scripts do in between.
        limit = self.chosen["timeout_s"] if rendezvous.has_ended else None
        net = rendezvous.watch(open_in_thread, "open the network", limit)
        rendezvous.end()
        return self._tell(net)

    def _tell(self, net: ProcessGroupTransport) -> ProcessGroupTransport:
        if net.world_size > 1:
            self._announce(net.engines())
        return net

    def _open_transport(self, world_size: int, device: torch.device) -> ProcessGroupTransport:
        transport = self.chosen["transport"]
        may_take_mpi = transport == "auto" and self.chosen["on_loss"] == "end"
        takes_mpi = transport == "mpi" or (may_take_mpi and is_usable(world_size))
        kind: Any = ProcessGroupTransport
        options: dict[str, Any] = {"native_devices": ()} if self._sends_all else {}
        if takes_mpi:
            kind = wings.load("mpi.wire", 'transport="mpi"').MPITransport
        is_known = not self._sends_all or world_size == 1
        if not is_known and "cpu:" not in (given := torch.distributed.get_backend_config()):
            why = "share_device=True" if self.chosen["share_device"] else 'on_loss="continue"'
            raise ValueError(
                f"with {why} the process group must have a backend for the CPU, as NCCL takes one "
                f"rank for each GPU and ends with a rank, got {given}; make it with "
                'init_process_group("gloo"), or leave it out'
            )
        net: ProcessGroupTransport = kind(*self._limits, device=device, **options)
        return net


def _claim(store: Any, rank: int, device: torch.device) -> None:
    """Raises if another rank has claimed this rank's device."""
    identity = devices.identity_of(device)
    if not identity:
        return
    key = f"lightning_dsgd/{identity}"
    other = int(store.compare_set(key, "", str(rank)))
    if other != rank:
        raise ValueError(
            f"each rank needs a device of its own, got {device} for ranks {other} and {rank}; give "
            "each another one, or set share_device=True"
        )


def _destroy_process_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
