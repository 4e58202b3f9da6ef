"""One module knows of accelerators."""

from __future__ import annotations

import io
import os
import re
import tokenize
from pathlib import Path

import pytest
import torch

from lightning_dsgd import devices
from lightning_dsgd.devices import port_of, until

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
    assert {name: lines for name, lines in found.items() if lines} == {}
    for line in ("x.is_cuda", "torch.cuda.synchronize()", 'x.to("cuda")', "torch.accelerator.f()"):
        assert tells(line)


# ---- hardware queues ----
def test_queues_are_asked_for_only_where_that_has_an_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = torch.device("cuda", 0)
    for device, is_used, given, becomes in (
        (cuda, False, None, "32"),
        (cuda, False, "1", "1"),
        (cuda, True, None, None),
        (torch.device("cpu"), False, None, None),
    ):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda is_used=is_used: is_used)
        monkeypatch.delenv(devices.CONNECTIONS, raising=False)
        if given is not None:
            monkeypatch.setenv(devices.CONNECTIONS, given)
        devices.take_queues(device)
        assert os.environ.get(devices.CONNECTIONS) == becomes
        is_cuda = device == cuda
        assert bool(devices.shared_queue(device)) == (is_cuda and becomes == "1")
        assert bool(devices.few_queues(device)) == (is_cuda and becomes is None)
    monkeypatch.delenv(devices.CONNECTIONS, raising=False)


# ---- on a GPU ----
@pytest.mark.gpu
def test_copies_run_beside_what_the_current_stream_computes() -> None:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    port = port_of(found)
    port.enter()
    x, y = torch.ones(1 << 20, device=port.device), torch.randn(8192, 8192, device=port.device)
    pinned = port.pinned(len(x), x.dtype)
    assert pinned.is_pinned()
    with port.using(port.side()):  # torch's first copy of a thread and first stream take long
        port.copy(pinned, x)
    y = (y @ y).clamp_(-1, 1)
    port.finish()
    for _ in range(20):
        y = (y @ y).clamp_(-1, 1)
    computed = port.mark()
    with port.using(port.side()):
        port.copy(pinned, x)
        copied = port.mark()
    assert until(copied.has_passed, 20.0, lambda: None)
    assert not computed.has_passed()
    assert bool((pinned == 1).all())
    with port.using(port.side()):
        computed.hold()
        port.copy(pinned, x)
        copied = port.mark()
    assert until(copied.has_passed, 20.0, lambda: None)
    assert computed.has_passed()  # marks pass in the order of streams
    port.finish()
