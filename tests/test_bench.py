"""The benchmark harness: its networks, its jobs and what it makes of their results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb

from lightning_dsgd.bench import contestants, convergence, network, report, throughput, tracking
from lightning_dsgd.bench.job import Job
from lightning_dsgd.bench.network import Link, Network
from tests.mpi import has_mpi
from tests.worlds import shaped

ROOT = Path(__file__).parents[1]
CELLS_OF_TESTS = ROOT / "tests" / "bench_cells.py"


def until(condition: Callable[[], Any], what: str, timeout_s: float = 60) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)  # between two looks
    raise AssertionError(f"has waited {timeout_s:g} s for {what}")


def namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"dsgd{pid}-")]


# ---- links ----


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
def test_nodes_are_removed_when_the_network_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("as scripted")

    monkeypatch.setattr(Network, "_shape", refuse)
    with pytest.raises(RuntimeError, match="as scripted"), Network(2, Link(1e9)):
        pass
    assert namespaces(os.getpid()) == []


# ---- jobs ----


def job(tmp_path: Path, **settings: Any) -> Job:
    log, mended = str(tmp_path / "log"), str(tmp_path / "mended")
    return Job(f"{CELLS_OF_TESTS}:say_rank", {"log": log, "mended": mended, **settings}, ranks=2)


CELLS = [{"number": number} for number in range(3)]


def test_job_collects_what_each_rank_says_of_each_cell(tmp_path: Path) -> None:
    results = job(tmp_path).run(CELLS, tmp_path / "out.json")
    assert results == [
        {"number": n, "ranks": [{"square": n * n, "rank": rank} for rank in (0, 1)]}
        for n in range(3)
    ]


def test_interrupted_job_goes_on_with_the_cells_that_are_missing(tmp_path: Path) -> None:
    failing = job(tmp_path, fails_at=2)
    with pytest.raises(SystemExit, match=r'ended with status 1 while measuring \{"number": 2}'):
        failing.run(CELLS, tmp_path / "out.json")
    (tmp_path / "log").unlink()
    (tmp_path / "mended").touch()
    results = failing.run(CELLS, tmp_path / "out.json")
    assert [result["ranks"][1]["square"] for result in results] == [0, 1, 4]
    assert (tmp_path / "log").read_text() == "2\n2\n"


def test_a_rank_that_ends_badly_once_all_is_measured_is_told_of(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = job(tmp_path, ends_with=3).run(CELLS[:1], tmp_path / "out.json")
    assert [rank["square"] for rank in results[0]["ranks"]] == [0, 0]
    assert capfd.readouterr().err.count("ended with 3") == 2


def test_cells_of_other_settings_are_not_taken_over(tmp_path: Path) -> None:
    job(tmp_path).run(CELLS, tmp_path / "out.json")
    (tmp_path / "log").unlink()
    job(tmp_path, other=1).run(CELLS[:1], tmp_path / "out.json")
    assert (tmp_path / "log").read_text() == "0\n0\n"


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose job never ends, once all ranks are in it."""
    link = "None" if network.why_not() else "Link(1e9)"
    code = (
        "from pathlib import Path; from lightning_dsgd.bench.job import Job; "
        "from lightning_dsgd.bench.network import Link; "
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
def test_nothing_is_left_when_a_job_is_ended(
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


# ---- what is compared ----


def test_contestants_are_read_with_their_options() -> None:
    assert contestants.parse("wagma:overlap=true:grace_s=0.02:evaluate=local") == (
        "wagma",
        {"overlap": True, "grace_s": 0.02, "evaluate": "local"},
    )
    assert contestants.strategy("wagma:group_size=2").algorithm.group_size == 2
    with pytest.raises(ValueError, match=r"one of .*ddp, .*wagma.* got 'wagner'"):
        contestants.strategy("wagner")


@pytest.mark.parametrize("what", [throughput, convergence])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--strategies ddp,wagner", "got 'wagner'"),
        ("--strategies wagma:group_sizes=2", "has no option group_sizes, got group_sizes=2"),
        ("--strategies wagma:overlap=False", "overlap must be True or False, got overlap='False'"),
        ("--strategies wagma:group_size=8", "got group_size=8 with world_size=4"),
        ("--ranks 0", "--ranks must be at least 1, got --ranks 0"),
        ("--ranks 1 --delayed-ranks 2", "at most --ranks, got --delayed-ranks 2 with --ranks 1"),
        ("--network fast", "got 'fast'; try 1gbit or 10gbit,1ms"),
        ("--launcher ssh", "'torchrun'"),
        ("--stepps 3", "--stepps"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_rank_starts(
    what: Any, options: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        what.main([*options.split(), "--output", str(tmp_path / "never.json")])
    assert end.value.code == 2
    assert text in capsys.readouterr().err


def test_a_group_of_one_node_can_be_measured() -> None:
    contestants.check("sgp:hierarchical=true", 4)


def test_a_report_of_a_file_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        report.main([str(tmp_path / "none.json"), "--output", str(tmp_path / "report")])
    assert end.value.code == 2
    assert "none.json" in capsys.readouterr().err


def run_bench(what: Any, output: Path, options: str) -> dict[str, Any]:
    what.main([*options.split(), "--output", str(output)])
    return dict(json.loads(output.read_text()))


def test_throughput_of_ours_and_of_their_peers(tmp_path: Path) -> None:
    strategies = "ddp,ddp_fp16,ddp_powersgd,post_local_sgd:period=2,wagma:group_size=2,no_sync"
    options = f"--ranks 2 --strategies {strategies} --rounds 1 --steps 4 --params 1e4"
    options += " --compute-ms 20 --delay-ms 40 --delayed-ranks 1"
    if not network.why_not():
        options += " --network 200mbit"
    result = run_bench(throughput, tmp_path / "t.json", options)
    rows = {row["strategy"]: row for row in result["summary"]}
    assert list(rows) == strategies.split(",")
    # Of two ranks one is 40 ms late in each step, so whoever waits for both takes 60 ms.
    assert 10 < rows["ddp"]["steps_per_s"] < 1 / 0.06
    assert 1.0 < rows["no_sync"]["ratio"] < 3.0
    assert rows["wagma:group_size=2"]["mb_sent_per_step"] > 0
    assert rows["ddp"]["mb_sent_per_step"] is None
    assert result["settings"]["ranks"] == 2
    assert result["settings"]["network"]["emulated"] == (not network.why_not())
    assert result["cores"] == os.cpu_count()
    if not network.why_not():
        assert result["link_check"]["share_of_link"] == pytest.approx(1, abs=0.15)
    assert not (tmp_path / "t.json.cells").exists()
    report.main([str(tmp_path / "t.json"), "--output", str(tmp_path / "report")])
    assert "| `ddp_fp16` |" in (tmp_path / "report" / "report.md").read_text()
    assert (tmp_path / "report" / "throughput.png").stat().st_size > 10_000


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("mpiexec", marks=has_mpi)])
def test_other_launchers_measure_too(
    launcher: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = (
        f"--ranks 2 --launcher {launcher} --strategies wagma:group_size=2 --rounds 1 --steps 4"
    )
    options += " --params 1e4 --compute-ms 10 --delayed-ranks 0"
    result = run_bench(throughput, tmp_path / "t.json", options)
    assert result["launcher"] == launcher
    assert 0 < result["summary"][0]["steps_per_s"] < 1 / 0.01
    assert "before it had closed its network" not in capfd.readouterr().err


def test_torchft_is_measured_where_it_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason="the extra `bench` is not installed")
    options = "--ranks 2 --strategies torchft_local_sgd:period=2,torchft_diloco:period=2"
    options += " --rounds 1 --steps 4 --params 1e4 --compute-ms 10 --delayed-ranks 0"
    rows = run_bench(throughput, tmp_path / "t.json", options)["summary"]
    assert all(0 < row["steps_per_s"] < 1 / 0.01 for row in rows)


def test_without_namespaces_it_says_that_it_measures_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    link, text = throughput.chosen_link("1gbit")
    assert link is None
    assert text == "loopback, not 1gbit: network namespaces need root"


def test_convergence_counts_steps_and_seconds_to_the_target(tmp_path: Path) -> None:
    options = "--task digits --ranks 2 --strategies allreduce,wagma:group_size=2 --seeds 1"
    options += " --epochs 4 --val-every 2 --target 0.5"
    options += " --compute-ms 5 --delay-ms 10 --delayed-ranks 1"
    options += ' --model {"lr":0.03} --data {"batch_size":16}'
    result = run_bench(convergence, tmp_path / "c.json", options)
    ours = result["summary"][1]
    assert ours["strategy"] == "wagma:group_size=2"
    assert result["settings"]["model"] == {"lr": 0.03}
    assert ours["reached"] == 1
    rows = result["cells"][0]["rows"]
    assert [row["step"] for row in rows] == [68, 136]
    for row in rows:
        assert row["seconds"] > row["step"] * 0.015  # one of the two is late in each step
    first = next(row for row in rows if row["value"] >= 0.5)
    assert result["summary"][0]["step_to_target"] == first["step"]
    report.main([str(tmp_path / "c.json"), "--output", str(tmp_path / "report")])
    assert (tmp_path / "report" / "c.png").stat().st_size > 10_000


def test_summary_is_made_of_ratios_within_a_round() -> None:
    cells = [
        {"strategy": name, "round": turn, "steps_per_s": rate, "with_finish": rate}
        for turn, factor in enumerate((1.0, 2.0, 10.0))
        for name, rate in (("ddp", factor), ("wagma", factor * (1.1 + turn / 10)))
    ]
    ours = throughput.summarize(cells, "ddp")[1]
    assert ours["ratio"] == pytest.approx(1.2)
    assert ours["ratio_range"] == pytest.approx([1.1, 1.3])
    assert ours["of_no_sync"] is None


def test_a_comparison_is_logged_to_offline_wandb_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    curve = [{"step": 10, "seconds": 1.0, "value": 0.5}, {"step": 20, "seconds": 2.0, "value": 0.7}]
    specs = ("allreduce", "wagma:group_size=2")
    result = {
        "settings": {"ranks": 4, "task": "digits"},
        "monitor": "val_accuracy",
        "target": 0.6,
        "higher_is_better": True,
        "cells": [{"strategy": spec, "seed": 0, "rows": curve} for spec in specs],
        "summary": [{"strategy": spec, "last": 0.7, "last_range": [0.7, 0.7]} for spec in specs],
    }
    output = tmp_path / "convergence.json"
    output.write_text(json.dumps(result))
    tracking.log_comparison(result, output, "tests")
    wandb.teardown()  # what wandb's own process has not written yet, it writes now
    runs = [file.read_bytes() for file in sorted(tmp_path.rglob("*.wandb"))]
    assert len(runs) == 3  # one for each strategy and seed, and the comparison
    (allreduce,) = (run for run in runs if b"allreduce seed 0" in run)
    (wagma,) = (run for run in runs if b"wagma:group_size=2 seed 0" in run)
    (comparison,) = (run for run in runs if b"artifact" in run)
    assert b'{"name":"wagma","num_ranks":4,"group_size":2}' in wagma
    assert allreduce.count(b"seconds") >= len(curve)
    assert b"table-file" in comparison
    assert b"image-file" in comparison
