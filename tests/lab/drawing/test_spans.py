"""Whom a wait was due to: by hand, and where the simulated world knows who is late."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.machines import MACHINES
from lightning_dsgd.lab.drawing.spans import NOBODY, Track, tracks
from lightning_dsgd.lab.simulate.machines import delayed_ranks
from lightning_dsgd.lab.simulate.model import run
from lightning_dsgd.lab.timeline.recorder import ALL
from lightning_dsgd.lab.timeline.trace import read_folder
from tests.lab.timeline.support import record


def drawn(folder: Path) -> list[Track]:
    return tracks(read_folder(folder), 1, 1000)


def of_kind(track: Track, kind: str) -> list[tuple[float, float, int]]:
    spans = (*track.spans, *track.beside)
    return [(round(s.begin_s, 6), round(s.end_s, 6), s.who) for s in spans if s.kind == kind]


def test_a_chain_of_waits_ends_at_the_rank_that_is_late(tmp_path: Path) -> None:
    """Rank 0 waits for 1, which waits for 2, which computes until 0.7 s; then messages travel."""
    record(tmp_path, [[[(0.2, 0.9, 1)]], [[(0.4, 0.8, 2)]], [[(0.7, 0.8, 1)]]])
    first, second, third = drawn(tmp_path)
    assert of_kind(first, "wait") == [
        (0.2, 0.4, 1),
        (0.4, 0.7, 2),
        (0.7, 0.9, NOBODY),
    ]
    assert of_kind(second, "wait") == [(0.4, 0.7, 2), (0.7, 0.8, NOBODY)]
    assert of_kind(third, "late") == [(0.4, 0.7, NOBODY)]
    assert of_kind(second, "late") == [(0.2, 0.4, NOBODY)]


def test_a_wait_for_all_is_due_to_the_last_that_computes(tmp_path: Path) -> None:
    record(tmp_path, [[[(0.2, 0.9, ALL)]], [[(0.5, 0.9, ALL)]], [[(0.8, 0.9, ALL)]]])
    first, second, third = drawn(tmp_path)
    assert of_kind(first, "wait") == [(0.2, 0.8, 2), (0.8, 0.9, NOBODY)]
    assert of_kind(second, "wait") == [(0.5, 0.8, 2), (0.8, 0.9, NOBODY)]
    assert of_kind(third, "late") == [(0.2, 0.8, NOBODY)]
    assert second.share("wait") == pytest.approx(0.4)


def test_the_late_are_those_that_were_delayed(tmp_path: Path) -> None:
    run("topk_dsa", 6, MACHINES["emulated-1gbit"], 5, trace=tmp_path)
    for track in drawn(tmp_path):
        for step in range(5):
            late = track.rank in delayed_ranks(0, step, 6, 2)
            long = [
                span
                for span in track.spans
                if span.kind == "wait" and span.who != NOBODY and span.step == step + 1
            ]
            assert all(span.who in delayed_ranks(0, step, 6, 2) for span in long if not late)
            waited = sum(span.end_s - span.begin_s for span in long)
            assert (waited < 0.05) if late else (0.29 < waited < 0.34)
