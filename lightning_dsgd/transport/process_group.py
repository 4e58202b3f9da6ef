"""The network over TCP: connections of our own, and torch's collectives for CUDA tensors.

Messages travel on the mesh's connections (`tcp`); the process group is where ranks find each
other's addresses.  On CUDA other ones sum and broadcast the tensors of all ranks, and of groups
that are fixed at the start: NCCL (`native`).  Groups that change, such as those of `wagma`, are
served by messages there too: a communicator for each would take memory on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dsgd.devices import COLLECTIVES
from lightning_dsgd.transport.collectives import Call
from lightning_dsgd.transport.contract import Work
from lightning_dsgd.transport.native import Native, destroy_group, make_group
from lightning_dsgd.transport.processes import CPU, ProcessTransport, group_device
from lightning_dsgd.transport.tcp import TCPWire


class ProcessGroupTransport(ProcessTransport):
    """This process's end of a network over the default process group; all ranks open it together.

    Args:
        timeout_s: how long a wait may take
        heartbeat_timeout_s: after how much silence a rank counts as lost
        native_devices: device types on which torch's own collectives sum and broadcast, if
            they are those of the default process group
        device: that this rank computes on
    """

    def __init__(
        self,
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 20.0,
        native_devices: Sequence[str] = tuple(COLLECTIVES),
        device: torch.device = CPU,
    ) -> None:
        self._native: Native | None = None
        is_native = dist.get_world_size() > 1 and device.type == group_device() in native_devices
        # Made before anything can use it, and on all ranks alike.
        group = make_group(device, timeout_s) if is_native else None
        try:
            super().__init__(TCPWire(), timeout_s, heartbeat_timeout_s, device)
        except BaseException:
            if group is not None:
                destroy_group(group)
            raise
        if group is not None:
            self._native = Native(self, group)

    def close(self) -> None:
        native, self._native = self._native, None
        try:
            if native is not None and not self.is_forks:
                native.close()
        finally:
            super().close()

    def fix_groups(self, groups: Sequence[Sequence[int]]) -> None:
        if self._native is not None:
            self._native.fix(groups)

    def begin_natively(
        self, x: Tensor, call: Call, place: int | None = None
    ) -> Work[Tensor] | None:
        if self._native is None or not self._native.can_take(x, call.members):
            return None
        self.check()
        return self._native.begin(self, x, call, place)
