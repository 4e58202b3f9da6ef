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

from lightning_dsgd.lab.jobs import network
from lightning_dsgd.lab.jobs.job import Job
from lightning_dsgd.lab.jobs.network import Network
from lightning_dsgd.lab.link import Link
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


def test_interrupted_job_goes_on_with_the_cells_that_are_missing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
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
    other = job(tmp_path, ends_with=3)  # other settings: no cell is known
    other.run(CELLS[:1], tmp_path / "out.json")
    assert (tmp_path / "log").read_text() == "0\n0\n"
    assert capfd.readouterr().err.count("ended with 3") == 2  # ranks that end badly are told


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose job never ends, once all ranks are in it."""
    link = "None" if network.why_not() else "Link(1e9)"
    code = (
        "from pathlib import Path; from lightning_dsgd.lab.jobs.job import Job; "
        "from lightning_dsgd.lab.link import Link; "
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


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
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
