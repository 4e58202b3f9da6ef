"""Links between network namespaces."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from lightning_dsgd.lab.bench import job_arguments
from lightning_dsgd.lab.bench.network import Link, Network
from tests.support.bench import namespaces
from tests.support.nodes import shaped


@pytest.mark.parametrize(
    ("text", "rate", "latency"),
    [("1gbit", 1e9, 0), ("2.5gbit,1ms", 2.5e9, 1e-3), ("300mbit, 3s", 3e8, 3.0)],
)
def test_link_is_read(text: str, rate: float, latency: float) -> None:
    assert Link.parse(text) == Link(rate, latency)


@pytest.mark.parametrize("text", ["", "fast", "1", "0gbit", "1gbit,1", "1gbit,0ms"])
def test_link_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="try 1gbit or 10gbit,1ms"):
        Link.parse(text)


@shaped
def test_nodes_are_there_while_the_block_lasts() -> None:
    with Network(3, Link(1e9)) as net:
        assert len(namespaces(os.getpid())) == 4
        shown = subprocess.run(
            [*net.inside(2), "ip", "-4", "-brief", "addr"], capture_output=True, text=True
        ).stdout
        assert net.address(2) in shown
        file = "/proc/sys/net/ipv4/tcp_congestion_control"
        shown = subprocess.run([*net.inside(2), "cat", file], capture_output=True, text=True).stdout
        assert shown == "reno\n"
    assert namespaces(os.getpid()) == []


@shaped
def test_nodes_of_a_network_that_fails_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("as scripted")

    monkeypatch.setattr(Network, "_shape", refuse)
    with pytest.raises(RuntimeError, match="as scripted"), Network(2, Link(1e9)):
        pass
    assert namespaces(os.getpid()) == []


def test_without_namespaces_it_says_it_measures_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    link, text = job_arguments.chosen_link("1gbit")
    assert link is None
    assert text == "loopback, not 1gbit: network namespaces need root"
