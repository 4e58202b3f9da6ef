"""How the ranks of a job meet: at a rendezvous, in torch's process group, then on our network."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch

from lightning_dsgd import wings
from lightning_dsgd.devices import port_of
from lightning_dsgd.session.options import Options
from lightning_dsgd.transport import Transport
from lightning_dsgd.transport.mpi import MPITransport
from lightning_dsgd.transport.mpi_job import is_usable
from lightning_dsgd.transport.process_group import ProcessGroupTransport
from lightning_dsgd.transport.register import ALONE, OVER, STOPPED, Register, outlives_ranks
from lightning_dsgd.transport.rendezvous import Rendezvous


class Meeting:
    """Lets this rank meet the others; a process keeps it from one training to the next.

    Args:
        chosen: what carries messages, and how long this rank waits
        announce: tells the user, on rank 0
    """

    def __init__(self, chosen: Options, announce: Callable[[str], None]) -> None:
        self._chosen = chosen
        self._announce = announce
        self._rendezvous: Rendezvous | None = None  # if the ranks have met by themselves
        self._register: Register | None = None

    @property
    def _limits(self) -> tuple[float, float]:
        return self._chosen["timeout_s"], self._chosen["heartbeat_timeout_s"]

    def join_process_group(
        self,
        rank: int,
        world_size: int,
        address: tuple[str, int],
        backend: str,
        timeout: timedelta | None,
        device: torch.device,
    ) -> None:
        """Makes the default process group, once all ranks are known to have started."""
        host, port = address
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
        limit = self._chosen["startup_timeout_s"]
        self._rendezvous = Rendezvous(rank, world_size, host, port, limit)
        store = self._rendezvous.join()

        def connect() -> None:
            port_of(device).enter()
            torch.distributed.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timeout,
                device_id=device if device.type != "cpu" else None,
            )

        self._rendezvous.watch(connect, "connect the process group")
        if backend == "nccl":  # which complains of a group that is not destroyed
            atexit.register(_destroy_process_group)
        self._announce(f"All {world_size} ranks have started (process group: {backend}).")

    @property
    def register(self) -> Register | None:
        """The launcher's register, which outlives the ranks; None if no launcher keeps one."""
        variables = os.environ
        are_known = {"MASTER_ADDR", "MASTER_PORT"} <= {*variables}
        if self._register is None and outlives_ranks() and are_known:
            host, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
            self._register = Register(host, port, self._chosen["startup_timeout_s"])
        return self._register

    @property
    def can_be_joined(self) -> bool:
        """Whether a process that is started again asks here before it meets the others.

        Where a script, or an earlier training, has made the process group, the process waits in it.
        """
        return self._rendezvous is not None

    def find_training(self, address: tuple[str, int]) -> Register | None:
        """Returns the register of a training that goes on; None where this process starts it.

        Raises:
            RuntimeError: if they train without a way to join them, or have ended
        """
        if not outlives_ranks():
            return None
        register = Register(*address, self._chosen["startup_timeout_s"])
        training = register.training()
        if training == ALONE:
            refuse_to_join()
        if training in (OVER, STOPPED):
            raise RuntimeError(
                "a process must come while the others train, got one that came once their training "
                f"was {training}; start the job anew"
            )
        return register if training else None

    def start_with_others(self, address: tuple[str, int]) -> None:
        """Raises `RuntimeError` if the others train already: nobody can join a user's loop."""
        if self.find_training(address) is not None:
            refuse_to_join()

    def come_later(self, register: Register, world_size: int) -> Transport:
        """Returns a newcomer's network; its ranks let this one in later: see `ask_to_join`."""
        self._register, number = register, register.new_number(world_size)
        wing: Any = wings.load("elastic.newcomer", 'on_loss="continue"')
        net: Transport = wing.NewcomerTransport(number, *self._limits)
        return net

    def ask_to_join(self, net: Any, world_size: int, min_ranks: int | None) -> None:
        """Asks the ranks that train to let this one in."""
        register = self._register
        assert register is not None
        host, port = net.listen()
        secret = register.secret()
        register.write_card(net.rank, (host, port, secret))
        register.say_left(has_left=False)  # if it did, it has come back
        cards = register.cards(net.rank, world_size)
        net.join(cards, bytes.fromhex(secret), min_ranks, self._chosen["timeout_s"])

    def make_group_of_one(self) -> None:
        """Makes a process group of this newcomer alone, for code that asks whether there is one."""
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)

    def open_network(self, world_size: int, device: torch.device) -> Transport:
        """Opens the network; names a rank that does not open it, if the ranks met by themselves."""
        rendezvous, open_transport = (
            self._rendezvous,
            partial(self._open_transport, world_size, device),
        )
        port_of(device).enter()  # in plain PyTorch nobody may have done so
        if rendezvous is None:
            return self._tell(open_transport())

        def open_in_thread() -> ProcessGroupTransport:
            port_of(device).enter()
            return open_transport()

        # A later training finds the others in whatever their scripts do in between.
        limit = self._chosen["timeout_s"] if rendezvous.has_ended else None
        net = rendezvous.watch(open_in_thread, "open the network", limit)
        rendezvous.end()
        return self._tell(net)

    def _tell(self, net: ProcessGroupTransport) -> ProcessGroupTransport:
        if net.world_size > 1:
            self._announce(net.engines())
        return net

    def _open_transport(self, world_size: int, device: torch.device) -> ProcessGroupTransport:
        transport = self._chosen["transport"]
        if transport == "mpi" or (transport == "auto" and is_usable(world_size)):
            return MPITransport(*self._limits, device=device)
        return ProcessGroupTransport(*self._limits, device=device)


def refuse_to_join() -> NoReturn:
    """Raises where ranks train already, in a loop that its user has written."""
    raise RuntimeError(
        "a process must start with the others to train in a loop of its own, got one that was "
        "started again while they train, which cannot know its place in their loop; they go on "
        "without it: start the job anew, from a checkpoint, or use Lightning's Trainer, which a "
        "rank can join, where no ranks hold a replica together"
    )


def _destroy_process_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
