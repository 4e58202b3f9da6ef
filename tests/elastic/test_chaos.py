"""Storms that are drawn from a seed: they replay, find what is broken, and leave a majority."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_dsgd.data.claims.claims import Claims
from lightning_dsgd.elastic import membership
from lightning_dsgd.elastic.ballots import PREPARE
from lightning_dsgd.elastic.ballots import Terms as TermsOfViews
from lightning_dsgd.elastic.membership import Membership
from tests.elastic.chaos.record import Record, findings, summary
from tests.elastic.chaos.schedule import Terms, draw
from tests.elastic.chaos.simulated import play
from tests.support.thorough import tries


def storm(seed: int, ranks: int = 5, strategy: str = "popsgd") -> Record:
    """What became of a job in half a minute of storm."""
    terms = Terms(ranks, seconds=30.0, every_s=5.0, heartbeat_s=10.0, calm_s=40.0)
    return play(seed, terms, draw(seed, terms), strategy)


def broken(record: Record) -> dict[str, list[str]]:
    """The rules that did not hold, and where."""
    return {rule: where for rule, where in findings(record).items() if where}


@pytest.mark.parametrize("seed", tries(60, 3))
def test_all_holds_in_storms(seed: int) -> None:
    strategy = ("popsgd", "hpsgd", "local_sgd", "wagma")[seed % 4]
    record = storm(seed, 5 + seed % 4, strategy)
    assert broken(record) == {}
    assert record.events
    assert max(record.views()) > 0


def without_majority(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(membership, "is_majority", lambda *given: True)
    patch.setattr(TermsOfViews, "may_follow", lambda *given: True)


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
    ("plant", "seed", "rule"),
    [
        (without_majority, 2, "more than half go on"),
        (forgetful, 1, "every sample is trained on"),
        (unanswered, 1, "who is left alone goes on"),
    ],
)
def test_a_planted_bug_is_found_and_replayed(plant: Any, seed: int, rule: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        first, second = storm(seed), storm(seed)
    assert any(rule in each for each in broken(first))
    assert broken(first) == broken(second)
    assert summary(first) == summary(second)
    assert broken(storm(seed)) == {}
