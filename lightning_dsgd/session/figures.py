"""Figures of a training: what each rank has sent and waited for, and what its algorithm tells."""

from __future__ import annotations

import json
from typing import Any

from lightning_dsgd.session.session import Session


def own(session: Session[Any]) -> dict[str, float]:
    """Returns what this rank has sent and waited for so far, and the algorithm's figures."""
    counters, training = session.net.counters, session.training
    hidden = 1 - counters.wait_s / counters.comm_s if counters.comm_s > 0 else 1.0
    figures = {
        "bytes_sent": float(counters.bytes_sent),
        "messages_sent": float(counters.messages_sent),
        "wait_s": counters.wait_s,
        "comm_overlap": max(0.0, hidden),
    }
    for engine, traffic in sorted(counters.sent.items()):
        figures[f"bytes_sent_{engine.lower()}"] = float(traffic.bytes)
        figures[f"messages_sent_{engine.lower()}"] = float(traffic.messages)
    if session.consensus_distance is not None:
        figures["consensus_distance"] = session.consensus_distance
    figures |= training.replica.metrics() if training is not None else {}
    return figures | session.ranks.figures()


def gathered(session: Session[Any], figures: dict[str, float]) -> list[dict[str, float]]:
    """Returns every rank's figures, by rank; a lost rank has none.

    All ranks call it, between steps.
    """

    def gather() -> list[Any]:
        theirs = [json.loads(text) for text in session.texts(json.dumps(figures))]
        return [[*session.ranks.members], theirs]

    # Who takes them over from others may be in a view with fewer members.
    alone = [[session.rank], [figures]]
    members, theirs = session.ranks.together(gather, apart=alone)
    by_rank: list[dict[str, float]] = [{} for _ in range(max(members) + 1)]
    for rank, each in zip(members, theirs, strict=True):
        by_rank[rank] = each
    return by_rank
