"""The network of messages over any wire, by default TCP, and of torch's collectives on CUDA.

Messages travel on the wire, over TCP on the mesh's connections (`wire`); the process group is where
ranks find each other's addresses.  On CUDA, NCCL sums and broadcasts the tensors of all ranks
(`native`) and of any group (`native_groups`), and carries what partners exchange (`native_sends`),
if it is the process group's backend for the device, whatever has started the ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dsgd.devices import COLLECTIVES, backend_for
from lightning_dsgd.transport.collectives import Call
from lightning_dsgd.transport.contract import Work
from lightning_dsgd.transport.native import (
    NUM_COLOURS,
    Native,
    OfAll,
    destroy_group,
    make_group,
    members_of,
)
from lightning_dsgd.transport.native_groups import InShards
from lightning_dsgd.transport.native_sends import Pair, Parts
from lightning_dsgd.transport.processes import CPU, ProcessTransport, libraries
from lightning_dsgd.transport.tickets import ALL
from lightning_dsgd.transport.wire import TCPWire, Wire


class ProcessGroupTransport(ProcessTransport):
    """This process's end of a network over the default process group; all ranks open it together.

    Args:
        timeout_s: how long a wait may take
        heartbeat_timeout_s: after how much silence a rank counts as lost
        native_devices: device types on which torch's own collectives sum and broadcast, if the
            default process group has such collectives
        wire: what carries messages; None: TCP
        device: the device that this rank computes on
    """

    def __init__(
        self,
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 20.0,
        native_devices: Collection[str] = COLLECTIVES,
        wire: Wire | None = None,
        device: torch.device = CPU,
    ) -> None:
        self._native: Native | None = None
        self._has, self._wants = libraries().get(device.type, "none"), backend_for(device)
        self._may = device.type in native_devices
        is_native = self._may and self._has == self._wants and dist.get_world_size() > 1
        # The groups are made before anything can use them, and on all ranks alike.
        num_groups = NUM_COLOURS if is_native else 0
        groups = [make_group(device, timeout_s) for _ in range(num_groups)]
        try:
            wire, limits = wire or TCPWire(), (timeout_s, heartbeat_timeout_s)
            super().__init__(dist.get_rank(), dist.get_world_size(), wire, *limits, device)
            self.meet()
        except BaseException:
            for group in groups:
                destroy_group(group)
            raise
        if is_native:
            self._native = Native(self, groups)
            self.sum_engine = self._native.engine

    def engines(self) -> str:
        """Says in one line what carries messages, what makes sums, and what would be faster."""
        kind, faster = self.mesh.port.device.type, []
        line = f"Messages travel over {self.wire.engine}"
        if self.wire.reads_devices:
            line += ", which reads the memory of devices"
        elif kind in COLLECTIVES:
            faster.append(f"an MPI library that reads the memory of {kind}, for messages")
        if self._native is not None:
            line += f"; {self.sum_engine} makes sums, and carries what partners exchange"
        else:
            line += "; sums are made of messages too"
            if kind in COLLECTIVES and not self._may:
                line += ", as ranks may share a device or be lost"
                faster.append("ranks that do neither, for sums")
            elif kind in COLLECTIVES:
                line += f", as the process group's backend for {kind} is {self._has}"
                faster.append(f"{self._wants} in its place, for sums")
        return f"{line}." + (f" Faster: {'; '.join(faster)}." if faster else "")

    def close(self) -> None:
        native, self._native = self._native, None
        try:
            if native is not None and not self.is_forks:
                native.close()
        finally:
            super().close()

    def sum_natively(self, call: Call, x: Tensor) -> Work[Tensor] | None:
        return self._in_group(call, x, None)

    def broadcast_natively(self, call: Call, x: Tensor, place: int) -> Work[Tensor] | None:
        return self._in_group(call, x, place)

    def _in_group(self, call: Call, x: Tensor, place: int | None) -> Work[Tensor] | None:
        native = self._native
        if native is None or call.size == 1 or not native.can_take(x):
            return None
        self.check()
        kind = OfAll if members_of(self, call) == ALL else InShards
        return native.ask(kind(self, x, call, place))

    def spread_natively(
        self,
        call: Call,
        into: Tensor,
        from_each: Sequence[int],
        x: Tensor,
        to_each: Sequence[int] | None,
    ) -> Work[Tensor] | None:
        native = self._native
        if native is None or call.size == 1 or not native.can_take(into):
            return None
        self.check()
        return native.ask(Parts(self, call, into, from_each, x, to_each))

    def pair_natively(self, call: Call, x: Tensor) -> Work[Any] | None:
        native = self._native
        if native is None or not native.can_take(x):
            return None
        self.check()
        return native.ask(Pair(self, x, call))
