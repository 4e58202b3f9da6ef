"""`lightning-dsgd bench throughput`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_dsgd.lab.bench import network, report, throughput
from tests.support.bench import run_bench
from tests.support.mpi import has_mpi


@pytest.mark.exhaustive
def test_throughput_of_ours_and_of_their_peers(tmp_path: Path) -> None:
    strategies = (
        "ddp,ddp_fp16,ddp_bf16,ddp_powersgd,post_local_sgd:period=2,wagma:group_size=2,no_sync"
    )
    options = f"--ranks 2 --strategies {strategies} --rounds 1 --steps 14 --params 1e4"
    options += " --compute-ms 20 --delay-ms 200 --delayed-ranks 1"
    if not network.why_not():
        options += " --network 200mbit"
    result = run_bench(throughput, tmp_path / "t.json", options)
    rows = {row["strategy"]: row for row in result["summary"]}
    assert list(rows) == strategies.split(",")
    # Of two ranks one is 200 ms late in each step, so whoever waits for both takes 220 ms.
    assert 0 < rows["ddp"]["steps_per_s"] < 1 / 0.22
    assert rows["no_sync"]["ratio"] > 1.0
    assert rows["wagma:group_size=2"]["mb_sent_per_step"] > 0
    assert rows["ddp"]["mb_sent_per_step"] is None
    assert result["settings"]["ranks"] == 2
    assert result["settings"]["network"]["emulated"] == (not network.why_not())
    assert result["cores"] == os.cpu_count()
    if not network.why_not():
        assert 0.3 < result["link_check"]["share_of_link"] < 1.15
    assert not (tmp_path / "t.json.cells").exists()
    report.main([str(tmp_path / "t.json"), "--output", str(tmp_path / "report")])
    assert "| `ddp_fp16` |" in (tmp_path / "report" / "report.md").read_text()
    assert (tmp_path / "report" / "throughput.png").stat().st_size > 10_000


@pytest.mark.exhaustive
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
