"""How long a thread waited for a processor, and between which meetings."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from lightning_dsgd.lab.timeline.processors import Waited, num_running, usable_cores
from lightning_dsgd.lab.timeline.trace import read_folder
from lightning_dsgd.lab.timeline.watch import Watch
from tests.lab.timeline.support import recorder


def test_the_kernel_says_how_long_a_thread_has_waited(tmp_path: Path) -> None:
    file = tmp_path / "schedstat"
    file.write_text("52159876 299408583 18\n")
    waited = Waited(str(file))
    assert (waited.how, waited.seconds()) == ("seen", 0.299408583)
    file.write_text("52159876 300408583 19\n")
    assert waited.seconds() == 0.300408583
    waited.close()
    waited.close()


@pytest.mark.parametrize("text", [None, "", "0\n", "one two three\n"])
def test_where_no_kernel_says_a_thread_on_no_processor_waits(
    text: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "schedstat"
    if text is not None:
        file.write_text(text)
    waited = Waited(str(file))
    assert waited.how == "guessed"
    before = waited.seconds()
    end = time.thread_time() + 0.02
    while time.thread_time() < end:
        pass
    worked = waited.seconds() - before
    assert worked >= -1e-3


@pytest.mark.parametrize(("text", "most"), [("100000 100000", 1), ("max 100000", None), ("", None)])
def test_a_container_has_the_cores_of_its_quota(
    text: str, most: int | None, tmp_path: Path
) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    of_mask = len(os.sched_getaffinity(0))
    assert usable_cores(quota) == (of_mask if most is None else most)
    assert usable_cores(tmp_path / "none") == of_mask


def test_so_many_threads_run_besides_the_one_that_asks(tmp_path: Path) -> None:
    load = tmp_path / "loadavg"
    load.write_text("7.06 3.35 1.39 9/170 20767\n")
    assert num_running(load) == 8
    assert num_running(tmp_path / "none") is None


class Set:
    """What a thread has waited, as a test sets it."""

    at_s = 1.0

    def seconds(self) -> float:
        return self.at_s

    def close(self) -> None: ...


def test_what_a_rank_waited_belongs_to_the_meeting_that_follows(tmp_path: Path) -> None:
    watch, waited = Watch(torch.device("cpu")), Set()
    mine = watch.recorder = recorder(tmp_path)
    watch._waited, watch._before = waited, 1.0  # type: ignore[assignment]
    waited.at_s = 1.2  # before it comes
    watch.comes()
    waited.at_s = 1.5  # in the meeting: not its own time
    watch.met(100.1, 100.2)
    waited.at_s = 1.6
    watch.comes()
    waited.at_s = 1.7
    watch.leaves()
    waited.at_s = 1.9  # after the meeting, which is told only now
    watch.met(100.3, 100.4)
    waited.at_s = 2.0
    watch.comes()
    watch.met(100.5, 100.6)
    watch.met(100.7, 100.8)  # whose beginning nobody has told
    mine.clock.at_s = 101.0
    watch.end_step(1)
    mine.close("")
    ((step,),) = [trace.steps for trace in read_folder(tmp_path)]
    assert step.short == pytest.approx((0.2, 0.1, 0.3, 0.0))
    assert [round(begin, 6) for begin, _ in step.exchange] == [0.1, 0.3, 0.5, 0.7]
    watch.end()
