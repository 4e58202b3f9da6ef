"""The network over TCP: connections of our own, and torch's collectives for CUDA tensors.

Messages travel on the mesh's connections (`tcp`); the process group is where ranks find each
other's addresses.  On CUDA another one sums the tensors of all ranks: NCCL (`native`).  Sums of
some of the ranks are made of messages there too: a communicator for each group would take memory on
the device, and groups that overlap would need an order among themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dsgd.devices import COLLECTIVES
from lightning_dsgd.transport.contract import Work
from lightning_dsgd.transport.native import SUMMED, NativeSums, destroy_group, make_group
from lightning_dsgd.transport.processes import CPU, ProcessTransport, group_device
from lightning_dsgd.transport.tcp import TCPWire
from lightning_dsgd.transport.wire import Wire


class ProcessGroupTransport(ProcessTransport):
    """This process's end of a network over the default process group; all ranks open it together.

    Args:
        timeout_s: how long a wait may take
        heartbeat_timeout_s: after how much silence a rank counts as lost
        native_devices: device types on which torch's own collectives make the sums of all ranks,
            if they are those of the default process group
        wire: what carries messages; None: TCP
        device: that this rank computes on
    """

    def __init__(
        self,
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 20.0,
        native_devices: Sequence[str] = tuple(COLLECTIVES),
        wire: Wire | None = None,
        device: torch.device = CPU,
    ) -> None:
        self._sums: NativeSums | None = None
        is_native = dist.get_world_size() > 1 and device.type == group_device() in native_devices
        # Made before anything can use it, and on all ranks alike.
        group = make_group(device, timeout_s) if is_native else None
        try:
            super().__init__(wire or TCPWire(), timeout_s, heartbeat_timeout_s, device)
        except BaseException:
            if group is not None:
                destroy_group(group)
            raise
        if group is not None:
            self._sums = NativeSums(self, group)

    def close(self) -> None:
        sums, self._sums = self._sums, None
        try:
            if sums is not None and not self.is_forks:
                sums.close()
        finally:
            super().close()

    def all_reduce(self, x: Tensor, group: Sequence[int] | None = None) -> Work[Tensor]:
        is_of_all = group is None or tuple(group) == tuple(range(self.world_size))
        can_sum = x.dtype in SUMMED and x.device == self.mesh.port.device
        if self._sums is None or not (is_of_all and can_sum):
            return super().all_reduce(x, group)
        self._check_tensor(x)
        self.check()
        return self._sums.begin(self, x, self._call(None, "all_reduce"))
