"""What a device does in each part of a step, on one that is none (`support/fake_device.py`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_dsgd.devices import port_of
from lightning_dsgd.lab.accelerators import Times, spin, times_of
from lightning_dsgd.lab.timeline.device_parts import DeviceParts
from tests.support.fake_device import FakeDevice
from tests.support.worlds import AcceleratorWorld, FakeWorld

SPIN_S = 0.04


def step(parts: DeviceParts, kernel: Callable[[], None], number: int) -> Any:
    """A step whose only kernel is in its forward pass, as its host sees it: it takes no time."""
    for part in ("copy", "forward", "backward", "optimizer", ""):
        parts.turn_to(part)
        if part == "forward":
            kernel()
    return [*parts.end_step(number)]


def time_parts(net: Any, fake: FakeDevice) -> None:
    parts, opened = DeviceParts(times_of(fake.device)), threading.Event()
    assert step(parts, lambda: None, 0) == []  # before it has begun
    parts.begin()
    fake.syncs.clear()
    assert step(parts, lambda: fake.spin_until(opened), 1) in ([], ["copy"])
    assert step(parts, lambda: fake.spin(SPIN_S), 2) == []
    assert not fake.syncs
    opened.set()
    fake.finish()
    fake.syncs.clear()
    ended = [*parts.end_step(3)]
    assert not fake.syncs
    names = ["device_copy", "device_forward", "device_backward", "device_optimizer"]
    assert [(part, number) for part, *_, number in ended] == [
        (name, number) for number in (1, 2) for name in names
    ]
    took = {(part, number): end - begin for part, begin, end, number in ended}
    assert took["device_forward", 2] >= SPIN_S
    assert all(took[name, 2] < SPIN_S / 2 for name in names if name != "device_forward")
    # Later steps use the events of those before again.
    made = fake.timed_events
    for number in range(3, 40):
        step(parts, lambda: None, number)
        fake.finish()
    assert fake.timed_events == made


def test_a_kernel_counts_in_the_part_that_has_queued_it() -> None:
    FakeWorld().run(1, time_parts)


def test_nothing_is_marked_on_a_cpu() -> None:
    parts = DeviceParts(Times())
    parts.begin()
    parts.turn_to("forward")
    assert not parts.is_on
    assert [*parts.end_step(1)] == []


def time_on_accelerator(net: Any, device: torch.device) -> list[tuple[str, float]]:
    spin(device, 1e-3)  # finds out how fast it is, and waits for that
    parts = DeviceParts(times_of(device))
    parts.begin()
    ended = [each for n in (1, 2, 3) for each in step(parts, lambda: spin(device, SPIN_S), n)]
    port_of(device).finish()
    return [(part, end - begin) for part, begin, end, _ in (*ended, *parts.end_step(4))]


@pytest.mark.gpu("cuda")
def test_the_same_on_an_accelerator() -> None:
    [ended] = AcceleratorWorld().run(1, time_on_accelerator)
    assert len(ended) == 12
    for part, took_s in ended:
        assert took_s == pytest.approx(SPIN_S if part == "device_forward" else 0.0, abs=SPIN_S / 2)
