"""A process that comes to a network whose ranks were there before.

The process has a number that no rank has had.  It connects to all ranks whose address it was given,
asks them to be let in, and is a rank from the first view that has it as a member: see `survival`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning_dsgd.elastic.survival import join
from lightning_dsgd.transport import Counters
from lightning_dsgd.transport.contract import failed
from lightning_dsgd.transport.endpoint import Endpoint
from lightning_dsgd.transport.process_group import ProcessGroupTransport
from lightning_dsgd.transport.processes import CPU
from lightning_dsgd.transport.wire import TCPWire


class NewcomerTransport(ProcessGroupTransport):
    """A newcomer's end of the network: every wait fails before `next_view` has given a view.

    Args:
        number: this process's number
        timeout_s: how long a wait may take
        heartbeat_timeout_s: after how much silence a rank counts as lost
        device: the device that this rank computes on
    """

    def __init__(
        self,
        number: int,
        timeout_s: float,
        heartbeat_timeout_s: float,
        device: torch.device = CPU,
    ) -> None:
        Endpoint.__init__(self, number, number + 1, timeout_s, Counters())
        self._native = None
        self._begin(TCPWire(), heartbeat_timeout_s, device, is_newcomer=True)

    def listen(self) -> tuple[str, int]:
        """Begins to listen; returns where newcomers reach this one, once it has asked to join."""
        self._address = self.mesh.connections.listen()
        return self._address

    def join(
        self,
        contacts: Mapping[int, tuple[str, int]],
        secret: bytes,
        min_ranks: int | None,
        within_s: float,
    ) -> None:
        """Asks the ranks to let this process in, which must `listen` before.

        From then on the other ranks may wait for this one.

        Args:
            contacts: where the ranks listen that this one may reach
            secret: the job's secret
            min_ranks: how many a view must have
            within_s: how long it asks
        """
        self._end_with_process()
        self.mesh.open({self.rank: self._address, **contacts}, secret)
        self.wire.open(self.mesh)
        try:
            join(self.mesh, min_ranks, within_s)
        except BaseException as exception:
            self.fail(failed(exception))
            raise
