"""Figures of a training: what this rank has sent and waited for, and what its algorithm tells."""

from __future__ import annotations

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
