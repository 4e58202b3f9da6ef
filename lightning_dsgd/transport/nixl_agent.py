"""NIXL as this package uses it: one agent a process, and the memory that other ranks may read.

NIXL (the extra `nixl`) moves memory between processes one-sidedly, over UCX: what one has
registered, another reads.  Over shared memory, and RDMA, the owner's processor has no part in it.

**Memory.**  Other ranks read in two kinds of memory, both registered until the network closes,
since nothing takes back what another rank knows of a region:

    pieces    a pool: copies of what is sent, and messages that have come.  A piece is free when
              no tensor uses it, as in `buffers`
    held      the memory of tensors that are sent again and again (weights): from the second time
              on it is read where it is.  The network keeps such memory alive, up to _MOST_HELD

**Threads.**  Any thread may call; one lock in `Agent` lets one thread at a time into the library,
and one in `Memory` guards its lists.  Whoever has the latter may take the former, never the other
way round.
"""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import os
import signal
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

PACKAGES: Final = ("nixl", "nixl_cu12", "nixl_cu13")
"""Under which names it may be installed: `pip install nixl-cu12` brings the second."""
_BACKEND: Final = "UCX"
_SMALLEST_PIECE: Final = 1 << 20
_SMALLEST_HELD: Final = 1 << 20
_MOST_HELD: Final = 16
_MOST_SEEN: Final = 256
_TRIAL_S: Final = 30.0


def installed() -> str:
    """The name that NIXL is installed under; empty if it is not."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name)), "")


def load_nixl() -> Any:
    """NIXL's module of the Python interface."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # read when it is loaded; else it greets
    return importlib.import_module(f"{installed()}._api")


class Agent:
    """NIXL's agents of this process, one thread at a time.

    One of them lends memory, the other one reads.  Where one does both, and two ranks read each
    other's memory in turn, UCX waits for an answer of the other rank at the end of each read; which
    comes when that rank asks NIXL for something.  They have no threads of their own: such a thread
    would take a core.  `progress` takes its place.

    Args:
        name: different on all ranks, and from one network to the next
    """

    def __init__(self, name: str) -> None:
        api = load_nixl()
        sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = api.nixl_agent_config(enable_prog_thread=False, sync_mode=sync)
        self._lender: Any = api.nixl_agent(name, config)
        self._reader: Any = api.nixl_agent(f"{name}-reader", config)
        self._lock = threading.Lock()

    def register(self, address: int, nbytes: int) -> tuple[Any, Any]:
        """Lets NIXL read and write this memory; gives what `deregister` takes."""
        memory = [(address, nbytes, 0, "")]
        with self._lock:
            return (
                self._lender.register_memory(memory, "DRAM"),
                self._reader.register_memory(memory, "DRAM"),
            )

    def introduce(self, registered: tuple[Any, Any]) -> bytes:
        """What another agent needs to read there."""
        with self._lock:
            return bytes(self._lender.get_partial_agent_metadata(registered[0], True, [_BACKEND]))

    def register_to_write(self, address: int, nbytes: int) -> Any:
        """Lets it read another rank's memory into this one; gives what `deregister` takes."""
        with self._lock:
            return self._reader.register_memory([(address, nbytes, 0, "")], "DRAM")

    def deregister(self, registered: Any) -> None:
        """Ends what `register_to_write` began."""
        with self._lock:
            self._reader.deregister_memory(registered)

    def meet(self, introduction: bytes) -> str:
        """Takes what another agent has given by `introduce`; gives its name."""
        with self._lock:
            name = self._reader.add_remote_agent(introduction)
        return name.decode() if isinstance(name, bytes) else str(name)

    def read(self, name: str, there: int, here: int, nbytes: int) -> Read:
        """Begins to read that agent's memory."""
        with self._lock:
            source = self._reader.get_xfer_descs([(there, nbytes, 0)], "DRAM")
            target = self._reader.get_xfer_descs([(here, nbytes, 0)], "DRAM")
            handle = self._reader.initialize_xfer("READ", target, source, name)
            return Read(self, handle, self._reader.transfer(handle))

    def state(self, handle: Any) -> str:
        """How far a read is: DONE, PROC or ERR."""
        with self._lock:
            return str(self._reader.check_xfer_state(handle))

    def release(self, handle: Any) -> None:
        """Nobody asks for this read any more."""
        with self._lock:
            handle.release()

    def progress(self) -> None:
        """Answers readers: to connect they need it, and where reading is not one-sided."""
        with self._lock:
            self._lender.get_new_notifs()

    def close(self) -> None:
        """Ends both agents, and with them what UCX has open."""
        with self._lock:
            self._lender = self._reader = None


class Read:
    """A read under way.

    Args:
        agent: whose it is
        handle: NIXL's
        state: as it was begun
    """

    def __init__(self, agent: Agent, handle: Any, state: str) -> None:
        self._agent, self._handle, self._state = agent, handle, state
        self.was_immediate = state == "DONE"
        """Whether the memory was here when it had begun: a copy by this processor."""

    def done(self) -> bool:
        """Whether the memory is here; raises `OSError` if it cannot be read."""
        if self._state == "PROC":
            self._state = self._agent.state(self._handle)
        if self._state == "PROC":
            return False
        self._agent.release(self._handle)
        if self._state != "DONE":
            raise OSError(f"NIXL's read ended with {self._state}")
        return True


@dataclass
class Region:
    """Memory that other ranks may read.

    Args:
        number: by which other ranks are told of it once
        address: where it begins
        nbytes: its length
        introduction: what other agents need
        memory: a piece, or the storage of a tensor; keeps it alive
    """

    number: int
    address: int
    nbytes: int
    introduction: bytes
    memory: Any


class Memory:
    """What other ranks may read of this process.

    Args:
        agent: of this process
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.RLock()
        self._pieces: list[Region] = []
        self._held: list[Region] = []
        self._seen: dict[int, weakref.ref[Any]] = {}

    def region_of(self, x: Tensor) -> Region | None:
        """The region that a tensor lies in, if it lies in one."""
        begin, end = x.data_ptr(), x.data_ptr() + x.nbytes
        with self._lock:
            for region in (*self._held, *self._pieces):
                if region.address <= begin and end <= region.address + region.nbytes:
                    return region
        return None

    def lend(self, x: Tensor, *, copy: bool) -> tuple[Region, Tensor]:
        """A region, and the tensor in it that other ranks may read: `x` itself, or a copy."""
        region = None if copy else self.region_of(x) or self._hold_if_seen(x)
        if region is not None:
            return region, x
        region, lent = self._in_a_piece(len(x), x.dtype)
        return region, lent.copy_(x.detach())

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of any contents, in a region."""
        return self._in_a_piece(numel, dtype)[1]

    def _in_a_piece(self, numel: int, dtype: torch.dtype) -> tuple[Region, Tensor]:
        nbytes = numel * dtype.itemsize
        with self._lock:
            piece = self._free_piece(nbytes) or self._new_piece(nbytes)
            whole = torch.frombuffer(piece.memory, dtype=torch.uint8)
        return piece, whole[:nbytes].view(dtype)

    def close(self) -> None:
        """Keeps nothing alive any more."""
        with self._lock:
            self._pieces, self._held, self._seen = [], [], {}

    def _hold_if_seen(self, x: Tensor) -> Region | None:
        """From the second time on that the same memory is sent."""
        storage = x.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if nbytes < _SMALLEST_HELD:
            return None
        with self._lock:
            seen = self._seen.pop(address, None)
            if seen is not None and seen() is storage and len(self._held) < _MOST_HELD:
                self._held.append(self._register(address, nbytes, storage))
                return self._held[-1]
            self._seen[address] = weakref.ref(storage)
            if len(self._seen) > _MOST_SEEN:
                del self._seen[next(iter(self._seen))]
        return None

    def _free_piece(self, nbytes: int) -> Region | None:
        """The smallest one that is free and large enough; none that is much too large."""
        free = [
            region
            for region in self._pieces
            if nbytes <= region.nbytes <= max(2 * nbytes, _SMALLEST_PIECE)
            and sys.getrefcount(region.memory) == 2
        ]
        return min(free, key=lambda region: region.nbytes) if free else None

    def _new_piece(self, nbytes: int) -> Region:
        size = _SMALLEST_PIECE
        while size < nbytes:
            size += max(size // 8 >> 20 << 20, _SMALLEST_PIECE)
        # Private: by default a forked process would write into the same memory.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
            memory.madvise(mmap.MADV_HUGEPAGE)
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self._pieces.append(self._register(address, size, memory))
        return self._pieces[-1]

    def _register(self, address: int, nbytes: int, memory: Any) -> Region:
        registered = self._agent.register(address, nbytes)
        number = len(self._pieces) + len(self._held)
        return Region(number, address, nbytes, self._agent.introduce(registered), memory)


def trial() -> bool:
    """Whether a process of this machine reads another's memory by a copy; raises if not at all.

    For a process that does nothing else: it is forked, and ends the child.
    """
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            _lend(tell, _TRIAL_S)
        finally:
            os._exit(1)  # once the parent has what it needs, it ends the child
    os.close(tell)
    try:
        address, introduction = os.read(ready, 1 << 16).split(b" ", 1)
        agent, target = Agent(f"trial-{os.getpid()}"), torch.zeros(1 << 16)
        agent.register_to_write(target.data_ptr(), target.nbytes)
        name, deadline = agent.meet(introduction), time.monotonic() + _TRIAL_S
        is_copy = False
        for _ in range(3):  # the first one makes the connection
            read = agent.read(name, int(address), target.data_ptr(), target.nbytes)
            while not read.done():
                if time.monotonic() > deadline:
                    raise OSError(f"a process could not be read within {_TRIAL_S:g} s")
            is_copy = read.was_immediate
        if not torch.equal(target, torch.ones_like(target)):
            raise OSError("what was read of a process was not what was there")
        return is_copy
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _lend(tell: int, limit_s: float) -> None:
    """Tells where it may be read, and answers until the limit."""
    agent, memory = Agent(f"trial-{os.getpid()}"), torch.ones(1 << 16)
    registered = agent.register(memory.data_ptr(), memory.nbytes)
    os.write(tell, b"%d %b" % (memory.data_ptr(), agent.introduce(registered)))
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        agent.progress()
