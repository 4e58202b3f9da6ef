"""Another cluster: what is foretold, beside the job there and beside recorded runs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_dsgd.cli import main
from lightning_dsgd.lab.diagnose import measured
from lightning_dsgd.lab.diagnose.elsewhere import elsewhere, link_of
from lightning_dsgd.lab.diagnose.remedies import check_asked
from lightning_dsgd.lab.diagnose.times import Times, times_of
from lightning_dsgd.lab.diagnose.verdict import judge
from lightning_dsgd.lab.link import Link
from lightning_dsgd.lab.simulate.machines import Machine, delayed_ranks
from lightning_dsgd.lab.simulate.model import run
from lightning_dsgd.simulated import SimulatedTransport, SimulatedWorld
from tests.lab.diagnose import made
from tests.support.mpi import ended
from tests.support.refused import refused

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "simulate"


def step_s(times: Times) -> float:
    return float((times.own.max(1).values + times.takes).sum()) / times.num_steps


def test_the_same_cluster_is_foretold_as_it_was_recorded() -> None:
    for cause in ("random", "one rank slow", "a long validation", "uneven lengths"):
        seen = times_of(made.traces(made.CAUSES[cause][0], steps=60, victim=2))
        there = elsewhere(seen)
        assert step_s(there) == pytest.approx(step_s(seen), rel=0.01), cause
        before, after = judge(seen), judge(there)
        assert (after.cause, after.ranks, after.since) == (before.cause, before.ranks, before.since)


def test_further_ranks_are_copies_at_other_steps() -> None:
    seen = times_of(made.traces(made.slow, steps=60, victim=2))
    there = elsewhere(seen, 12)
    found = judge(there)
    assert (found.cause, found.ranks) == ("slow", (2, 6, 10))
    own, usual = there.by_step(there.own), seen.by_step(seen.own)
    torch.testing.assert_close(own[:, :4], usual)
    assert not torch.allclose(own[:, 4:8], usual)
    torch.testing.assert_close(own[:, 4:8].sum(0), usual.sum(0))
    fewer = elsewhere(seen, 2)  # the slow rank stays: ranks are taken by their speeds
    assert judge(fewer).cause == "slow"


def test_all_ranks_validate_at_the_same_steps() -> None:
    seen = times_of(made.traces(made.validation, steps=60))
    there = elsewhere(seen, 16)
    assert judge(there).costs["validation"] == pytest.approx(
        judge(seen).costs["validation"], abs=0.02
    )


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_sums_take_what_the_simulated_world_takes_for_them(num_ranks: int) -> None:
    """Two pieces of 2 MB, the last of which nothing hides."""
    link = Link(1e9, 1e-4)
    there = elsewhere(times_of(made.traces(made.none, steps=60)), num_ranks, link)
    machine = Machine(link.latency_s, link.bytes_s, 0.0, made.BYTES // 4 // 2)
    piece_s = 1 / run("allreduce", num_ranks, machine, 3).slowest_steps_per_s
    assert float(there.busy.mean()) == pytest.approx(2 * piece_s, rel=0.02)
    takes_s = float(there.takes[there.is_sum].mean())
    assert piece_s < takes_s < 2 * piece_s  # the first one begins while the second is made
    assert link_of(there) == link


def test_a_link_is_seen_in_the_recorded_sums() -> None:
    link = Link(1e9, 1e-4)
    there = elsewhere(times_of(made.traces(made.none, steps=60)), 8, link)
    seen = link_of(replace(there, link=None))
    assert seen.rate_bit_s == pytest.approx(link.rate_bit_s, rel=0.01)
    assert seen.latency_s == pytest.approx(link.latency_s, rel=0.01)


# ---- beside recorded runs ----
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_ddp_was_as_fast_as_foretold_for_its_link(num_ranks: int) -> None:
    """`benchmarks throughput`: a step sleeps for 0.4 s, two random ranks 0.32 s more; 1 Gbit/s."""
    result = json.loads((RESULTS / f"emulated_{num_ranks}.json").read_text())
    settings, network = result["settings"], result["settings"]["network"]
    rates = {row["strategy"]: row["steps_per_s"] for row in result["summary"]}
    steps: int = settings["steps"]
    late_s, num_late = settings["delay_s"], settings["delayed_ranks"]

    def recorded(s: made.Setting, step: int, rank: int, own: made.Own) -> None:
        """As if links had been fast."""
        is_late = rank in delayed_ranks(0, (step - 4) % steps, num_ranks, num_late)
        own.forward = settings["compute_s"] + late_s * is_late
        own.between = own.loader = own.backward = own.optimizer = 1e-6
        own.sum, own.bytes = 1e-3, 4 * int(float(settings["params"]))

    about: dict[str, object] = {"cores": 16}
    # The first three are left out.
    seen = times_of(made.traces(recorded, 0, num_ranks, 3 + 2 * steps, 0.0, 2, about))
    # What a step takes besides its sleep, as the strategy shows that sends nothing.
    besides_s = 1 / rates["no_sync"] - float(seen.by_step(seen.own).mean(0).max())
    assert 0 < besides_s < 0.02
    there = elsewhere(seen, link=Link(network["rate_bit_s"], 1e-4))
    assert 1 / (step_s(there) + besides_s) == pytest.approx(rates["ddp"], rel=0.05)


# ---- a link that is measured ----
def of_the_world(net: SimulatedTransport) -> Link:
    def sum_s(num_elements: int, device: torch.device) -> float:
        begin_s = net.now()
        for _ in range(20):
            net.all_reduce(torch.zeros(num_elements)).wait()
        return (net.now() - begin_s) / 20

    return measured.of_sums(sum_s, net.world_size, torch.device("cpu"))


def test_a_known_link_is_measured_as_it_is() -> None:
    world = SimulatedWorld(2, latency_s=1e-3, bandwidth_bytes_s=1e7)
    found = world.run(of_the_world)[0]
    assert found.latency_s == pytest.approx(1e-3, rel=0.01)
    assert found.rate_bit_s == pytest.approx(8e7, rel=0.02)

    def of_ring(num_elements: int, device: torch.device) -> float:
        return 14 * (1e-4 + 4 * num_elements / 8 / 1e9)

    found = measured.of_sums(of_ring, 8, torch.device("cpu"))
    assert found.latency_s == pytest.approx(1e-4, rel=0.01)
    assert found.rate_bit_s == pytest.approx(8e9, rel=0.01)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made.write(tmp_path / "run", made.traces(made.at_random, steps=40, victim=2))
    return tmp_path / "run"


@pytest.mark.exhaustive
def test_ranks_of_torchrun_measure_the_link(folder: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = ended([sys.executable, *torchrun, "-m", "lightning_dsgd", "why", folder, "--json"])
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)  # of rank 0 alone
    assert 1e7 < said["link"]["rate_bit_s"] < 1e13
    assert 1e-7 < said["link"]["latency_s"] < 0.1
    assert said["num_ranks"] == 4


# ---- the command ----
def test_the_command_says_for_which_cluster(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--ranks", "8", "--link", "1gbit,50us", "--strategies", "popsgd:data=claimed"]
    main(["why", str(folder), *asked])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == (
        "Cluster: 8 ranks, each with a link of 1 Gbit/s, 50 us a message; extrapolated: 4 ranks "
        "were recorded, the others are copies of them"
    )
    assert lines[0].startswith("Verdict: ")
    (others,) = (line for line in lines if line.startswith("Others:"))
    assert "popsgd:data=claimed " in others
    assert any(line.startswith("Seen:    8 ranks") for line in lines)


REFUSED = {
    "--ranks 1": "--ranks must be at least 2, got 1",
    "--link fast": "--link must be a rate and maybe a latency, got 'fast'",
    "--strategies wagmas": "must be one of",
    "--strategies wagma:group_size=16": "group_size",
    "--strategies allreduce:data=claimed": "error: data=claimed needs ranks that may make",
    "--strategies balanced": "got 'balanced', whose gain --json tells of every run",
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_cannot_be_foretold_is_refused(
    options: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert REFUSED[options] in refused(main, ["why", str(folder), *options.split()], capsys)


def test_a_strategy_cannot_take_the_place_of_shards_or_of_ranks_without_processors() -> None:
    def waits(s: made.Setting, step: int, rank: int, own: made.Own) -> None:
        own.short = 50e-3

    short = times_of(made.traces(waits, steps=60))
    ours = times_of(made.traces(made.none, steps=60))
    check_asked(ours, ["popsgd"])
    check_asked(short, [])
    abouts = tuple({**about, "strategy": "fully_shard"} for about in ours.abouts)
    sharded = replace(ours, abouts=abouts)
    for seen, got in (short, "got one whose ranks wait for processors"), (sharded, "fully_shard"):
        with pytest.raises(ValueError, match=f"needs a run of DDP whose.*{got}; leave"):
            check_asked(seen, ["popsgd"])


def test_a_launcher_and_a_link_exclude_each_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for world_size, options, message in (
        ("4", ["--link", "1gbit"], "--link must be left out under torchrun"),
        ("1", [], "measured between two ranks or more, got one from the launcher"),
    ):
        monkeypatch.setenv("WORLD_SIZE", world_size)
        with pytest.raises(SystemExit):
            main(["why", str(folder), *options])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [("", "Verdict: "), ("--ranks 8 --link 1gbit", "Cluster: 8 ranks, each with a link of 1 Gbit")],
)
def test_a_pod_that_keeps_a_jobs_variables_starts_no_process_group(
    options: str,
    says: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")  # so that one that is asked for is refused at once
    main(["why", str(folder), *options.split()])
    assert capsys.readouterr().out.startswith(says)
    with pytest.raises(SystemExit):
        main(["why", str(folder), "--ranks", "8"])
    assert "measured between two ranks or more" in capsys.readouterr().err
