"""Why a loop on a device is slow, on a device that is none: `tests/support/fake_device.py`."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from lightning_dsgd.lab.timeline.trace import Trace, read_folder
from tests.support import fake_device
from tests.support.thorough import cases
from tests.why.jobs import forked

CASES = cases(
    "slow, says",
    now=[("kernel", "rank 1 computes longer than the others")],
    later=[
        ("copies", "rank 1 waits for copies to the device"),
        ("loader", "rank 1 waits for the data loader"),
        ("nothing", "no rank is late"),
    ],
)


@CASES
@pytest.mark.skipif(bool(fake_device.WHY_NOT), reason=fake_device.WHY_NOT)
@pytest.mark.timeout(300)
def test_a_loop_is_judged_by_the_times_of_its_devices(slow: str, says: str, tmp_path: Path) -> None:
    job = forked(tmp_path / "run", "on_device", 2, SLOW=slow)
    assert job.status == 0, job.said
    assert job.told == []
    assert f"why: Verdict: {says}" in job.said, job.said
    assert " ms of device time: " in job.said
    if slow == "copies":
        assert "why:              DataLoader(..., pin_memory=True); x.to(device, " in job.said
    for trace in read_folder(tmp_path / "run" / "steps"):
        assert trace.about["clock"] == "device"
        assert 0.01 <= median_s(trace, "optimizer") < 0.03
        of_copy, of_forward = median_s(trace, "copy"), median_s(trace, "forward")
        is_slow = trace.rank == 1
        assert of_copy > 0.06 if is_slow and slow == "copies" else of_copy < 0.02
        assert of_forward > 0.06 if is_slow and slow == "kernel" else of_forward < 0.03


def median_s(trace: Trace, part: str) -> float:
    """What a part of a step takes on the device."""
    spans = [span for step in trace.steps[1:-2] for span in step.device.get(part, ())]
    assert len(spans) == len(trace.steps) - 3, part
    return statistics.median(end - begin for begin, end in spans)
