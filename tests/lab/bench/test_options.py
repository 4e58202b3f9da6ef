"""Options that both measurements have: what is refused, and which network it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lightning_dsgd.lab.bench import convergence, options, throughput


@pytest.mark.parametrize("what", [throughput, convergence])
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("--strategies ddp,wagmaa", "got 'wagmaa'; did you mean wagma?"),
        ("--strategies wagma:group_sizes=2", "has no option group_sizes, got group_sizes=2"),
        ("--strategies wagma:overlap=no", "overlap must be True or False, got overlap='no'"),
        ("--strategies wagma:group_size=8", "got group_size=8 with world_size=4"),
        ("--ranks 0", "--ranks must be at least 1, got --ranks 0"),
        ("--ranks 1 --delayed-ranks 2", "at most --ranks, got --delayed-ranks 2 with --ranks 1"),
        ("--network fast", "got 'fast'; try 1gbit or 10gbit,1ms"),
        ("--launcher ssh", "'torchrun'"),
        ("--stepps 3", "--stepps"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_rank_starts(
    what: Any, given: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        what.main([*given.split(), "--output", str(tmp_path / "never.json")])
    assert end.value.code == 2
    assert text in capsys.readouterr().err


def test_without_namespaces_it_says_that_it_measures_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    link, text = options.chosen_link("1gbit")
    assert link is None
    assert text == "loopback, not 1gbit: network namespaces need root"
