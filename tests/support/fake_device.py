"""An accelerator that is none: its work is done late, on streams, as on a GPU.

A tensor on the device "fake" is a shell around a CPU tensor.  What is called with one is queued
onto the current stream of the thread and done by the stream's thread, after a pause drawn from a
seed.  What it is to give holds poison until then, as the target of a copy does.  The host waits
only where a GPU would have it wait: for a value, for a length that depends on values, and for a
copy that is not the port's; `FakeDevice.syncs` lists these.  A call that mixes it with memory of
the host raises an error, as on a GPU.

Memory behaves as under torch's allocator: once no tensor refers to a piece, what is queued next on
the stream that it was made on may write to it, and here does: poison.  `Port.keep` is what prevents
it.

A thread works on index 0 until it enters another.  A call of a thread that works on another index
raises an error: on a GPU it would have made a context there.

Every access is also told to CUDA's sanitizer (`torch.cuda._sanitizer`, which is pure Python), with
every mark and every wait.  It finds accesses that nothing has ordered, also where the pauses
have let them come out right: `FakeDevice.races`.

Only one process per test may have it, as torch knows of it from then on: `FakeWorld` gives one, or
skips the test where torch is too old to take a device whose code is Python.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import random
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_flatten, tree_map

from lightning_dsgd import devices
from lightning_dsgd.replica import flat

WHY_NOT = (
    ""
    if hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
    else f"the emulated device needs a torch newer than 2.9, got {torch.__version__}"
)
"""Why this torch cannot have the device; empty if it can."""
_POISON = 0x7F
_FIRST_ADDRESS = 1 << 40
_aten = torch.ops.aten
_numbers = itertools.count(1)


def poison(x: Tensor) -> None:
    """Fills it with what no test expects: bytes that are huge numbers of either kind."""
    x.untyped_storage().fill_(_POISON)


class FakeEvent:
    """A mark."""

    def __init__(self, device: FakeDevice) -> None:
        self._device, self.number = device, next(_numbers)
        self.passed = threading.Event()
        stream = device.current()
        with device.lock:
            device.sanitizer._handle_event_creation(self.number)
            device.sanitizer._handle_event_record(self.number, stream.number)
            stream.queue.put(self.passed.set)

    def has_passed(self) -> bool:
        self._device.require_entered()
        if not self.passed.is_set():
            return False
        with self._device.lock:
            self._device.sanitizer._handle_event_synchronization(self.number)
        return True

    def hold(self) -> None:
        stream = self._device.current()
        with self._device.lock:
            self._device.sanitizer._handle_event_wait(self.number, stream.number)
            stream.queue.put(self.passed.wait)


class TimedEvent:
    """An event that can be recorded again, and has a time; as torch's, but for who makes it."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._passed, self._passed_s = threading.Event(), 0.0
        device.timed_events += 1

    def record(self, stream: FakeStream) -> None:
        self._passed = passed = threading.Event()

        def passes() -> None:
            self._passed_s = time.monotonic()
            passed.set()

        stream.queue.put(passes)

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        self._device.synchronise("an event")

    def elapsed_time(self, later: TimedEvent) -> float:
        assert all(event.query() for event in (self, later)), "torch raises an error"
        return 1e3 * (later._passed_s - self._passed_s)


class FakeStream:
    """Has what is queued done in order, by a hardware queue that other streams may share."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.number = device, next(_numbers)
        with device.lock:
            device.sanitizer._handle_stream_creation(self.number)
            self.queue = device.hardware_queue()


class HardwareQueue:
    """Does what is queued, in order, in a thread of its own."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self._work: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self.put = self._work.put
        threading.Thread(target=self._serve, daemon=True, name="hardware-queue").start()

    @torch.no_grad()
    def _serve(self) -> None:
        torch.set_num_threads(1)
        while True:
            work = self._work.get()
            try:
                work()
            except BaseException as error:
                self.device.failures.append(error)


class Block:
    """A piece of memory; gone once no tensor refers to it."""

    def __init__(self, device: FakeDevice, inner: Tensor) -> None:
        self.device, self.number = device, next(_numbers)
        self.stream = device.current()
        self.users: set[FakeStream] = set()
        """Streams other than its own, after whose work it may be used again."""
        self.addresses: set[int] = set()
        """What has been read or written of it."""
        self._storage = inner.untyped_storage()
        device.note_memory(self._storage.nbytes())

    def address(self, inner: Tensor) -> int:
        """Of a tensor in it; no other block ever has it."""
        return _FIRST_ADDRESS * self.number + inner.storage_offset() * inner.itemsize

    def __del__(self) -> None:  # the collector may call it in the midst of the sanitizer's work
        self.device.gone.append((self._storage, self.stream, self.users, self.addresses))


class FakeTensor(Tensor):
    """A tensor on the device."""

    inner: Tensor
    block: Block

    @staticmethod
    def __new__(cls, inner: Tensor, block: Block) -> FakeTensor:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=block.device.device,
        )

    def __init__(self, inner: Tensor, block: Block) -> None:
        self.inner, self.block = inner, block

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FakeTensor({tuple(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        return self.block.address(self.inner)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    # What a parameter has: torch keeps it in C++, where nothing knows of `inner`.

    @property
    def data(self) -> FakeTensor:  # type: ignore[override]
        return FakeTensor(self.inner, self.block)

    @data.setter
    def data(self, other: FakeTensor) -> None:
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.inner, self.block = other.inner, other.block

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, FakeTensor)]
        return found[0].block.device.dispatch(func, args, dict(kwargs or {}))


class FakeDevice:
    """The device, and its port.

    Args:
        seed: of the pauses
        longest_pause_s: of which most are much shorter
        index: of the device
        num_queues: how many hardware queues the streams share by turns; None: each has its own
    """

    def __init__(
        self,
        seed: int = 0,
        longest_pause_s: float = 2e-3,
        index: int = 0,
        num_queues: int | None = None,
    ) -> None:
        self.device = torch.device("fake", index)
        self.lock = threading.RLock()
        self._num_queues = num_queues
        self._queues: list[HardwareQueue] = []
        from torch.cuda import _sanitizer  # tells Python of all that torch does on a GPU from now

        _sanitizer.traceback = _NoTraces  # it takes the stack of every access: most of its time
        self.sanitizer = _sanitizer.EventHandler()
        self.races: list[str] = []
        self.failures: list[BaseException] = []
        self.syncs: list[tuple[str, str, str]] = []
        """Name of the thread, where it was, and what it waited for."""
        self._pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.gone: deque[tuple[Any, FakeStream, set[FakeStream], set[int]]] = deque()
        """What `Block` had, of blocks that no tensor refers to."""
        self.spun: list[float] = []
        """How long each kernel was to spin."""
        self.timed_events = 0
        """How many events that have a time this device has made."""
        self.longest_pause_s = longest_pause_s
        self._random = random.Random(seed)
        self._of_thread = threading.local()
        self._streams: list[FakeStream] = []
        self._default = FakeStream(self)
        self._streams.append(self._default)
        self.num_queued = 0
        self.peak_bytes = 0
        """The most that tensors have taken at a time."""
        self._taken_bytes = 0  # by tensors, and by what is gone

    def hardware_queue(self) -> HardwareQueue:
        """The queue of the next stream that is made."""
        number = len(self._streams)
        if self._num_queues is None or number < self._num_queues:
            self._queues.append(HardwareQueue(self))
            return self._queues[-1]
        return self._queues[number % self._num_queues]

    def pause(self) -> None:
        """What the device does else."""
        if self._random.random() < 0.2:
            time.sleep(self._random.random() * self.longest_pause_s)

    # ---- the port ----

    def enter(self) -> None:
        self._of_thread.index = self.device.index

    def require_entered(self) -> None:
        """Raises unless this thread works on the device."""
        index = getattr(self._of_thread, "index", 0)
        if index != self.device.index:
            name = threading.current_thread().name
            raise RuntimeError(f"{name} calls {self.device}, but works on fake:{index}")

    def current(self) -> FakeStream:
        self.require_entered()
        return getattr(self._of_thread, "stream", self._default)

    def new(self) -> FakeStream:
        self.require_entered()
        self._streams.append(FakeStream(self))
        return self._streams[-1]

    def side(self) -> FakeStream:
        if not hasattr(self._of_thread, "side"):
            self._of_thread.side = self.new()
        side: FakeStream = self._of_thread.side
        return side

    @contextlib.contextmanager
    def using(self, stream: FakeStream) -> Iterator[None]:
        before = self.current()
        self._of_thread.stream = stream
        try:
            yield
        finally:
            self._of_thread.stream = before

    def mark(self) -> FakeEvent:
        return FakeEvent(self)

    def timed_event(self) -> TimedEvent:
        return TimedEvent(self)

    def keep(self, x: Tensor) -> None:
        assert isinstance(x, FakeTensor)
        if self.current() is not x.block.stream:
            x.block.users.add(self.current())

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        self.require_entered()
        made = torch.empty(numel, dtype=dtype)
        self._pinned.add(made.untyped_storage())
        return made

    def is_pinned(self, x: Tensor) -> bool:
        self.require_entered()
        return x.untyped_storage() in self._pinned

    def copy(self, into: Tensor, source: Tensor) -> None:
        host = source if isinstance(into, FakeTensor) else into
        assert self.is_pinned(host), "the host would wait for a copy from or to other memory"
        if not isinstance(into, FakeTensor):
            into.view(torch.uint8).fill_(_POISON)
        self._queue(_aten.copy_.default, (into, source), {}, is_slow=True)

    def spin(self, seconds: float) -> None:
        self.spun.append(seconds)
        self.current().queue.put(lambda: time.sleep(seconds))

    def spin_until(self, opened: threading.Event) -> None:
        """Queues a kernel that ends when that is set."""
        self.current().queue.put(lambda: opened.wait(60))

    def finish(self) -> None:
        for stream in list(self._streams):
            with self.using(stream):
                self.synchronise("the end of all streams")

    def check(self, *, finds_races: bool = True) -> None:
        """Fails if anything was read or written that no wait has ordered, or has failed."""
        assert not (finds_races and self.races), "\n".join(self.races[:3])
        assert not self.failures, repr(self.failures[0])

    # ---- what is called ----

    def tensor(self, inner: Tensor) -> FakeTensor:
        """A tensor on the device, of what lies in memory that nobody else has."""
        return FakeTensor(inner, Block(self, inner))

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What torch does in the place of a kernel."""
        schema = func._schema
        first = schema.returns[0].alias_info if schema.returns else None
        if first is not None and not first.is_write:  # a view: nothing is read
            return self._view(func, args, kwargs)
        if func is _aten.copy_.default:
            return self.copy_at_once(*args[:2])
        if func is _aten.is_set_to.default:  # addresses, which the host knows
            return func(*tree_map(_inner, args))
        if func is _aten._to_copy.default:
            return self._to(args[0], kwargs)
        self._require_here(func, args, kwargs)
        if schema.is_mutable:
            if "index_put" in schema.name and _has_mask(args[1]):
                self.synchronise(schema.name)
            self._queue(func, args, kwargs)
            returned = [arg for arg, spec in zip(args, schema.arguments, strict=False)
                        if spec.alias_info is not None and spec.alias_info.is_write]  # fmt: skip
            returned += [kwargs[spec.name] for spec in schema.arguments
                         if spec.kwarg_only and spec.alias_info is not None]  # fmt: skip
            if not schema.returns:
                return None
            return returned[0] if len(schema.returns) == 1 else tuple(returned)
        return self._new(func, args, kwargs)

    def _require_here(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Raises where a GPU's kernel would have been given memory of the host."""
        if func in (_aten.index.Tensor, _aten.index_put_.default, _aten._index_put_impl_.default):
            if any(isinstance(i, Tensor) and not isinstance(i, FakeTensor) for i in args[1]):
                self.synchronise("indices from the host")
            args = (args[0], *args[2:])
        if "_foreach_copy" in func._schema.name:
            return
        for x in tree_flatten((args, kwargs))[0]:
            if isinstance(x, Tensor) and not isinstance(x, FakeTensor) and x.dim():
                raise RuntimeError(
                    f"{func._schema.name}: all tensors must be on {self.device}, got one on "
                    f"{x.device} of shape {tuple(x.shape)}"
                )

    def _view(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        block = next(a.block for a in tree_flatten(args)[0] if isinstance(a, FakeTensor))
        out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        return tree_map(lambda o: FakeTensor(o, block) if isinstance(o, Tensor) else o, out)

    def copy_at_once(self, into: Tensor, source: Tensor) -> Tensor:
        """Not the port's: from or to the host, the host waits for it."""
        self._queue(_aten.copy_.default, (into, source), {})
        if not (isinstance(into, FakeTensor) and isinstance(source, FakeTensor)):
            if isinstance(into, FakeTensor) and source.dim() == 0:
                return into
            self.synchronise("a copy between the host and the device")
        return into

    def _to(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
        device = kwargs.pop("device", None) or x.device
        dtype = kwargs.get("dtype") or x.dtype
        made = torch.empty_like(_inner(x), dtype=dtype, device="meta")
        cpu = torch.empty_strided(made.shape, made.stride(), dtype=dtype)
        into = self.tensor(cpu) if torch.device(device).type == self.device.type else cpu
        return self.copy_at_once(into, x)

    def _new(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What makes new tensors: at once where their shapes are known beforehand."""
        kwargs = {k: v for k, v in kwargs.items() if k != "device"}
        try:
            if func._schema.name == "aten::index" and _has_mask(args[1]):
                raise NotImplementedError
            meta = func(*tree_map(_meta, args), **tree_map(_meta, kwargs))
            leaves, _ = tree_flatten(meta)
            if not all(isinstance(leaf, Tensor) for leaf in leaves):
                raise NotImplementedError
        except (NotImplementedError, RuntimeError):
            self.synchronise(func._schema.name)
            self._note(func, args, kwargs, [])
            out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
            return tree_map(lambda o: self.tensor(o) if isinstance(o, Tensor) else o, out)

        def made(like: Tensor) -> FakeTensor:
            inner = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
            poison(inner)
            return self.tensor(inner)

        out = tree_map(made, meta)
        self._queue(func, args, kwargs, into=tree_flatten(out)[0])
        return out

    def _queue(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        into: list[FakeTensor] | None = None,
        *,
        is_slow: bool = False,
    ) -> None:
        inner_args, inner_kwargs = tree_map(_inner, args), tree_map(_inner, kwargs)
        if func is not _aten.copy_.default:  # a host tensor's value is taken at once
            is_fake = [isinstance(a, FakeTensor) for a in args]
            inner_args = tuple(
                a.clone() if isinstance(a, Tensor) and not fake else a
                for a, fake in zip(inner_args, is_fake, strict=True)
            )
        elif args[1].dim() == 0 and not isinstance(args[1], FakeTensor):
            inner_args = (inner_args[0], inner_args[1].clone())
        targets = [made.inner for made in into or []]

        def work() -> None:
            self.pause()
            if is_slow:
                if goes_up:
                    inner_args[0].view(torch.uint8).fill_(_POISON)
                time.sleep(delay)
            out = func(*inner_args, **inner_kwargs)
            for target, result in zip(targets, tree_flatten(out)[0], strict=False):
                if result.numel():  # BatchNorm's evaluation gives less than it tells beforehand
                    target.copy_(result)

        goes_up = is_slow and isinstance(args[0], FakeTensor)
        delay = self._random.random() * self.longest_pause_s if is_slow else 0.0
        with self.lock:
            self._use_again()
            self._note(func, args, kwargs, into or [])
            self.num_queued += 1
            self.current().queue.put(work)

    def note_memory(self, nbytes: int) -> None:
        """Counts the memory of a new block."""
        with self.lock:
            self._taken_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.taken_bytes())

    def taken_bytes(self) -> int:
        """Returns how much memory tensors take now."""
        return self._taken_bytes - sum(storage.nbytes() for storage, *_ in list(self.gone))

    def _use_again(self) -> None:
        """Writes to memory that is gone, as the allocator may: after what its users have queued."""
        while self.gone:
            storage, stream, users, addresses = self.gone.popleft()
            self._taken_bytes -= storage.nbytes()
            for user in users:
                with self.using(user):
                    mark = self.mark()
                with self.using(stream):
                    mark.hold()
            self.note_access(stream, set(), addresses, "the memory's next use")
            stream.queue.put(lambda storage=storage: self.pause() or storage.fill_(_POISON))

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], made: list[FakeTensor]) -> None:
        """Tells the sanitizer what a call reads and writes."""
        reads, writes = set(), {_address(x) for x in made}
        given = [
            *zip(func._schema.arguments, args, strict=False),
            *((spec, kwargs[spec.name]) for spec in func._schema.arguments if spec.name in kwargs),
        ]
        for spec, value in given:
            is_written = spec.alias_info is not None and spec.alias_info.is_write
            for x in tree_flatten(value)[0]:
                if isinstance(x, FakeTensor) and x.numel():
                    (writes if is_written else reads).add(_address(x))
        self.note_access(self.current(), reads - writes, writes, str(func))

    def note_access(self, stream: FakeStream, reads: set[int], writes: set[int], what: str) -> None:
        """Tells the sanitizer; keeps what it finds."""
        names: dict[int, list[str]] = {address: [] for address in reads | writes}
        with self.lock:
            found = self.sanitizer._handle_kernel_launch(
                stream.number, reads, writes, set(), what, names
            )
        for error in found:
            now, before = error.current_access, error.previous_access
            self.races.append(
                f"{now.operator} on stream {now.stream} is not ordered with {before.operator} on "
                f"stream {before.stream}, of a tensor that it {now.type}s"
            )

    def synchronise(self, why: str) -> None:
        """The host waits for the current stream."""
        self.syncs.append((threading.current_thread().name, _where(), why))
        passed, stream = threading.Event(), self.current()
        stream.queue.put(passed.set)
        assert passed.wait(30), f"the device has not come to {why}"
        with self.lock:
            self.sanitizer._handle_stream_synchronization(stream.number)
        if self.failures:
            raise self.failures[0]


@cache
def _tell_torch() -> torch.library.Library:
    """Makes torch know the type of device; what makes tensors of nothing asks for the newest."""
    backend_registration._setup_privateuseone_for_python_backend("fake")
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")

    def made(inner: Tensor) -> Tensor:
        poison(inner)
        return _installed[-1].tensor(inner)

    def empty(size: Any, dtype: Any = None, **_: Any) -> Tensor:
        return made(torch.empty(size, dtype=dtype or torch.get_default_dtype()))

    def empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> Tensor:
        return made(torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype()))

    def arange(start: Any, end: Any, step: Any = 1, dtype: Any = None, **_: Any) -> Tensor:
        return _installed[-1].tensor(torch.arange(start, end, step, dtype=dtype))

    def copy_from(source: Tensor, into: Tensor, non_blocking: bool = False) -> Tensor:
        return _installed[-1].copy_at_once(into, source)

    library.impl("empty.memory_format", empty)
    library.impl("empty_strided", empty_strided)
    library.impl("arange", lambda end, **options: arange(0, end, **options))
    library.impl("arange.start", arange)
    library.impl("arange.start_step", arange)
    library.impl("_copy_from", copy_from)
    return library


class _NoTraces:
    """In the place of the module that the sanitizer takes stacks with."""

    class StackSummary:
        @staticmethod
        def extract(*_: Any, **__: Any) -> list[Any]:
            return []

    @staticmethod
    def walk_stack(_: Any) -> None:
        return None


def parameters_allowed() -> Any:
    """Lets a replica have parameters on the device, though they are of a subclass of Tensor."""
    return mock.patch.object(flat, "check_parameters", return_value=None)


_installed: list[FakeDevice] = []


def install(
    seed: int = 0, longest_pause_s: float = 2e-3, index: int = 0, num_queues: int | None = None
) -> FakeDevice:
    """Makes torch and the package know a new device, in this process."""
    _tell_torch()
    fake = FakeDevice(seed, longest_pause_s, index, num_queues)
    _installed.append(fake)
    devices.add_port("fake", lambda _: fake)
    devices._ports.pop(fake.device, None)
    return fake


def _inner(x: Any) -> Any:
    return x.inner if isinstance(x, FakeTensor) else x


def _meta(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _has_mask(indices: Any) -> bool:
    """Whether what is indexed has a length that depends on values."""
    return any(isinstance(x, Tensor) and x.dtype == torch.bool for x in indices)


def _where() -> str:
    """The function of the package that has called."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("lightning_dsgd."):
            return f"{module.removeprefix('lightning_dsgd.')}.{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _address(x: FakeTensor) -> int:
    """Where it lies; is accessed there from now on."""
    address = x.block.address(x.inner)
    x.block.addresses.add(address)
    return address


class OnDevice:
    """A transport as who has tensors on the device sees it, for who has them on the CPU.

    What is sent has just been made on the device, and is overwritten there at once.
    """

    def __init__(self, net: Any, device: torch.device) -> None:
        self._net, self._device = net, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._net, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_net", "_device"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._net, name, value)

    def _up(self, x: Tensor) -> Tensor:
        return x.to(self._device).clone().clone() if x.dtype in WIDE else x

    def _like(self, like: Tensor) -> Tensor:
        return like.to(self._device) if like.dtype in WIDE else like

    def send(self, x: Tensor, dst: int, tag: int = 0, *, copy: bool = True) -> Any:
        if x.dim() != 1 or not x.is_contiguous():
            return self._net.send(x, dst, tag, copy=copy)
        y = self._up(x)
        work = self._net.send(y, dst, tag, copy=copy)
        if y.device.type == "cpu":
            return work
        if copy:
            y.zero_()
            return work
        return _Then(work, lambda _: _overwrite(y))

    def recv(self, like: Tensor, src: int, tag: int = 0) -> Any:
        return _Then(self._net.recv(self._like(like), src, tag), _down)

    def exchange(self, x: Tensor, peer: int) -> Any:
        return _Then(self._net.exchange(self._up(x), peer), _down)

    def push(self, x: Tensor, dst: int) -> Any:
        y = self._up(x)
        work = self._net.push(y, dst)
        return work if y.device.type == "cpu" else _Then(work, lambda _: _overwrite(y))

    def pull(self, like: Tensor, src: int) -> Any:
        return _Then(self._net.pull(self._like(like), src), _down)

    def all_reduce(self, x: Tensor, group: Any = None) -> Any:
        y = self._up(x)
        return _Then(self._net.all_reduce(y, group), lambda _: x if y is x else x.copy_(_down(y)))

    def all_gather(self, x: Tensor, group: Any = None) -> Any:
        return _Then(self._net.all_gather(self._up(x), group), lambda all_: [*map(_down, all_)])

    def gather_into(self, into: Tensor, x: Tensor, sizes: Any, group: Any = None) -> Any:
        y = self._up(into)
        begin = (x.data_ptr() - into.data_ptr()) // x.itemsize
        is_in_place = 0 <= begin <= len(into) - len(x) and len(x)
        z = y[begin : begin + len(x)] if is_in_place else self._up(x)
        return _Then(self._net.gather_into(y, z, sizes, group), lambda _: _put(y, into))

    def all_to_all(self, into: Tensor, x: Tensor, *sizes: Any) -> Any:
        y = self._up(into)
        return _Then(self._net.all_to_all(y, self._up(x), *sizes), lambda _: _put(y, into))

    def broadcast(self, x: Tensor, src: int, group: Any = None) -> Any:
        y = self._up(x)
        work = self._net.broadcast(y, src, group)
        return _Then(work, lambda _: x if y is x else x.copy_(_down(y)))

    def sub(self, name: str) -> OnDevice:
        return OnDevice(self._net.sub(name), self._device)

    def spawn_lane(self, fn: Callable[[Any], None], name: str = "lane") -> Any:
        return _Lane(self._net.spawn_lane(lambda net: fn(OnDevice(net, self._device)), name), self)


WIDE = (torch.float32, torch.float64, torch.bfloat16)
"""Dtypes of what lies on the device; numbers that ranks tell each other are on the CPU."""


class _Then:
    """A Work, and what follows it."""

    def __init__(self, work: Any, then: Callable[[Any], Any]) -> None:
        self._work, self._then, self._result = work, then, _Then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, timeout_s: float | None = None) -> Any:
        result = self._work.wait(timeout_s)
        if self._result is _Then:
            self._result = self._then(result)
        return self._result


class _Lane:
    """A lane, and its endpoint as it sees it."""

    def __init__(self, lane: Any, net: OnDevice) -> None:
        self._lane = lane
        self._device = net._device

    @property
    def net(self) -> OnDevice:
        return OnDevice(self._lane.net, self._device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lane, name)


def _down(x: Tensor) -> Tensor:
    return x if x.device.type == "cpu" else x.clone().cpu()


def _put(y: Tensor, into: Tensor) -> Tensor:
    return into if y is into else into.copy_(_down(y))


def _overwrite(x: Tensor) -> None:
    x.zero_()
