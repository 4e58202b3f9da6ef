"""What a device does in each part of a step, on one that is none (`support/fake_device.py`)."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_dsgd import DecentralizedStrategy, StepTrace
from lightning_dsgd.devices import port_of
from lightning_dsgd.lab import accelerators
from lightning_dsgd.lab.accelerators import DeviceTimes, Times, memory_bytes_s, spin, times_of
from lightning_dsgd.lab.timeline import device_parts
from lightning_dsgd.lab.timeline.device_parts import DeviceParts
from lightning_dsgd.lab.timeline.trace import Trace, read_folder
from lightning_dsgd.lab.timeline.watch import Watch
from tests.support.fake_device import FakeDevice
from tests.support.fits import Plain, accelerator_of
from tests.support.models import loader, trainer
from tests.support.worlds import AcceleratorWorld, FakeFitWorld, FakeWorld

STEPS = 8
SPIN_S, LONG_S = 0.04, 0.2


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


def fall_behind(net: Any, fake: FakeDevice) -> None:
    parts, opened = DeviceParts(times_of(fake.device)), threading.Event()
    parts.begin()
    fake.spin_until(opened)
    with mock.patch.object(device_parts, "_MOST_UNDER_WAY", 8):
        for number in range(5):
            step(parts, lambda: None, number)
    assert not parts.is_on
    opened.set()
    fake.finish()
    made = fake.timed_events
    assert len([*parts.end_step(5)]) < 8
    step(parts, lambda: None, 6)
    assert fake.timed_events == made <= 10


def test_a_device_that_falls_far_behind_is_timed_no_more() -> None:
    FakeWorld().run(1, fall_behind)


def test_nothing_is_marked_on_a_cpu() -> None:
    parts = DeviceParts(Times())
    parts.begin()
    parts.turn_to("forward")
    assert not parts.is_on
    assert [*parts.end_step(1)] == []


class OneDevicesEvent:
    """As torch's: streams of another device than the first one's must not record it."""

    def __init__(self, enable_timing: bool) -> None:
        self.device: Any = None

    def record(self, stream: Any = None) -> None:
        device = (stream or torch.cuda.current_stream()).device
        assert self.device in (None, device), "torch raises an error"
        self.device = device

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: OneDevicesEvent) -> float:
        assert self.device == later.device, "torch raises an error"
        return 0.0


def test_threads_that_work_on_another_device_share_the_events_of_the_models() -> None:
    """A script need not call `torch.cuda.set_device`, but autograd's threads do."""
    models, current = torch.device("cuda", 1), [torch.device("cuda", 0)]

    def stream(device: Any = None) -> Any:
        return mock.Mock(device=device or current[0])

    with mock.patch.multiple(torch.cuda, Event=OneDevicesEvent, current_stream=stream):
        times = times_of(models)
        for device in (torch.device("cuda", 0), models, models, torch.device("cuda", 0)):
            current[0] = device
            mark = times.mark()
            assert mark.device == models
            assert times.seconds([mark]) is not None


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


class EveryTwoMs:
    """An event: the device comes to one every 2 ms."""

    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: EveryTwoMs) -> float:
        return 2.0


CPU = torch.device("cpu")


def test_a_memory_is_as_fast_as_a_copy_reads_and_writes_it() -> None:
    assert memory_bytes_s(CPU) is None
    times = DeviceTimes(EveryTwoMs, lambda: None)
    with mock.patch.object(accelerators, "times_of", return_value=times):
        assert memory_bytes_s(CPU) == pytest.approx(4 * 2 * 2**26 / 2e-3)
        with mock.patch.object(torch, "zeros", side_effect=torch.OutOfMemoryError):
            assert memory_bytes_s(CPU) is None


def measure_memory(net: Any, fake: FakeDevice) -> None:
    assert Watch(fake.device).of_machine()["memory_bytes_s"] > 0
    times, opened = times_of(fake.device), threading.Event()
    fake.spin_until(opened)
    with mock.patch.multiple(
        accelerators, times_of=mock.Mock(return_value=times), _COPIES_LIMIT_S=0.05
    ):
        assert memory_bytes_s(fake.device) is None
    opened.set()


def test_a_device_that_does_not_copy_is_not_waited_for() -> None:
    FakeWorld().run(1, measure_memory)


class Slow(Plain):
    """Has one slow kernel, in rank 1's forward pass, and one slow copy, in rank 0's."""

    def __init__(self, fake: FakeDevice) -> None:
        super().__init__()
        self.fake = [fake]

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        if self.trainer.global_rank == 0 and self.trainer.training:
            self.fake[0].spin(LONG_S)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def loss(self, batch: Any) -> torch.Tensor:
        if self.trainer.global_rank == 1 and self.trainer.training:
            self.fake[0].spin(LONG_S)
        return super().loss(batch)


def fit(fake: FakeDevice, folder: str) -> list[int]:
    """Returns how often the host of the training thread waits, without and with the callback."""
    waits = []
    for callbacks in [], [StepTrace(folder)]:
        strategy = DecentralizedStrategy("allreduce", timeout_s=60.0)
        options = {"accelerator": accelerator_of(fake.device), "callbacks": callbacks}
        fake.syncs.clear()
        fit = trainer(strategy, 2, **options)
        fit.fit(Slow(fake), loader(4 * 2 * STEPS, 4))
        thread = threading.current_thread().name
        waits.append(sum(name == thread for name, *_ in fake.syncs))
    return waits


def test_a_fit_with_a_strategy_has_its_devices_times(tmp_path: Path) -> None:
    for without, traced in FakeFitWorld().run(2, fit, str(tmp_path)):
        assert without > 0
        assert traced == without + 1  # where the clock of the device is read first
    slow = {"copy": 0, "forward": 1}
    for trace in read_folder(tmp_path):
        for part, rank in slow.items():
            took_s = median_s(trace, part)
            is_long = trace.rank == rank
            assert took_s >= LONG_S if is_long else took_s < LONG_S, (part, trace.rank, took_s)
        assert median_s(trace, "backward") > 0


def median_s(trace: Trace, part: str) -> float:
    """What a part of a step takes on the device."""
    spans = [span for step in trace.steps[1:-2] for span in step.device.get(part, ())]
    assert len(spans) == len(trace.steps) - 3, part
    return statistics.median(end - begin for begin, end in spans)
