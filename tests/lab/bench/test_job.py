"""Jobs: their cells, and what is left of them when they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_dsgd.lab.bench import job_arguments, network
from lightning_dsgd.lab.bench.job import Job
from lightning_dsgd.lab.bench.network import Link, Network
from tests.support.bench import namespaces
from tests.support.nodes import shaped

ROOT = Path(__file__).parents[3]
CELLS_OF_TESTS = ROOT / "tests" / "support" / "bench_cells.py"
CELLS = [{"number": number} for number in range(3)]


def until(condition: Callable[[], Any], what: str, timeout_s: float = 60) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)  # between two looks
    raise AssertionError(f"has waited {timeout_s:g} s for {what}")


def job(tmp_path: Path, **settings: Any) -> Job:
    log, mended = str(tmp_path / "log"), str(tmp_path / "mended")
    return Job(f"{CELLS_OF_TESTS}:say_rank", {"log": log, "mended": mended, **settings}, ranks=2)


def test_interrupted_job_goes_on_with_the_cells_that_are_missing(tmp_path: Path) -> None:
    failing = job(tmp_path, fails_at=2)
    with pytest.raises(SystemExit, match=r'ended with status 1 while measuring \{"number": 2}'):
        failing.run(CELLS, tmp_path / "out.json")
    (tmp_path / "log").unlink()
    (tmp_path / "mended").touch()
    results = failing.run(CELLS, tmp_path / "out.json")
    assert results == [
        {"number": n, "ranks": [{"square": n * n, "rank": rank} for rank in (0, 1)]}
        for n in range(3)
    ]
    assert (tmp_path / "log").read_text() == "2\n2\n"
    (tmp_path / "log").unlink()
    job(tmp_path, other=1).run(CELLS[:1], tmp_path / "out.json")  # other settings: none is known
    assert (tmp_path / "log").read_text() == "0\n0\n"


def test_a_rank_that_ends_badly_at_last_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = job(tmp_path, ends_with=3).run(CELLS[:1], tmp_path / "out.json")
    assert [rank["square"] for rank in results[0]["ranks"]] == [0, 0]
    assert capfd.readouterr().err.count("ended with 3") == 2


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose job never ends, once all ranks are in it."""
    link = "None" if network.why_not() else "Link(1e9)"
    code = (
        "from pathlib import Path; from lightning_dsgd.lab.bench.job import Job; "
        "from lightning_dsgd.lab.bench.network import Link; "
        f"Job({f'{CELLS_OF_TESTS}:wait_for_end'!r}, {{'folder': {str(tmp_path)!r}}}, 2, {link})"
        f".run([{{}}], Path({str(tmp_path / 'out.json')!r}))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        until(lambda: len(list(tmp_path.glob("pid-*"))) == 2, "the ranks")
        yield process
    finally:
        process.kill()
        process.wait()
        network.remove_stale()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_ended_job_leaves_nothing(
    endless: subprocess.Popen[bytes], tmp_path: Path, signum: signal.Signals
) -> None:
    ranks = [int(path.read_text()) for path in tmp_path.glob("pid-*")]
    endless.send_signal(signum)
    endless.wait(30)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), "the ranks to end")
    if not network.why_not():
        if signum == signal.SIGKILL:  # whoever comes next cleans up
            with Network(1, Link(1e9)):
                pass
        assert namespaces(endless.pid) == []


# ---- links between network namespaces ----
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
def test_nodes_of_a_network_that_fails_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("as scripted")

    monkeypatch.setattr(Network, "_shape", refuse)
    with pytest.raises(RuntimeError, match="as scripted"), Network(2, Link(1e9)):
        pass
    assert namespaces(os.getpid()) == []


def test_without_namespaces_it_says_it_measures_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    link, text = job_arguments.chosen_link("1gbit")
    assert link is None
    assert text == "loopback, not 1gbit: network namespaces need root"
