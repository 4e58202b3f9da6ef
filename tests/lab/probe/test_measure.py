"""What is measured, where it is known: in the simulated world; and once between processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.lab.probe import measure
from lightning_dsgd.lab.probe.cluster import Cluster, Link, table
from lightning_dsgd.lab.probe.command import _report, main
from lightning_dsgd.lab.results import write_result
from lightning_dsgd.primitives.error_feedback import ErrorFeedback
from lightning_dsgd.simulated import SimulatedWorld
from tests.support.mpi import ended

CPU = torch.device("cpu")
LATENCY_S, BANDWIDTH = 1e-3, 1e7


def of_the_network(net: Any) -> list[dict[str, Any]]:
    found = [measure.pair(net, 0, 1), measure.together(net, 1, BANDWIDTH)]
    return [*found, measure.all_reduce(net, CPU)]


def test_a_known_network_is_measured_as_it_is() -> None:
    world = SimulatedWorld(4, latency_s=LATENCY_S, bandwidth_bytes_s=BANDWIDTH)
    pair, together, all_reduce = world.run(of_the_network)[0]
    assert pair["pair"] == [0, 1]
    assert pair["latency_s"] == pytest.approx(LATENCY_S, rel=0.01)
    assert pair["bandwidth_bytes_s"] == pytest.approx(BANDWIDTH, rel=0.02)
    assert together["bytes_s"] == pytest.approx(BANDWIDTH, rel=0.02)
    for size, seconds in all_reduce["all_reduce"]:
        sent_s = 2 * 3 / 4 * size / BANDWIDTH
        assert sent_s < seconds < sent_s + 5 * LATENCY_S
    assert all_reduce["all_reduce"][-1][0] == max(measure.ALL_REDUCED)
    shared = SimulatedWorld(4, LATENCY_S, BANDWIDTH, shared_link=True)
    pair, together, _ = shared.run(of_the_network)[0]
    assert together["bytes_s"] == pytest.approx(pair["bandwidth_bytes_s"] / 4, rel=0.05)


def spots(nodes: str) -> list[dict[str, Any]]:
    return [{"node": n, "machine": "m", "cores": 2, "device": "cpu"} for n in nodes]


def everything(nodes: str) -> list[dict[str, Any]]:
    costs: dict[str, Any] = dict.fromkeys(measure.Processor.__dataclass_fields__, 1e-9)
    del costs["sparse_s"], costs["dense_s_per_byte"]
    costs["sparse"] = {"oktopk": [(1e-3, 10, 1e3), (2e-3, 10, 1e4)]}
    costs["dense"] = {"popsgd": (3e-3, 10, 1e6), "hpsgd": (1e-3, 0, 0)}
    found: list[dict[str, Any]] = [{"places": spots(nodes), "transport": "process_group"}, costs]
    for a, b in measure.pairs_of(spots(nodes)):
        is_inside = nodes[a] == nodes[b]
        speed = {"latency_s": 1e-5, "bandwidth_bytes_s": 4e9} if is_inside else {}
        found.append({"pair": [a, b], "latency_s": 1e-4, "bandwidth_bytes_s": 1e8, **speed})
    found.append({"shift": 1, "bytes_s": 1e9})
    found.append({"shift": measure.shift_between(spots(nodes)), "bytes_s": 2.5e7})
    return [*found, {"all_reduce": [[4000, 1e-3]]}]


def test_what_was_found_is_one_cluster_and_survives_a_file(tmp_path: Path) -> None:
    cluster = measure.cluster(everything("aabb"))
    assert (cluster.ranks, cluster.ranks_per_node, cluster.ranks_per_machine) == (4, 2, 4)
    assert cluster.inside == Link(1e-5, 4e9, 1e9)
    assert cluster.between == cluster.link == Link(1e-4, 1e8, 2.5e7)
    path = tmp_path / "cluster.json"
    write_result(cluster.to_json(), path)
    assert Cluster.read(path) == cluster
    of_popsgd_s = 3e-3 - 20e-9 - 2e-3  # messages, and their bytes
    assert cluster.processor.dense_s_per_byte == {"popsgd": pytest.approx(of_popsgd_s / 1e6)}
    assert "4, 2 on each of 2 nodes" in table(cluster)
    alone = measure.cluster(everything("aa"))
    assert (alone.between, alone.link) == (None, alone.inside)


@pytest.mark.parametrize(("share", "is_busy"), [(0.43, True), (0.02, False), (None, False)])
def test_a_busy_machine_is_named(
    share: float | None, is_busy: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [*everything("aa"), {"waited_share": share}]
    for as_json in (False, True):
        _report(found, "probe", tmp_path / "cluster.json", as_json=as_json)
        said = capsys.readouterr()
        text = said.err if as_json else said.out
        assert ("this machine is busy: for 43% of the time" in text) == is_busy
    assert bool(json.loads((tmp_path / "cluster.json").read_text())["busy"]) == is_busy
    assert Cluster.read(tmp_path / "cluster.json") == measure.cluster(found)


# ---- the command, alone and under a launcher ----
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def test_what_does_not_suit_a_launcher_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for world_size, arguments, message in (
        ("4", ["--ranks", "2"], "must be left out under a launcher, which has started 4"),
        ("1", [], "needs at least 2 ranks, got 1 from the launcher"),
    ):
        monkeypatch.setenv("WORLD_SIZE", world_size)
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", [[], TORCHRUN], ids=["alone", "torchrun"])
def test_ranks_probe_and_rank_0_writes(launcher: tuple[str, ...], tmp_path: Path) -> None:
    output = tmp_path / "cluster.json"
    options = ["--json"] if launcher else ["--ranks", "2"]
    command = [sys.executable, *launcher, "-m", "lightning_dsgd", "probe", *options]
    done = ended([*command, "--output", output])
    assert done.returncode == 0, done.stderr
    assert "probe: all-reduce" in done.stderr  # the progress bar
    if launcher:
        assert json.loads(done.stdout) == json.loads(output.read_text())
    else:
        assert "all-reduce of 1 MB" in done.stdout
    cluster = Cluster.read(output)
    assert (cluster.ranks, cluster.ranks_per_node, cluster.between) == (2, 2, None)
    assert cluster.inside is not None
    assert 0 < cluster.inside.latency_s < 0.1
    assert 1e7 < cluster.inside.bandwidth_bytes_s < 1e11
    costs = cluster.processor
    assert 0 < costs.send_s < 0.1
    assert 0 < costs.add_s_per_byte < 1e-7
    sparse = {n for n, a in ALGORITHMS.items() if issubclass(a, ErrorFeedback)}
    assert costs.sparse_s.keys() == sparse
    assert all(0 <= least + 1e6 * each < 10 for least, each in costs.sparse_s.values())
    assert {"allreduce", "local_sgd", "popsgd", "wagma"} <= costs.dense_s_per_byte.keys()
    assert all(0 <= seconds < 1e-6 for seconds in costs.dense_s_per_byte.values())
