"""How processes come to ranks that train: the register of a training, the way in, the newcomer.

A newcomer is a process that comes to a network whose ranks were there before.  It has a number that
no rank has had.  It connects to all ranks whose address it was given, asks them to be let in, and
is a rank from the first view that has it as a member: see `survival`.

Where several ranks hold a replica together, as many newcomers take all of these steps together:

    find_training    they gather, take their numbers, and connect a process group (`gathering`)
    ask_to_join      each writes where it listens; once all have, each connects to the others, so
                     that it knows when one is lost, and to the ranks that train; then it asks
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeVar

import torch

from lightning_dsgd.devices import port_of
from lightning_dsgd.elastic.gathering import Gathering
from lightning_dsgd.elastic.register import ALONE, OVER, STOPPED, Register
from lightning_dsgd.elastic.survival import join
from lightning_dsgd.session.opening import Opening
from lightning_dsgd.transport.contract import TransportError, failed
from lightning_dsgd.transport.host_names import await_name, source_of
from lightning_dsgd.transport.processes import CPU, ProcessTransport
from lightning_dsgd.transport.rendezvous import outlives_ranks
from lightning_dsgd.transport.wire import TCPWire

T = TypeVar("T")


class NewcomerTransport(ProcessTransport):
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
        limits = timeout_s, heartbeat_timeout_s
        super().__init__(number, number + 1, TCPWire(), *limits, device, is_newcomer=True)

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
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        """Asks the ranks to let this process in, which must `listen` before.

        From then on the other ranks may wait for this one.

        Args:
            contacts: where the ranks listen that this one may reach
            secret: the job's secret
            min_ranks: how many a view must have
            within_s: how long it asks
            groups: the ranks that held a replica together at the start
        """
        self._end_with_process()
        self.mesh.open({self.rank: self._address, **contacts}, secret)
        self.wire.open(self.mesh)
        try:
            join(self.mesh, min_ranks, within_s, groups)
        except BaseException as exception:
            self.fail(failed(exception))
            raise


class Entrance:
    """Leads a process to the training of others, or others to its own.

    Args:
        opening: how the ranks that start together open their network
    """

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._register: Register | None = None
        self._newcomer: NewcomerTransport | None = None
        self._number = -1
        """The number of this newcomer."""
        self._gathering: Gathering | None = None
        """This newcomer's way to those that hold a replica with it; None: it comes alone."""

    @property
    def register(self) -> Register | None:
        """The launcher's register, which outlives the ranks; None if no launcher keeps one."""
        variables = os.environ
        are_known = {"MASTER_ADDR", "MASTER_PORT"} <= {*variables}
        if self._register is None and outlives_ranks() and are_known:
            host, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
            self._register = Register(host, port, self._opening.chosen["startup_timeout_s"])
        return self._register

    def tell(self, tell: Callable[[Register], None]) -> None:
        """Tells newcomers and the launcher; tells nobody where the store has ended."""
        register = self.register
        if register is not None:
            with contextlib.suppress(TransportError):
                tell(register)

    @property
    def is_open(self) -> bool:
        """Whether a process that is started again asks here before it meets the others.

        Where a script, or an earlier training, has made the process group, the process waits in it.
        """
        return self._opening.has_met

    def find_training(self, address: tuple[str, int]) -> bool:
        """Returns whether a training goes on, to which this process comes.

        Raises:
            RuntimeError: if they train without a way to join them, or have ended
        """
        if not outlives_ranks():
            return False
        limit = self._opening.chosen["startup_timeout_s"]
        await_name(address[0], source_of(address[0]), limit)
        register = Register(*address, limit)
        training = register.training()
        if training == ALONE:
            refuse_newcomer()
        if training in (OVER, STOPPED):
            raise RuntimeError(
                "a process must come while the others train, got one that came once their training "
                f"was {training}; start the job anew"
            )
        if training:
            self._register = register
        return bool(training)

    def gather(self, rank: int, world_size: int, num_shards: int) -> None:
        """Takes a number, and makes the process group of those that hold a replica with this one.

        Args:
            rank: the rank that this newcomer was started as
            world_size: how many ranks there were at the start
            num_shards: how many ranks hold a replica together
        """
        register, opening = self._register, self._opening
        assert register is not None
        theirs = register.num_shards()
        if theirs != num_shards:
            raise ValueError(
                "a newcomer must hold as much of a replica as the others, got replicas of "
                f"{num_shards} ranks here and of {theirs} there; start it with the same script and "
                "arguments"
            )
        if num_shards == 1:
            [self._number] = register.new_numbers(1, world_size)
            _make_group_of_one()
            return
        begin = rank - rank % num_shards
        limits = opening.chosen["startup_timeout_s"], opening.torch_waits_s
        self._gathering = Gathering(register, rank, range(begin, begin + num_shards), *limits)
        self._number = self._gathering.gather(world_size)

    def in_row(self, work: Callable[[], T], what: str) -> T:
        """Returns what `work` gives, which newcomers of one replica do together: they watch it.

        Args:
            work: what they do
            what: what it does, for errors
        """
        return work() if self._gathering is None else self._gathering.watch(work, what)

    def come_later(self, device: torch.device) -> NewcomerTransport:
        """Returns a newcomer's network; its ranks let this one in later: see `ask_to_join`."""
        chosen = self._opening.chosen
        port_of(device).enter()
        limits = chosen["timeout_s"], chosen["heartbeat_timeout_s"]
        self._newcomer = NewcomerTransport(self._number, *limits, device)
        return self._newcomer

    def ask_to_join(
        self,
        world_size: int,
        min_ranks: int | None,
        groups: Sequence[Sequence[int]],
        await_group: Callable[[], object],
    ) -> None:
        """Asks the ranks that train to let this newcomer in, after `come_later`.

        Args:
            world_size: how many ranks there were at the start
            min_ranks: how many a view must have
            groups: the ranks that held a replica together at the start
            await_group: returns once all call it that are to hold a replica with this newcomer
        """
        register, net = self._register, self._newcomer
        assert register is not None
        assert net is not None
        host, port = net.listen()
        secret = register.secret()
        register.write_card(net.rank, (host, port, secret))
        register.say_left(has_left=False)  # if it did, it has come back
        self.in_row(await_group, "meet")  # now each of them can reach the others
        cards = register.cards(net.rank, world_size)
        limit = self._opening.chosen["timeout_s"]
        net.join(cards, bytes.fromhex(secret), min_ranks, limit, groups)


def _make_group_of_one() -> None:
    """Makes a process group of this newcomer alone, for code that asks whether there is one."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def refuse_newcomer() -> NoReturn:
    """Raises where ranks train already, in a loop that its user has written."""
    raise RuntimeError(
        "a process must start with the others to train in a loop of its own, got one that was "
        "started again while they train, which cannot know its place in their loop; they go on "
        "without it: start the job anew, from a checkpoint, or use Lightning's Trainer, which a "
        "rank can join"
    )
