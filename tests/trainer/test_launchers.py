"""A user's script under every launcher: ranks on one node or on two.

Nodes are network namespaces, for which `lightning_dsgd.lab.jobs.network` needs root.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor

from lightning_dsgd.lab.jobs.job import is_of_mpich
from lightning_dsgd.lab.jobs.network import INTERFACE, Network
from lightning_dsgd.lab.link import Link
from tests.support.fits import Plain, run, strategy
from tests.support.models import loader, trainer, weights
from tests.support.mpi import ROOT, ended, environment, every_mpi, mpiexec
from tests.support.nodes import shaped
from tests.support.torchrun import run_forked_by_torchrun
from tests.support.worlds import ParentWorld


@pytest.fixture
def two_nodes() -> Iterator[Network]:
    with Network(2, Link(1e9)) as nodes:
        yield nodes


def script(folder: Path, *places: int) -> list[str]:
    return [str(ROOT / "tests/support/scripts/fit.py"), str(folder), *map(str, places)]


def check(folder: Path, kind: str, transport: str, local_ranks: tuple[int, ...]) -> None:
    """All ranks have trained together, as that environment, over that transport."""
    ranks: list[Any] = [torch.load(folder / f"rank_{rank}.pt") for rank in range(len(local_ranks))]
    assert {rank["environment"] for rank in ranks} == {kind}
    assert {rank["transport"] for rank in ranks} == {transport}
    assert tuple(rank["local_rank"] for rank in ranks) == local_ranks
    assert {rank["steps"] for rank in ranks} == {16 // len(ranks)}
    assert all(torch.equal(rank["weights"], ranks[0]["weights"]) for rank in ranks)


def run_script(*arguments: str) -> None:
    sys.argv = list(arguments)
    runpy.run_path(arguments[0], run_name="__main__")


def test_the_agent_of_torchrun(tmp_path: Path) -> None:
    """It forks the ranks, which need not import torch and Lightning then."""
    ParentWorld().run(1, run_forked_by_torchrun, 4, run_script, *script(tmp_path))
    check(tmp_path, "TorchElasticEnvironment", "ProcessGroupTransport", (0, 1, 2, 3))


class RayLightningEnvironment(LightningEnvironment):
    """Tells, as Ray's of that name does, how many ranks there are; here two on the first node."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def global_rank(self) -> int:
        return int(os.environ["RANK"])

    def local_rank(self) -> int:
        return self.global_rank() % 2

    def node_rank(self) -> int:
        return self.global_rank() // 2

    def set_world_size(self, size: int) -> None:
        pass

    def set_global_rank(self, rank: int) -> None:
        pass


def fit_by_ray(is_by_ray: bool) -> Tensor:
    given: dict[str, Any] = {"devices": 3}
    if is_by_ray:
        here = RayLightningEnvironment()
        given = {"devices": 1 if here.node_rank() else 2, "plugins": [here]}
    model = Plain()
    trainer(strategy("allreduce"), **given).fit(model, loader(120, shuffle=True))
    return weights(model)


def test_ray_on_nodes_with_different_numbers_of_ranks() -> None:
    on_one_node = run(3, fit_by_ray, False)
    for x in run(3, fit_by_ray, True):
        assert torch.equal(x, on_one_node[0])


@pytest.mark.exhaustive
@every_mpi
def test_mpiexec(python: str, tmp_path: Path) -> None:
    done = ended([mpiexec(python), "-n", "4", python, *script(tmp_path)])
    assert done.returncode == 0, done.stderr
    check(tmp_path, "MPIEnvironment", "MPITransport", (0, 1, 2, 3))


@pytest.mark.exhaustive
@shaped
def test_torchrun_on_two_nodes(two_nodes: Network, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += [f"--master-addr={two_nodes.address(0)}", "--master-port=29500"]
    given = environment(GLOO_SOCKET_IFNAME=INTERFACE)
    agents = [
        subprocess.Popen(
            [*two_nodes.inside(node), *torchrun, f"--node-rank={node}", *script(tmp_path, 1, 2)],
            env=given,
        )
        for node in range(2)
    ]
    try:
        assert [agent.wait(280) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.kill()
    check(tmp_path, "TorchElasticEnvironment", "ProcessGroupTransport", (0, 0))


@pytest.mark.exhaustive
@shaped
@every_mpi
def test_mpiexec_on_two_nodes(python: str, two_nodes: Network, tmp_path: Path) -> None:
    shell = two_nodes.shell(tmp_path)
    hosts = [two_nodes.address(node) for node in range(2)]
    if is_of_mpich(mpiexec(python)):
        options = ["-launcher", "ssh", "-launcher-exec", str(shell), "-iface", INTERFACE]
        options += ["-hosts", ",".join(hosts), "-ppn", "2"]
    else:
        options = ["--prtemca", "plm_ssh_agent", str(shell), "--prtemca", "prte_if_include"]
        options += [INTERFACE, "--host", ",".join(f"{host}:2" for host in hosts)]
        options += ["--map-by", "ppr:2:node:oversubscribe"]
    command = [mpiexec(python), *options, "-n", "4", python, *script(tmp_path, 2, 2)]
    variables = {
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "UCX_NET_DEVICES": INTERFACE,
        "FI_TCP_IFACE": INTERFACE,
        "FI_PROVIDER": "tcp",
    }
    done = ended([*two_nodes.inside(0), *command], **variables)
    assert done.returncode == 0, done.stderr
    check(tmp_path, "MPIEnvironment", "MPITransport", (0, 1, 0, 1))
