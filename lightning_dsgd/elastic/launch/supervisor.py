"""The processes of a node's ranks: started, watched, told to end, and buried.

    a rank ends badly             on_loss="end": the others end too, by themselves, or after
                                  `end_s` by SIGTERM, and then by SIGKILL
    a rank ends before training   on_loss="continue": the others go on, and it is started again, at
                                  once, or after 1 s, 2 s, 4 s, ... where it has hardly trained,
                                  `max_restarts` times at most;
                                  but for one that has left, as it got SIGTERM, and in a loop of
                                  the user's, which a rank cannot join
    no rank is left that trains   who is started again could only fail: all end; ranks do not count
                                  whose node's supervisor has died, as with its machine
    SIGTERM or Ctrl-C comes here  every rank gets SIGINT, on which all stop after the same batch;
                                  a second one ends them at once
    the supervisor dies           the kernel sends SIGTERM to its ranks

**Whether training goes on** the ranks say themselves, at the store (`register`), with
on_loss="continue": that a rank ends with 0 tells nothing, as its script may have caught an error.
The job has ended well only once they have said that training is over.

**Which starts count.**  Once a rank has trained for `_FORGETS_AFTER_S`, its starts before that do
not count any more: so each of many losses in weeks is followed by as many starts as the first.

**Imports** are most of a rank's start, so one process makes them for all ranks of the node, before
they start, and waits for those that start again (`reserve`).  On a machine with a GPU it begins
once a training goes on that survives a loss, and serves ranks that start again alone.

With `Place.joins` its ranks are none of the first: they get numbers behind these, and start once
training goes on.

Every rank has a session of its own, with the processes that it starts: a Ctrl-C at the terminal
reaches the supervisor alone, and no process of a rank is left when that one is ended by force.

**Why nobody waits for ever.**  The ranks are looked at every `_LOOK_EVERY_S`, and no look waits.
Once ranks are to end, they have `end_s`, then `_TERM_S` after SIGTERM; nobody survives SIGKILL.

**Threads.**  One: signal handlers only write down which signal has come.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from lightning_dsgd.elastic.launch.place import Place
from lightning_dsgd.elastic.launch.rank import Rank
from lightning_dsgd.elastic.launch.reserve import Reserve, has_device
from lightning_dsgd.elastic.register import GOES_ON, OVER, SILENT_S, STOPPED, Register, Trained
from lightning_dsgd.transport import TransportError

T = TypeVar("T")

_LOOK_EVERY_S: Final = 0.05
_SAY_LIVES_EVERY_S: Final = 2.0
_IMPORTS_WITHIN_S: Final = 120.0
_FIRST_BACKOFF_S: Final = 1.0
_LONGEST_BACKOFF_S: Final = 60.0
_HARDLY_S: Final = 10.0
"""A rank that has trained for longer is started again at once."""
_FORGETS_AFTER_S: Final = 600.0
_TERM_S: Final = 10.0
"""How long a rank has between SIGTERM and SIGKILL."""
_OTHER_NODES_S: Final = 60.0
"""How long the store waits for the ranks of other nodes to end."""
_SILENTLY_S: Final = 2.0
"""How long the store waits for them without a word."""
_STORE_S: Final = 300.0


class Supervisor:
    """Watches the ranks of this node; the head of the file tells how.

    Args:
        command: the command of a rank
        place: the place of this node
        logs: the folder of the ranks' logs
        end_s: how long ranks may take to end by themselves, once they are to end
        max_restarts: how often a rank is started again that has not trained for long since
        imports: the modules that a process has imported from which ranks start; none: no such
            process
    """

    def __init__(
        self,
        command: Sequence[str],
        place: Place,
        logs: Path,
        end_s: float,
        max_restarts: int,
        imports: Sequence[str] = (),
    ) -> None:
        if max_restarts < 0:
            raise ValueError(f"--max-restarts must be at least 0, got {max_restarts}; try 3")
        if not 0 <= end_s < float("inf"):
            raise ValueError(f"--end-s must be a number of seconds, got {end_s}; try 30")
        self._command, self._place, self._logs, self._end_s = command, place, logs, end_s
        self._max_restarts = max_restarts
        self._ranks = [Rank(local) for local in range(place.ranks)]
        self._reserve = Reserve(command[2:], imports, logs)
        self._has_reserve = bool(imports)
        self._node, self._nodes, self._size = place.node, place.nodes, place.ranks
        """The numbers of this node, of the nodes at the start, and of the ranks on each of them."""
        begin = place.node * place.ranks
        self._numbers = range(begin, begin + place.ranks)
        self._signals = 0
        self._port = place.port
        self._register: Register | None = None
        self._has_store = True
        self._training = ""
        """How the training stood when the store said so last."""
        self._last_words = ""
        """The words of the last rank that has said why it does not train any more."""
        self._first_to_fail: Path | None = None
        """The log of the rank that has ended badly first."""
        self._judge_at = float("inf")
        """When to look whether any rank is left that trains."""
        self._say_lives_at = 0.0
        """When to say next that this supervisor lives."""
        self._kill_at: list[tuple[float, int]] = []
        """When which signal is sent to the ranks that have not ended."""

    def run(self) -> int:
        """Runs until all ranks of this node have ended; returns this process's exit status."""
        self._logs.mkdir(parents=True, exist_ok=True)
        with self._take_signals(), self._serve():
            try:
                if self._has_reserve and not has_device():
                    self._begin_reserve()
                    if self._variables(0)["OMP_NUM_THREADS"] == "1":  # else it may not fork
                        self._await_reserve()
                for rank in self._ranks:
                    self._start(rank)
                _say(f"{len(self._ranks)} ranks started, logs in {self._logs}")
                while any(rank.process or rank.again_at is not None for rank in self._ranks):
                    self._look()
                    time.sleep(_LOOK_EVERY_S)
            finally:
                self._reserve.end()
                self._bury()
                self._say_ended()
            for rank in self._ranks:
                rank.show_rest()
            self._await_nodes()
            status = self._status()
            if status and self._first_to_fail is not None:
                _say_why(self._first_to_fail)
            return status

    # ---- the process from which ranks start ----

    def _begin_reserve(self) -> None:
        self._reserve.begin({"OMP_NUM_THREADS": self._variables(0)["OMP_NUM_THREADS"]})

    def _await_reserve(self) -> None:
        end = time.monotonic() + _IMPORTS_WITHIN_S
        while self._reserve.has_begun and not self._reserve.is_ready and not self._signals:
            self._reserve.look()
            time.sleep(_LOOK_EVERY_S)
            if time.monotonic() > end:
                _say(
                    f"the modules of --imports were not imported within {_IMPORTS_WITHIN_S:g} s; "
                    "each rank imports them by itself"
                )
                return

    def _look_after_reserve(self) -> None:
        """Keeps a process ready from which a rank can start again."""
        if not self._has_reserve:
            return
        try:
            self._reserve.look()
        except ValueError as err:
            self._has_reserve = False
            _say(str(err))
        if self._has_reserve and not self._reserve.has_begun and self._survives():
            self._begin_reserve()

    def _survives(self) -> bool:
        return self._how_training_stands() in GOES_ON

    def _start(self, rank: Rank) -> None:
        rank.start(self._command, self._variables(rank.local), self._logs, self._reserve)

    # ---- the store ----

    @contextlib.contextmanager
    def _serve(self) -> Iterator[None]:
        place = self._place
        serves = place.node == 0 and not place.joins
        self._register = register = Register(place.host, place.port, _STORE_S, serves=serves)
        self._port = register.port
        if serves:
            register.write_size(place.nodes, place.ranks)
        elif place.joins:
            self._find_training(register)
        yield
        self._register = None

    def _find_training(self, register: Register) -> None:
        """Waits until a training goes on, and has its ranks counted behind the others."""
        found = register.await_training(_STORE_S, self._is_told_to_end)
        if self._signals:
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
        self._node = self._nodes - 1 + register.more_supervisors(1)

    def _say_ended(self) -> None:
        assert self._register is not None
        with contextlib.suppress(TransportError):  # of a store that has ended
            self._register.say_ended(self._node)

    def _say_lives(self) -> None:
        assert self._register is not None
        try:
            self._register.say_lives(self._node)
        except TransportError:
            self._say_lives_at = float("inf")  # whoever asks the store next says that it has ended

    def _await_nodes(self) -> None:
        """Keeps the store until the ranks of all nodes have ended, or a signal comes."""
        register = self._register
        assert register is not None
        others = self._nodes - 1 + register.more_supervisors(0) if self._node == 0 else 0
        nodes = range(1, others + 1)
        if not nodes or register.await_ended(nodes, _SILENTLY_S, self._is_told_to_end):
            return
        _say(f"waits up to {_OTHER_NODES_S:g} s for the ranks of {others} other supervisors to end")
        if not register.await_ended(nodes, _OTHER_NODES_S, self._is_told_to_end):
            _say("they have not said that they have; the store where they meet ends")

    def _is_told_to_end(self) -> bool:
        return self._signals > 0

    def _variables(self, local: int) -> dict[str, str]:
        place = self._place
        variables = {
            "RANK": self._numbers[local],
            "LOCAL_RANK": local % self._size,
            "WORLD_SIZE": self._nodes * self._size,
            "LOCAL_WORLD_SIZE": self._size,
            "GROUP_RANK": self._node,
            "GROUP_WORLD_SIZE": self._nodes,
            "MASTER_ADDR": place.host,
            "MASTER_PORT": self._port,
            "TORCHELASTIC_RUN_ID": "lightning-dsgd",
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        return {name: str(value) for name, value in variables.items()}

    # ---- what happens ----

    @contextlib.contextmanager
    def _take_signals(self) -> Iterator[None]:
        def note(signum: int, _: Any) -> None:
            self._signals += 1

        taken = {signum: signal.signal(signum, note) for signum in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for signum, before in taken.items():
                signal.signal(signum, before)

    def _look(self) -> None:
        for rank in self._ranks:
            rank.show()
            if rank.look():
                self._ended(rank)
        if self._signals:
            self._pass_on()
        now = time.monotonic()
        if self._say_lives_at <= now:
            self._say_lives_at = now + _SAY_LIVES_EVERY_S
            self._say_lives()
            self._look_after_reserve()
        if self._judge_at <= now:
            self._judge_at = float("inf")
            self._end_if_nobody_trains()
        for rank in self._ranks:
            if rank.again_at is not None and rank.again_at <= now:
                self._start_again(rank)
        while self._kill_at and self._kill_at[0][0] <= now:
            _, signum = self._kill_at.pop(0)
            self._send(signum)

    def _ended(self, rank: Rank) -> None:
        training, trained = self._how_training_stands(), self._take_trained(rank)
        if training in GOES_ON:
            self._lost(rank, trained)
            return
        self._drop_restarts()
        if rank.status:
            if self._first_to_fail is None and not self._kill_at:
                self._first_to_fail = rank.log
            late = ", once training was over, and is not replaced" if training == OVER else ""
            _say(f"rank {self._number(rank)} ended with {rank.status}{late}: {rank.log}")
            if training != OVER:
                self._end_within(self._end_s)

    def _lost(self, rank: Rank, trained: Trained) -> None:
        """Handles a rank that has ended although training goes on."""
        number, early = self._number(rank), "" if rank.status else ", but training goes on"
        _say(f"rank {number} ended with {rank.status}{early}: {rank.log}")
        # A newcomer may be about to say that it trains.
        self._judge_at = time.monotonic() + _FIRST_BACKOFF_S
        if trained.seconds > _FORGETS_AFTER_S:
            rank.num_counted = 1
        rank.num_failures = 0 if trained.seconds > _HARDLY_S else rank.num_failures + 1
        if self._asked(lambda register: register.has_left(number), default=False):
            _say(f"rank {number} has left, as it was told to")
        elif not self._kill_at:
            self._plan_restart(rank)

    def _number(self, rank: Rank) -> int:
        return self._numbers[rank.local]

    def _plan_restart(self, rank: Rank) -> None:
        can_be_joined = self._asked(Register.can_be_joined, default=False)
        if not self._has_store:
            return  # it could not find the others
        if not can_be_joined:
            _say(
                f"rank {self._number(rank)} is not replaced: a rank can join a training of "
                "Lightning's Trainer only, one that makes the process group itself, of models that "
                "are not sharded; the others go on without it"
            )
            return
        if rank.num_counted > self._max_restarts:
            _say(
                f"rank {self._number(rank)} is not started again: --max-restarts is "
                f"{self._max_restarts}, and it has not trained for {_FORGETS_AFTER_S:g} s since"
            )
            return
        backoff_s = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (rank.num_failures - 1))
        rank.again_at = time.monotonic() + backoff_s * (rank.num_failures > 0)

    def _start_again(self, rank: Rank) -> None:
        if self._how_training_stands() not in GOES_ON or not self._has_store:
            self._drop_restarts()
            return
        self._start(rank)
        _say(f"rank {self._number(rank)} started again: {rank.log}")

    def _drop_restarts(self) -> None:
        """Drops restarts where training does not go on, or no store tells a rank where it does."""
        for rank in self._ranks:
            if rank.again_at is not None:
                rank.again_at = None
                _say(f"rank {self._number(rank)} is not started again: {self._why_not()}")

    def _why_not(self) -> str:
        if not self._has_store:
            return "the store where the ranks meet has ended"
        return "training has come to its end" if self._training == OVER else "training has stopped"

    def _end_if_nobody_trains(self) -> None:
        if self._how_training_stands() not in GOES_ON or self._kill_at:
            return
        none: list[Trained] = []
        everyones = self._asked(Register.everyones_training, default=none)
        nodes = {trained.node for trained in everyones if trained.goes_on}
        living = self._asked(lambda register: register.living(nodes), default=nodes)
        if living and self._node not in living:
            self._judge_at = time.monotonic() + SILENT_S  # only then a silent one counts as dead
        if not self._has_store or living:
            return
        said = [f"rank {number} {each.why}" for number, each in enumerate(everyones) if each.why]
        words = f" ({(said or [self._last_words])[-1]})" if said or self._last_words else ""
        _say(
            f"no rank is left that trains{words}, so none that is started again could join; all "
            "end: start the job anew, from a checkpoint"
        )
        self._asked(Register.say_stopped, default=None)
        self._end_within(self._end_s)

    def _pass_on(self) -> None:
        is_second, self._signals = bool(self._signals > 1 or self._kill_at), 0
        if is_second:
            self._kill_at = []
            self._end_within(0.0)
            self._send(signal.SIGKILL)
        else:
            self._send(signal.SIGINT)
            self._end_within(self._end_s)

    def _end_within(self, seconds: float) -> None:
        for rank in self._ranks:
            rank.again_at = None
        if not self._kill_at:
            at = time.monotonic() + seconds
            self._kill_at = [(at, signal.SIGTERM), (at + _TERM_S, signal.SIGKILL)]

    def _send(self, signum: int) -> None:
        for rank in self._ranks:
            rank.signal(signum)

    def _how_training_stands(self) -> str:
        """Returns `Register.training`; as it was last, once the store has ended with node 0."""
        self._training = self._asked(Register.training, default=self._training)
        return self._training

    def _take_trained(self, rank: Rank) -> Trained:
        """Returns how long the process that has ended has trained; nobody counts on it any more."""
        number = self._number(rank)
        trained = self._asked(lambda register: register.trained(number), default=Trained())
        if trained.since is not None:
            self._asked(lambda register: register.forget_training_of(number), default=None)
        if trained.why:
            self._last_words = f"rank {number} {trained.why}"
        return trained

    def _asked(self, question: Callable[[Register], T], default: T) -> T:
        """Returns what the store says; the default, once the store has ended with node 0."""
        assert self._register is not None
        if self._has_store:
            try:
                return question(self._register)
            except TransportError as err:
                self._has_store = False
                _say(f"{err}; the ranks of this node go on, and none is started again")
        return default

    def _bury(self) -> None:
        """Kills what is still running, whatever has happened."""
        self._send(signal.SIGKILL)
        for rank in self._ranks:
            if rank.process is not None:
                rank.process.wait()

    def _status(self) -> int:
        statuses, training = [rank.status for rank in self._ranks], self._how_training_stands()
        if not training:
            return int(any(statuses))
        if training == OVER or (training != STOPPED and not self._has_store):
            return 0 if 0 in statuses else 1
        _say("the ranks of this node have ended, but training has not come to its end")
        return 1


def _say(text: str) -> None:
    print(f"lightning-dsgd launch: {text}", file=sys.stderr, flush=True)  # noqa: T201


def _say_why(log: Path) -> None:
    """Prints the last words of a rank as the last line of all, as its log may be long."""
    words = log.read_text(errors="replace").strip().splitlines()[-1:]
    for text in words:
        reason = re.sub(r"^(\[rank ?\d+\]:? )?(error: )?", "", text)
        print(f"error: {reason}", file=sys.stderr, flush=True)  # noqa: T201
