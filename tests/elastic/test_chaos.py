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
from lightning_dsgd.elastic.chaos import schedule, simulated
from lightning_dsgd.elastic.chaos.schedule import draw
from lightning_dsgd.elastic.claimed.claims import Claims
from lightning_dsgd.elastic.membership import Membership
from lightning_dsgd.elastic.quorum import Terms
from tests.support.thorough import tries

SMALL = ["--ranks", "5", "--minutes", "0.5", "--every-s", "5"]


def chaos(output: Path, *options: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["chaos", *options, "--output", str(output)])
    return int(str(end.value.code))


def test_the_same_seed_writes_the_same_file(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("first.json", "second.json", "other.json")]
    assert [chaos(f, *SMALL, "--seed", s) for f, s in zip(files, "223", strict=True)] == [0, 0, 0]
    first, second, other = (file.read_text() for file in files)
    assert first == second != other
    said = json.loads(first)
    assert len(said["held"]) == 5
    assert said["events"]
    assert max(view["number"] for view in said["views"]) > 0


@pytest.mark.parametrize("seed", tries(60, 3))
def test_all_holds_in_storms(seed: int, tmp_path: Path) -> None:
    strategy = ("popsgd", "hpsgd", "local_sgd", "wagma")[seed % 4]
    options = ("--seed", str(seed), "--strategy", strategy, "--ranks", str(5 + seed % 4))
    assert chaos(tmp_path / "chaos.json", *SMALL, *options) == 0


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


def test_newcomers_come_in_soon_though_the_first_member_has_missed_its_meeting() -> None:
    terms = schedule.Terms(ranks=7, seconds=60.0, every_s=6.0, heartbeat_s=10.0, calm_s=25.0)
    record = simulated.play(1022, terms, draw(1022, terms), "local_sgd")
    came = [record.processes[rank] for rank in (7, 8, 9)]
    assert all(process.views[0][0] - process.begin_s < 10 for process in came)


def test_more_than_half_of_the_ranks_are_left_alone_at_any_time() -> None:
    terms = schedule.Terms(ranks=7, seconds=600.0, every_s=5.0, heartbeat_s=10.0, calm_s=30.0)
    for seed in range(50):
        events = [e for e in draw(seed, terms) if not 0 < e.seconds < terms.heartbeat_s / 4]
        assert events
        for last in events:
            away = [e for e in events if e.at_s <= last.at_s < e.at_s + e.seconds + terms.calm_s]
            assert sum(e.num_away for e in away) <= 3


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
