"""The processes of a node's ranks: started, watched, told to end, and buried.

    a rank ends badly             on_loss="end": the others end too, by themselves, or after
                                  `end_s` by SIGTERM, and then by SIGKILL
    a rank ends before training   on_loss="continue": the others go on, and it is started again, at
                                  once, or after 1 s, 2 s, 4 s, ... where it has hardly trained,
                                  `max_restarts` times at most;
                                  but for one that has left, as it got SIGTERM, and in a loop of
                                  the user's, which a rank cannot join
    ranks hold a replica together   the others of a lost one end by themselves, and each is started
                                  again like any rank: they gather (`gathering`).  One that is not
                                  started again is `gone`, and the others are not started either
    no rank is left that trains   who is started again could only fail: all end; ranks do not count
                                  whose node's supervisor has died, as with its machine
    Ctrl-C comes here             every rank gets SIGINT, on which all stop after the same batch
    SIGTERM comes here, or notice every rank gets SIGTERM, on which it leaves before a batch, with
    (`notice`)                    on_loss="continue"; where there is no other node, the same as
                                  with Ctrl-C
    a second signal               ends all ranks of this node at once; not the first after notice
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

**Threads.**  One, and that of `notice`: signal handlers only write down which signal has come.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from lightning_dsgd.elastic.launch.node import NodeRegister, Place, say
from lightning_dsgd.elastic.launch.notice import Notice
from lightning_dsgd.elastic.launch.rank import Rank
from lightning_dsgd.elastic.launch.reserve import Reserve, has_device
from lightning_dsgd.elastic.register import GOES_ON, OVER, SILENT_S, STOPPED, Register, Trained

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
_LAST_WORDS: Final = 12
"""How many lines of a log may be the reason why a rank has ended."""
_OF_A_RANK: Final = r"(\[rank ?\d+\]:? )?"


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
        notice: what says that this machine is to be taken away; None: nothing does
    """

    def __init__(
        self,
        command: Sequence[str],
        place: Place,
        logs: Path,
        end_s: float,
        max_restarts: int,
        imports: Sequence[str] = (),
        notice: str | None = None,
    ) -> None:
        if max_restarts < 0:
            raise ValueError(f"--max-restarts must be at least 0, got {max_restarts}; try 3")
        if not 0 <= end_s < float("inf"):
            raise ValueError(f"--end-s must be a number of seconds, got {end_s}; try 30")
        self._command, self._logs, self._end_s = command, logs, end_s
        self._max_restarts = max_restarts
        self._ranks = [Rank(local) for local in range(place.ranks)]
        self._reserve = Reserve(command[2:], imports, logs)
        self._has_reserve = bool(imports)
        self._told = NodeRegister(place, self._is_told_to_end)
        self._notice = Notice(notice, say) if notice is not None else None
        self._signals: list[int] = []
        self._is_leaving = False
        """Whether the ranks of this node are to end as there is notice."""
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
        if self._notice is not None:
            self._notice.begin()
        self._logs.mkdir(parents=True, exist_ok=True)
        with self._take_signals(), self._told.open():
            try:
                if self._has_reserve and not has_device():
                    self._begin_reserve()
                    if self._told.variables(0)["OMP_NUM_THREADS"] == "1":  # else it may not fork
                        self._await_reserve()
                for rank in self._ranks:
                    self._start(rank)
                say(f"{len(self._ranks)} ranks started, logs in {self._logs}")
                while any(rank.process or rank.again_at is not None for rank in self._ranks):
                    self._look()
                    time.sleep(_LOOK_EVERY_S)
            finally:
                self._reserve.end()
                self._bury()
                self._told.say_ended()
            for rank in self._ranks:
                rank.show_rest()
            self._told.await_nodes()
            status = self._status()
            if status and self._first_to_fail is not None:
                _say_why(self._first_to_fail)
            return status

    # ---- the process from which ranks start ----

    def _begin_reserve(self) -> None:
        self._reserve.begin({"OMP_NUM_THREADS": self._told.variables(0)["OMP_NUM_THREADS"]})

    def _await_reserve(self) -> None:
        end = time.monotonic() + _IMPORTS_WITHIN_S
        while self._reserve.has_begun and not self._reserve.is_ready and not self._signals:
            self._reserve.look()
            time.sleep(_LOOK_EVERY_S)
            if time.monotonic() > end:
                say(
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
            say(str(err))
        if self._has_reserve and not self._reserve.has_begun and self._survives():
            self._begin_reserve()

    def _survives(self) -> bool:
        return self._told.how_training_stands() in GOES_ON

    def _start(self, rank: Rank) -> None:
        rank.start(self._command, self._told.variables(rank.local), self._logs, self._reserve)

    # ---- what happens ----

    def _is_told_to_end(self) -> bool:
        return bool(self._signals)

    @contextlib.contextmanager
    def _take_signals(self) -> Iterator[None]:
        def note(signum: int, _: Any) -> None:
            self._signals.append(signum)

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
        if self._notice is not None and self._notice.given:
            say(f"there is notice, and the ranks of this node end: {self._notice.given}")
            self._notice, self._is_leaving = None, True
            self._leave()
        now = time.monotonic()
        if self._say_lives_at <= now:
            self._say_lives_at = now + _SAY_LIVES_EVERY_S
            self._told.say_lives()
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
        training = self._told.how_training_stands()
        trained = self._told.take_trained(self._number(rank))
        if training in GOES_ON:
            self._lost(rank, trained)
            return
        self._drop_restarts()
        if rank.status:
            if self._first_to_fail is None and not self._kill_at:
                self._first_to_fail = rank.log
            late = ", once training was over, and is not replaced" if training == OVER else ""
            say(f"rank {self._number(rank)} ended with {rank.status}{late}: {rank.log}")
            if training != OVER:
                self._end_within(self._end_s)

    def _lost(self, rank: Rank, trained: Trained) -> None:
        """Handles a rank that has ended although training goes on."""
        number, early = self._number(rank), "" if rank.status else ", but training goes on"
        say(f"rank {number} ended with {rank.status}{early}: {rank.log}")
        # A newcomer may be about to say that it trains.
        self._judge_at = time.monotonic() + _FIRST_BACKOFF_S
        if trained.seconds > _FORGETS_AFTER_S:
            rank.num_counted = 1
        rank.num_failures = 0 if trained.seconds > _HARDLY_S else rank.num_failures + 1
        if self._told.ask(lambda register: register.has_left(number), default=False):
            say(f"rank {number} has left, as it was told to")
        elif not self._kill_at:
            self._plan_restart(rank)
        if rank.is_shown and not self._kill_at:
            self._show_another(rank)

    def _show_another(self, lost: Rank) -> None:
        """Shows the rank of this node that prints for all now, if it is of this node."""
        living = [rank for rank in self._ranks if rank.process is not None]
        if living:
            oldest = min(living, key=lambda rank: rank.started_at)
            lost.show_rest()
            lost.is_shown, oldest.is_shown = False, True
            say(f"the output of rank {self._number(oldest)} follows: {oldest.log}")

    def _number(self, rank: Rank) -> int:
        return self._told.number(rank.local)

    def _plan_restart(self, rank: Rank) -> None:
        can_be_joined = self._told.ask(Register.can_be_joined, default=False)
        if not self._told.has_store:
            return  # it could not find the others
        if not can_be_joined:
            say(
                f"rank {self._number(rank)} is not replaced: a rank can join a training of "
                "Lightning's Trainer only, one that makes the process group itself; the others go "
                "on without it"
            )
            return
        number = self._number(rank)
        if rank.num_counted > self._max_restarts:
            say(
                f"rank {number} is not started again: --max-restarts is {self._max_restarts}, and "
                f"it has not trained for {_FORGETS_AFTER_S:g} s since"
            )
            self._told.ask(lambda register: register.say_gone(number), default=None)
            return
        gone = self._told.gone_of_row(number)
        if gone:
            say(
                f"rank {number} is not started again: rank {gone[0]}, which holds its replica with "
                "it, is not"
            )
            return
        backoff_s = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (rank.num_failures - 1))
        rank.again_at = time.monotonic() + backoff_s * (rank.num_failures > 0)

    def _start_again(self, rank: Rank) -> None:
        if self._told.how_training_stands() not in GOES_ON or not self._told.has_store:
            self._drop_restarts()
            return
        self._start(rank)
        say(f"rank {self._number(rank)} started again: {rank.log}")

    def _drop_restarts(self) -> None:
        """Drops restarts where training does not go on, or no store tells a rank where it does."""
        for rank in self._ranks:
            if rank.again_at is not None:
                rank.again_at = None
                say(f"rank {self._number(rank)} is not started again: {self._why_not()}")

    def _why_not(self) -> str:
        if not self._told.has_store:
            return "the store where the ranks meet has ended"
        is_over = self._told.training == OVER
        return "training has come to its end" if is_over else "training has stopped"

    def _end_if_nobody_trains(self) -> None:
        if self._told.how_training_stands() not in GOES_ON or self._kill_at:
            return
        none: list[Trained] = []
        everyones = self._told.ask(Register.everyones_training, default=none)
        nodes = {trained.node for trained in everyones if trained.goes_on}
        living = self._told.ask(lambda register: register.living(nodes), default=nodes)
        if living and self._told.node not in living:
            self._judge_at = time.monotonic() + SILENT_S  # only then a silent one counts as dead
        if not self._told.has_store or living:
            return
        said = [f"rank {number} {each.why}" for number, each in enumerate(everyones) if each.why]
        last = said[-1] if said else self._told.last_words
        words = f" ({last})" if last else ""
        say(
            f"no rank is left that trains{words}, so none that is started again could join; all "
            "end: start the job anew, from a checkpoint"
        )
        self._told.ask(Register.say_stopped, default=None)
        self._end_within(self._end_s)

    def _pass_on(self) -> None:
        signums, self._signals = self._signals, []
        if len(signums) > 1 or (self._kill_at and not self._is_leaving):
            self._kill_at = []
            self._end_within(0.0)
            self._send(signal.SIGKILL)
        elif signums == [signal.SIGTERM]:
            self._leave()
        else:
            self._send(signal.SIGINT)
            self._end_within(self._end_s)
        self._is_leaving = False

    def _leave(self) -> None:
        """Has the ranks of this node leave the others; where there are none, all stop."""
        self._send(signal.SIGINT if self._told.is_alone() else signal.SIGTERM)
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

    def _bury(self) -> None:
        """Kills what is still running, whatever has happened."""
        self._send(signal.SIGKILL)
        for rank in self._ranks:
            if rank.process is not None:
                rank.process.wait()

    def _status(self) -> int:
        statuses, training = [rank.status for rank in self._ranks], self._told.how_training_stands()
        if not training:
            return int(any(statuses))
        if training == OVER or (training != STOPPED and not self._told.has_store):
            return 0 if 0 in statuses else 1
        say("the ranks of this node have ended, but training has not come to its end")
        return 1


def _say_why(log: Path) -> None:
    """Prints the last words of a rank at the end of all, as its log may be long."""
    lines = log.read_text(errors="replace").strip().splitlines()[-_LAST_WORDS:]
    begins = [at for at, line in enumerate(lines) if re.match(f"{_OF_A_RANK}error: ", line)]
    words = "\n".join(lines[begins[-1] if begins else -1 :])
    if words:
        reason = re.sub(f"^{_OF_A_RANK}(error: )?", "", words)
        print(f"error: {reason}", file=sys.stderr, flush=True)  # noqa: T201
