"""One node of a job: its place among all nodes, and the register as its supervisor asks it.

The register is kept on node 0, and asked after its end too.  Once the store has ended with node 0,
each question is answered by its default, and one line says so: the ranks of this node go on, and
none is started again.

Threads: the supervisor's.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from lightning_dsgd.elastic.register import Register, Trained
from lightning_dsgd.transport import TransportError
from lightning_dsgd.transport.host_names import await_name

T = TypeVar("T")

_OTHER_NODES_S: Final = 60.0
"""How long the store waits for the ranks of other nodes to end."""
_SILENTLY_S: Final = 2.0
"""How long the store waits for them without a word."""
_STORE_S: Final = 300.0


@dataclass(frozen=True)
class Place:
    """Places this node among all nodes.

    Args:
        ranks: how many ranks each node has
        nodes: how many nodes there are
        node: the number of this node
        host: where the ranks meet
        port: the port where the ranks meet; 0: any free port, on one node
        joins: whether the node's ranks join a training that goes on; `nodes` is 1 then, whatever
            the number of nodes of that training
    """

    ranks: int
    nodes: int
    node: int
    host: str
    port: int
    joins: bool = False

    def __post_init__(self) -> None:
        for name, least in (("ranks", 1), ("nodes", 1), ("node", 0)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"--{name} must be at least {least}, got {getattr(self, name)}; try "
                    f"--{name} {least}"
                )
        if self.node >= self.nodes:
            raise ValueError(
                f"--node must be below --nodes, got --node {self.node} with --nodes {self.nodes}; "
                "nodes are counted from 0"
            )
        if self.joins and (self.nodes > 1 or not self.port):
            raise ValueError(
                "ranks that join must be told where the others meet, and no nodes, got "
                f"--rendezvous {self.host}:{self.port} and --nodes {self.nodes}; give --join the "
                "--rendezvous of the training, as in --rendezvous node0:29500"
            )
        if self.nodes > 1 and not self.port:
            raise ValueError(
                "several nodes must know where the ranks meet, got no --rendezvous; give all nodes "
                "the address of node 0 and a free port there, as in --rendezvous node0:29500"
            )


class NodeRegister:
    """Asks and tells the register for one node.

    Attributes:
        node: the number of this node, also of one that joins
        has_store: whether the store has not ended
        training: how the training stood when the store said so last
        last_words: of the last rank that has said why it does not train any more

    Args:
        place: the place of this node
        is_told_to_end: whether to wait for nobody any more
    """

    def __init__(self, place: Place, is_told_to_end: Callable[[], bool]) -> None:
        self._place, self._is_told_to_end = place, is_told_to_end
        self.node, self._nodes, self._size = place.node, place.nodes, place.ranks
        """The numbers of this node, of the nodes at the start, and of the ranks on each of them."""
        begin = place.node * place.ranks
        self._numbers = range(begin, begin + place.ranks)
        self._port = place.port
        self._register: Register | None = None
        self.has_store = self._says_lives = True
        self.training = self.last_words = ""

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Keeps the store, or reaches it; has ranks that join counted behind the others."""
        place = self._place
        serves = place.node == 0 and not place.joins
        await_name(place.host, "--rendezvous", _STORE_S, self._is_told_to_end)
        self._register = register = Register(place.host, place.port, _STORE_S, serves=serves)
        self._port = register.port
        if serves:
            register.write_size(place.nodes, place.ranks)
        elif place.joins:
            self._find_training(register)
        for number in self._numbers:  # which an earlier supervisor of this node may have given up
            register.say_gone(number, is_gone=False)
        yield
        self._register = None

    def _find_training(self, register: Register) -> None:
        """Waits until a training goes on, and has its ranks counted behind the others."""
        found = register.await_training(_STORE_S, self._is_told_to_end)
        if self._is_told_to_end():
            raise TransportError("ended by a signal, before there was a training to join")
        if not found:
            raise TransportError(
                f"--join needs a training that goes on, but none does at {self._place.host}:"
                f'{self._place.port}; start one by `lightning-dsgd launch`, with on_loss="continue"'
            )
        if not register.can_be_joined():
            raise TransportError(
                f"--join needs a training that ranks can join, a Trainer's, but that at "
                f"{self._place.host}:{self._place.port} is a loop of its user's, whose place a new "
                "process cannot know; start that job anew with more ranks"
            )
        self._nodes, self._size = register.size()
        self._numbers = register.more_ranks(self._place.ranks, self._nodes * self._size)
        self.node = self._nodes - 1 + register.more_supervisors(1)

    def number(self, local: int) -> int:
        """Returns the number of a rank of this node."""
        return self._numbers[local]

    def variables(self, local: int) -> dict[str, str]:
        """Returns torchrun's variables for a rank of this node."""
        variables = {
            "RANK": self.number(local),
            "LOCAL_RANK": local % self._size,
            "WORLD_SIZE": self._nodes * self._size,
            "LOCAL_WORLD_SIZE": self._size,
            "GROUP_RANK": self.node,
            "GROUP_WORLD_SIZE": self._nodes,
            "MASTER_ADDR": self._place.host,
            "MASTER_PORT": self._port,
            "TORCHELASTIC_RUN_ID": "lightning-dsgd",
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        return {name: str(value) for name, value in variables.items()}

    def ask(self, question: Callable[[Register], T], default: T) -> T:
        """Returns what the store says; the default, once the store has ended with node 0."""
        assert self._register is not None
        if self.has_store:
            try:
                return question(self._register)
            except TransportError as err:
                self.has_store = False
                say(f"{err}; the ranks of this node go on, and none is started again")
        return default

    def how_training_stands(self) -> str:
        """Returns `Register.training`; as it was last, once the store has ended with node 0."""
        self.training = self.ask(Register.training, default=self.training)
        return self.training

    def take_trained(self, number: int) -> Trained:
        """Returns how long the process that has ended has trained; nobody counts on it any more."""
        trained = self.ask(lambda register: register.trained(number), default=Trained())
        if trained.since is not None:
            self.ask(lambda register: register.forget_training_of(number), default=None)
        if trained.why:
            self.last_words = f"rank {number} {trained.why}"
        return trained

    def gone_of_row(self, number: int) -> list[int]:
        """Returns the ranks that are not started again of the others that hold a rank's replica."""

        def gone(register: Register) -> list[int]:
            num_shards = register.num_shards()
            begin = number - number % num_shards
            row = range(begin, begin + num_shards)
            return [n for n in row if n != number and register.is_gone(n)]

        none: list[int] = []
        return self.ask(gone, default=none)

    def is_alone(self) -> bool:
        """Returns whether no other supervisor has ranks in this job, whether they live or not."""
        more = self.ask(lambda register: register.more_supervisors(0), default=0)
        return self._nodes == 1 and self.node == 0 and not more

    def say_lives(self) -> None:
        """Says that this supervisor lives."""
        assert self._register is not None
        if self._says_lives:
            try:
                self._register.say_lives(self.node)
            except TransportError:
                self._says_lives = False  # whoever asks the store next says that it has ended

    def say_ended(self) -> None:
        """Says that the ranks of this node have ended."""
        assert self._register is not None
        with contextlib.suppress(TransportError):  # of a store that has ended
            self._register.say_ended(self.node)

    def await_nodes(self) -> None:
        """Keeps the store until the ranks of all nodes have ended, or a signal comes."""
        register = self._register
        assert register is not None
        others = self._nodes - 1 + register.more_supervisors(0) if self.node == 0 else 0
        nodes = range(1, others + 1)
        if not nodes or register.await_ended(nodes, _SILENTLY_S, self._is_told_to_end):
            return
        say(f"waits up to {_OTHER_NODES_S:g} s for the ranks of {others} other supervisors to end")
        if not register.await_ended(nodes, _OTHER_NODES_S, self._is_told_to_end):
            say("they have not said that they have; the store where they meet ends")


def say(text: str) -> None:
    """Prints a line of the launcher to the user's terminal, on stderr."""
    print(f"lightning-dsgd launch: {text}", file=sys.stderr, flush=True)  # noqa: T201
