"""One module knows of accelerators, and on the CPU it does nothing."""

from __future__ import annotations

import io
import re
import threading
import time
import tokenize
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from lightning_dsgd import devices
from lightning_dsgd.devices import HOST, PASSED, port_of, until
from lightning_dsgd.lab import accelerators
from lightning_dsgd.primitives.stream_lock import StreamLock

PACKAGE = Path(devices.__file__).parent
TELLING = re.compile(
    r"torch\.(cuda|accelerator|xpu|Stream|Event)\b|\bis_cuda\b|\brecord_stream\b|"
    r"\bpin_memory=True\b|^[\"'](cuda|xpu)[\"']$",
    re.MULTILINE,
)


def tells(source: str) -> list[str]:
    """What in a module knows of accelerators; comments and longer texts do not count."""
    code = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.STRING:
            code += f"\n{token.string if len(token.string) < 8 else '...'}\n"
        elif token.type != tokenize.COMMENT:
            code += token.string
    return [found.group() for found in TELLING.finditer(code)]


def test_no_other_module_knows_of_accelerators() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): tells(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    assert found.pop("devices.py")
    assert found.pop("lab/accelerators.py")  # measurements
    assert len(found.pop("lab/bench/throughput.py")) == 1  # a value of its option --device
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line", ["x.is_cuda", "torch.cuda.synchronize()", 'x.to("cuda")', "torch.accelerator.f()"]
)
def test_a_module_that_knows_of_one_is_noticed(line: str) -> None:
    assert tells(line)


def test_on_the_cpu_all_is_done_at_once() -> None:
    port = port_of(torch.device("cpu"))
    assert port is HOST
    assert port.mark() is PASSED
    assert PASSED.has_passed()
    x, y = torch.ones(3), port.pinned(3, torch.float32)
    with port.using(port.new()):
        port.copy(y, x)
        port.keep(x)
    assert y.tolist() == [1, 1, 1]
    lock = StreamLock(x)
    with lock:
        assert not lock._lock.acquire(blocking=False)
    assert lock._lock.acquire(blocking=False)


def test_a_wait_ends_when_it_holds_when_it_is_late_and_when_the_check_raises() -> None:
    holds = threading.Event()
    asked = iter([False, False, True])
    assert until(lambda: next(asked), 20.0, lambda: None)
    assert not until(holds.is_set, 0.01, lambda: None)

    def check() -> None:
        raise RuntimeError("a rank is lost")

    with pytest.raises(RuntimeError, match="a rank is lost"):
        until(holds.is_set, float("inf"), check)


def test_a_wait_that_may_asks_seldom_and_ends_at_most_a_fiftieth_later(monkeypatch) -> None:
    asked = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: asked[-1])
    monkeypatch.setattr(time, "sleep", lambda seconds: asked.append(asked[-1] + seconds))
    for longest_s, most in ((0.0, 1010), (5e-3, 330)):
        asked[:] = [0.0]
        assert until(lambda: asked[-1] > 1.0, 9.0, lambda: None, longest_s)
        assert len(asked) < most
        assert all(b - a <= max(1.001e-3, 0.02 * b) for a, b in pairwise(asked))


def test_devices_have_libraries_for_sums() -> None:
    for kind, library in (("cuda", "nccl"), ("xpu", "xccl"), ("cpu", "gloo"), ("mps", "gloo")):
        assert devices.backend_for(torch.device(kind)) == library
    assert accelerators.name_of(torch.device("cpu")) == "cpu"


# ---- on a GPU ----
needs_gpu = pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")


@pytest.mark.gpu
@needs_gpu
def test_an_accelerators_marks_pass_in_the_order_of_its_streams() -> None:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    port = port_of(found)
    port.enter()
    x = torch.ones(1 << 24, device=port.device)
    for _ in range(50):
        x += 1
    mark, pinned = port.mark(), port.pinned(len(x), x.dtype)
    assert pinned.is_pinned()
    with port.using(port.side()):
        mark.hold()
        port.copy(pinned, x)
        copied = port.mark()
    assert until(copied.has_passed, 20.0, lambda: None)
    assert mark.has_passed()
    assert bool((pinned == 51).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA's kernel that spins")
def test_a_kernel_spins_for_about_so_long_and_the_host_goes_on() -> None:
    port = port_of(torch.device("cuda"))
    accelerators.spin(port.device, 0.0)
    port.finish()
    begin = time.monotonic()
    accelerators.spin(port.device, 0.5)
    mark, queued = port.mark(), time.monotonic()
    assert not mark.has_passed()
    port.finish()
    assert queued - begin < 0.1
    assert 0.3 < time.monotonic() - begin < 1.0  # the clock of a device changes


@pytest.mark.gpu
@needs_gpu
def test_copies_run_beside_what_the_current_stream_computes() -> None:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    port = port_of(found)
    port.enter()
    x, y = torch.ones(1 << 20, device=port.device), torch.randn(8192, 8192, device=port.device)
    port.finish()
    for _ in range(20):
        y = (y @ y).clamp_(-1, 1)
    computed, pinned = port.mark(), port.pinned(len(x), x.dtype)
    with port.using(port.side()):
        port.copy(pinned, x)
        copied = port.mark()
    assert until(copied.has_passed, 20.0, lambda: None)
    assert not computed.has_passed()
    port.finish()
