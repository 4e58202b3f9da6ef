"""Storms that are drawn from a seed: they replay, find what is broken, and leave a majority."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from lightning_dsgd.cli import main
from lightning_dsgd.elastic import membership
from lightning_dsgd.elastic.ballots import PREPARE
from lightning_dsgd.elastic.claimed.claims import Claims
from lightning_dsgd.elastic.membership import Membership
from lightning_dsgd.elastic.quorum import Terms
from tests.support.thorough import tries

SMALL = ["--ranks", "5", "--minutes", "0.5", "--every-s", "5"]


def chaos(output: Path, *options: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["chaos", *options, "--output", str(output)])
    return int(str(end.value.code))


@pytest.mark.parametrize("seed", tries(60, 3))
def test_all_holds_in_storms(seed: int, tmp_path: Path) -> None:
    strategy = ("popsgd", "hpsgd", "local_sgd", "wagma")[seed % 4]
    options = ("--seed", str(seed), "--strategy", strategy, "--ranks", str(5 + seed % 4))
    output = tmp_path / "chaos.json"
    assert chaos(output, *SMALL, *options) == 0
    said = json.loads(output.read_text())
    assert len(said["held"]) == 5
    assert said["events"]
    assert max(view["number"] for view in said["views"]) > 0


def without_majority(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(membership, "is_majority", lambda *given: True)
    patch.setattr(Terms, "may_follow", lambda *given: True)


def forgetful(patch: pytest.MonkeyPatch) -> None:
    """The dealer does not know, in the next view, what others hold."""
    report = Claims.report
    patch.setattr(Claims, "report", lambda claims: report(claims)._replace(begun=[], ahead=[]))


def unanswered(patch: pytest.MonkeyPatch) -> None:
    """Nobody answers a ballot, so that no view comes of it."""
    hear = Membership.hear

    def hears(member: Membership, now: float, sender: int, message: Any) -> None:
        if message.kind != PREPARE:
            hear(member, now, sender, message)

    patch.setattr(Membership, "hear", hears)


@pytest.mark.parametrize(
    ("plant", "seed", "broken"),
    [
        (without_majority, "2", "more than half go on"),
        (forgetful, "1", "every sample is trained on"),
        (unanswered, "1", "who is left alone goes on"),
    ],
)
def test_a_planted_bug_is_found_and_replayed(
    plant: Any, seed: str, broken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        assert chaos(first, *SMALL, "--seed", seed) == 1
        said = capsys.readouterr().out
        assert any(broken in line for line in said.splitlines() if line.startswith("FAILED"))
        replay = said.partition("replays it: ")[2].partition("#")[0]
        assert chaos(second, *shlex.split(replay)[2:]) == 1
        assert first.read_text() == second.read_text()
    assert chaos(second, *shlex.split(replay)[2:]) == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--ranks", "2"], "--ranks must be at least 3, as more than half must be left"),
        (["--strategy", "allreduce"], "must not wait for all ranks in every step"),
    ],
)
def test_what_cannot_be_played_is_refused(
    options: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chaos(tmp_path / "chaos.json", *options) == 2
    assert why in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_real_processes_come_through_a_storm(tmp_path: Path) -> None:
    output = tmp_path / "chaos.json"
    options = ("--real", "--seed", "1", "--ranks", "3", "--minutes", "0.5", "--every-s", "10")
    assert chaos(output, *options) == 0
    said = json.loads(output.read_text())
    assert {event["kind"] for event in said["events"]} & {"loss", "stop"}
    assert max(view["number"] for view in said["views"]) > 0
