"""How the ranks of a job meet, before they are connected and can watch each other.

Until then all that they have in common is torch's store: a table of keys that rank 0 keeps at the
address that the launcher has chosen, or torchrun's agent there.  Every rank writes about itself:

    come/3     rank 3 has reached the store
    ended/3    what became of rank 3: "opened", from where on the transport watches it; "told", that
               of another's trouble; or its error, as "cause: ..." where that is its own, and as
               "symptom: ..." where another rank may be the reason
    trouble    a rank has failed: all look into the table, and give up
    left/3     rank 3 has read what it needs

    reach the store -> come -> all have come -> process group -> transport -> ended
                                               `--- watching for trouble ---'

A rank that waits for torch to connect the process group, or for the first exchange over it, lets
another thread wait, and looks for `trouble` meanwhile.  So a rank that is alive has ended, or says
"told" soon after the first rank met an error; **who says neither has died or is stopped**.  The
rank to blame is one with a cause, else one that says nothing, else one with a symptom.

**Why nobody waits for ever.**  For the store's name to resolve (`names`), for the store, and then
for all ranks to come, a rank waits for `timeout_s`, and names the ranks that have not come.  For
the process group, and then for the transport, it waits for `timeout_s` at most, and less if a rank
that is alive meets an error, as torch's connections to a rank that died do at once.  For what
became of the others it waits `_VERDICT_WITHIN_S`.  Where rank 0 keeps the store, it leaves last,
but waits for the others no longer than that.  Torch's own time limits do not hold where the host of
the store is stopped or cut off; so each question to the store is asked in a thread of its own,
which is left behind if no answer comes in time.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, Generic, TypeVar

import torch.distributed as dist

from lightning_dsgd.transport.contract import PeerLost, Timeout, TransportError
from lightning_dsgd.transport.host_names import await_name, source_of

T = TypeVar("T")

_LOOK_EVERY_S: Final = 0.25
_ASK_EVERY_S: Final = 0.05
_ANSWER_WITHIN_S: Final = 5.0
"""How long the store may take to answer a question that needs no waiting."""
_VERDICT_WITHIN_S: Final = 5.0
"""How long a rank that is alive may take to notice `trouble`."""


@functools.cache
def leave_garbage_to_parents() -> None:
    """Has processes that are forked from this one collect nothing that was there before.

    A store that is collected joins its thread.  A forked process has no such thread, but may have
    one of its own in that place: then it would hang, or abort.
    """
    os.register_at_fork(after_in_child=gc.freeze)


def outlives_ranks() -> bool:
    """Returns whether the ranks' launcher keeps the store where they meet, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def num_restarts() -> str:
    """Returns how often torchrun has started the ranks again."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


class Rendezvous:
    """Where the ranks meet, and what they say there.

    Its fields belong to the thread that uses it, the training thread; the threads of its tasks use
    only the store, which has a lock of its own.

    Args:
        rank: this process's rank
        world_size: how many ranks there are
        host: the store's host
        port: the store's port
        timeout_s: how long to wait for the others, at each stage
        source: where the host's name comes from; None: what the variables tell
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        host: str,
        port: int,
        timeout_s: float,
        source: str | None = None,
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._host, self._port = host, port
        self._source = source_of(host) if source is None else source
        self._timeout_s = timeout_s
        self._is_agents = outlives_ranks()
        self._keeper = "torchrun's agent" if self._is_agents else "rank 0"
        self._session = 1
        self._store: Any = None

    def join(self) -> Any:
        """Waits until all ranks have come; returns the store of the process group.

        Raises:
            Timeout: with the ranks that have not come
        """
        deadline = time.monotonic() + self._timeout_s
        store = self._reach()
        self._say("come")
        missing = self._ask(lambda: self._find_missing(deadline), self._timeout_s)
        if missing:
            self._give_up("told", missing)
            raise Timeout(
                f"all {self._world_size} ranks must start within "
                f"startup_timeout_s={self._timeout_s:g}, but {_listed(missing)} did not come to "
                f"{self._where()}; look at what {_listed(missing)} printed, or set it higher"
            )
        # Else torch would find the addresses of before, where an agent starts the ranks again.
        return dist.PrefixStore(f"default_pg/{num_restarts()}", store)  # type: ignore[attr-defined]

    def watch(self, work: Callable[[], T], what: str, timeout_s: float | None = None) -> T:
        """Returns what `work` gives, which needs all ranks; raises `PeerLost` if one fails.

        Args:
            work: is called in another thread, which is left behind if `work` does not return
            what: what `work` does, for errors
            timeout_s: how long it may take; None: as long as the start of all ranks
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        try:
            task = Task(work)
            while not task.wait(_LOOK_EVERY_S):
                if time.monotonic() > deadline:
                    raise Timeout(f"rank {self._rank} has waited {limit:g} s to {what}")
                if self._is_there("trouble"):
                    raise _Told(f"rank {self._rank} was told that another failed to {what}")
            return task.result()
        except BaseException as error:
            blamed = self._blamed(error, what)
            if blamed is error:
                raise
            raise blamed from error

    def end(self) -> None:
        """Says that this rank has come through, and is watched; the next call begins anew."""
        with contextlib.suppress(TransportError):  # which the transport notices, too
            self._write("ended", "opened")
        self._session += 1

    @property
    def has_ended(self) -> bool:
        """Whether this rank has come through before."""
        return self._session > 1

    # ---- the store ----

    def _reach(self) -> Any:
        await_name(self._host, self._source, self._timeout_s)
        try:
            own, store = _within(self._timeout_s, self._open_stores)
        except (dist.DistError, Timeout) as err:
            if "EADDRINUSE" in str(err):
                raise TransportError(
                    f"rank 0 must be able to listen at {self._where()}, where the ranks meet, but "
                    "another process does; choose another port, as MASTER_PORT"
                ) from err
            raise Timeout(
                f"rank {self._rank} must reach {self._keeper} at {self._where()}, where the ranks "
                f"meet, within startup_timeout_s={self._timeout_s:g}, got no answer; look at what "
                f"{self._keeper} printed, and whether that is its address and open to this node"
            ) from err
        self._store = own
        return store

    def _open_stores(self) -> tuple[Any, Any]:
        """Opens our store and the process group's: one that waits keeps others from asking."""
        keeps = self._rank == 0 and not self._is_agents
        if keeps:
            leave_garbage_to_parents()
        return self._open_store(keeps), self._open_store(keeps)

    def _open_store(self, keeps: bool) -> Any:
        return dist.TCPStore(  # type: ignore[attr-defined]
            self._host,
            self._port,
            self._world_size,
            is_master=keeps,
            timeout=timedelta(seconds=self._timeout_s),
            wait_for_workers=False,
            multi_tenant=True,  # one table for all stores that this process keeps there
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
        )

    def _find_missing(self, deadline: float) -> list[int]:
        """Returns who has not come, once it is too late or another rank has given up."""
        # The more ranks there are, the less often each may ask the one store.
        pause_s = max(_ASK_EVERY_S, _ASK_EVERY_S / 100 * self._world_size)
        for rank in range(self._world_size):
            while not self._has(f"come/{rank}"):
                if time.monotonic() > deadline or self._has("trouble"):
                    return [r for r in range(rank, self._world_size) if not self._has(f"come/{r}")]
                time.sleep(pause_s)  # torch's own waiting prints two warnings each time it ends
        return []

    def _key(self, name: str) -> str:
        """Returns a key of this session; an agent's store stays when it starts the ranks anew."""
        return f"lightning_dsgd/{num_restarts()}/{self._session}/{name}"

    def _has(self, key: str) -> bool:
        return bool(self._store.check([self._key(key)]))

    def _is_there(self, key: str) -> bool:
        return self._ask(lambda: self._has(key))

    def _read(self, key: str) -> str:
        """Returns what is written under a key; an empty text if nothing is."""
        return str(self._store.get(self._key(key)).decode()) if self._has(key) else ""

    def _write(self, key: str, text: str) -> None:
        """Writes a text about this rank."""
        self._set(f"{key}/{self._rank}", text)

    def _say(self, key: str) -> None:
        self._write(key, "yes")

    def _set(self, key: str, text: str) -> None:
        self._ask(lambda: self._store.set(self._key(key), text))

    def _ask(self, question: Callable[[], T], patience_s: float = 0.0) -> T:
        """Returns the store's answer, which may come `patience_s` later than any answer."""
        limit = patience_s + _ANSWER_WITHIN_S
        try:
            return _within(limit, question)
        except Timeout as err:
            what = f"has not answered at {self._where()} for {limit:g} s (stopped or cut off)"
            raise self._keeper_lost(what) from err
        except dist.DistError as err:
            raise self._keeper_lost(f"ended at {self._where()} before all were connected") from err

    def _keeper_lost(self, what: str) -> TransportError:
        if self._is_agents:
            return TransportError(f"{self._keeper} {what}; look at what it printed")
        return PeerLost(0, what, "the ranks' meeting at its address")

    def _where(self) -> str:
        return f"{self._host}:{self._port}"

    # ---- failure ----

    def _blamed(self, error: BaseException, what: str) -> BaseException:
        """Tells the others of the error; returns an error that names the rank to blame for it."""
        is_symptom = isinstance(error, RuntimeError) and type(error) is not TransportError
        is_clear = isinstance(error, PeerLost) or not is_symptom
        kind = "symptom" if is_symptom else "cause"
        end = f"{kind}: {type(error).__name__}: {error}"
        try:
            ends = self._give_up("told" if isinstance(error, _Told) else end)
        except TransportError as lost:  # the keeper is gone, with what all have said
            return error if is_clear else lost
        if is_clear:
            return error
        for kind in ("cause: ", "", "symptom: "):
            for rank, end in enumerate(ends):
                if rank != self._rank and (end.startswith(kind) if kind else not end):
                    reason = f"failed: {end.removeprefix(kind)}" if kind else "died, or is stopped"
                    return PeerLost(rank, reason, what)
        return error

    def _give_up(self, end: str, missing: Sequence[int] = ()) -> list[str]:
        """Says how this rank has ended; returns how all have, once all can read that.

        Args:
            end: how this rank has ended
            missing: the ranks that have not come, and will say nothing
        """
        self._write("ended", end)
        self._set("trouble", "yes")
        ends = self._ask(lambda: self._await_ends(missing), _VERDICT_WITHIN_S)
        self._say("left")
        if self._rank == 0 and not self._is_agents:
            self._ask(lambda: self._await_readers(ends), _VERDICT_WITHIN_S)
        return ends

    def _await_ends(self, missing: Sequence[int]) -> list[str]:
        """Returns what became of every rank, as far as the ranks say it in time."""
        deadline = time.monotonic() + _VERDICT_WITHIN_S
        ends = [""] * self._world_size
        awaited = set(range(self._world_size)).difference(missing)
        while awaited and time.monotonic() < deadline:
            for rank in sorted(awaited):
                ends[rank] = self._read(f"ended/{rank}")
            awaited = {rank for rank in awaited if not ends[rank]}
            time.sleep(_ASK_EVERY_S)
        return ends

    def _await_readers(self, ends: Sequence[str]) -> None:
        """Waits until all ranks have left that give up as well."""
        deadline = time.monotonic() + _VERDICT_WITHIN_S
        readers = [rank for rank, end in enumerate(ends) if end not in ("", "opened")]
        while time.monotonic() < deadline and not all(self._has(f"left/{r}") for r in readers):
            time.sleep(_ASK_EVERY_S)


class _Told(RuntimeError):
    """The rendezvous has told this rank that another rank has failed."""


class Task(Generic[T]):
    """Work that is done in another thread.

    That thread writes the result, or the failure, and then sets `_ended`; only after that are they
    read.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._results: list[T] = []
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="dsgd-rendezvous", daemon=True).start()

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as failure:
            self._failure = failure
        finally:
            self._ended.set()

    def wait(self, seconds: float) -> bool:
        """Waits, for so long at most; returns whether the work is done."""
        return self._ended.wait(seconds)

    def result(self) -> T:
        """Returns what the work has given; raises what it has raised."""
        if self._failure is not None:
            raise self._failure
        return self._results[0]


def _within(seconds: float, work: Callable[[], T]) -> T:
    """Returns what `work` gives; raises `Timeout` if it takes longer, leaving its thread behind."""
    task = Task(work)
    if not task.wait(seconds):
        raise Timeout(f"no answer within {seconds:g} s")
    return task.result()


def _listed(ranks: Sequence[int]) -> str:
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
