"""The report on this machine: it always comes to its end, and says what to do."""

from __future__ import annotations

import json
import os
import socket
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest

from lightning_dsgd.cli import main
from lightning_dsgd.lab import doctor
from lightning_dsgd.lab.doctor import Finding


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables in doctor.LAUNCHERS.values():
        for variable in variables:
            monkeypatch.delenv(variable, raising=False)


@pytest.mark.exhaustive
def test_a_child_that_hangs_is_given_up() -> None:
    code = 'print(\'{"library": "some"}\', flush=True); import time; time.sleep(100)'
    found, why = doctor.ask(code, timeout_s=8.0)
    assert found == {"library": "some"}  # what it said before
    assert "8 s" in why


def test_a_child_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found, why = doctor.ask("import os; os.abort()")
    assert found == {}
    assert "status" in why
    monkeypatch.setattr(doctor, "_LIBRARIES", "raise ImportError('libcudart.so: not found')")
    (finding,) = doctor.torch_and_cuda()
    assert not finding.works
    assert "libcudart.so" in finding.found


def test_lightnings_release_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"wandb": "0.30", "scikit-learn": None, "matplotlib": None, "jsonargparse": None}
    for version, works in (("2.6.1", True), ("2.6.3", False)):
        found = json.dumps({"lightning": version} | others)
        monkeypatch.setattr(doctor, "_VERSIONS", f"print({found!r})")
        lightning, *_ = doctor.packages()
        assert lightning.works is works
        assert ("!=2.6.2" in lightning.advice) is not works
        assert ("malware" in lightning.found) is not works


def test_mpi_is_asked_outside_this_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = "import os; raise RuntimeError(f\"{os.environ.get('PMI_RANK')=}\")"
    (tmp_path / "mpi4py.py").write_text(library)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # child processes find it before all others
    monkeypatch.setattr(doctor, "_VERSIONS", 'print(\'{"mpi4py": "4.1.0"}\')')
    monkeypatch.setenv("PMI_RANK", "1")
    finding = doctor.mpi()[0]
    assert not finding.works
    assert "=None" in finding.found
    assert "uninstall mpi4py" in finding.advice


FOUND = [
    Finding("Python", True, "3.11"),
    Finding("torch", True, "2.13"),
    Finding("Lightning", True, "2.6"),
    Finding("MPI", False, "mpi4py is not installed", "pip install mpi4py"),
]
ENDS = {
    "": None,
    "torch": None,
    "mpi": "error: missing here: MPI",
    "torch MPI --json": "error: missing here: MPI",
    "mpii": 2,
}


@pytest.mark.parametrize("options", ENDS)
def test_it_ends_with_1_where_something_is_missing_that_was_asked_for(
    options: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: FOUND)
    with nullcontext() if ENDS[options] is None else pytest.raises(SystemExit) as end:
        main(["doctor", *options.split()])
    assert end is None or end.value.code == ENDS[options]  # Python ends with 1 after a text
    out, err = capsys.readouterr()
    assert ("did you mean mpi?" in err) is (options == "mpii")
    if "--json" in options:
        assert json.loads(out) == [asdict(finding) for finding in FOUND]


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Finding]:
        raise OSError("no more processes")

    for name in ("torch_and_cuda", "packages", "mpi", "network_of_ranks", "emulated_networks"):
        monkeypatch.setattr(doctor, name, broken)
    report = doctor.report(doctor.examine())
    assert report.count("OSError: no more processes") == 5
    assert "launcher" in report


@pytest.mark.parametrize(
    ("variables", "works", "told"),
    [
        ({}, True, "known on a node of a job"),
        ({"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}, True, "messages: lo, gloo: lo;"),
        ({"SLURM_NODELIST": "n[1-2]", "GLOO_SOCKET_IFNAME": "ib0"}, True, "the ranks meet at n1"),
        (
            {"MASTER_ADDR": "n1", "GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=eth0"},
            False,
            "gloo: ib0, NCCL: eth0",
        ),
        (
            {"MASTER_ADDR": "n1", "GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "^eth0"},
            True,
            "",
        ),
        ({"MASTER_ADDR": "no-such-name.invalid"}, False, "a name does not resolve"),
    ],
)
def test_all_traffic_takes_one_network(
    variables: dict[str, str], works: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("MASTER_", "GLOO_", "NCCL_"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (finding,) = doctor.network_of_ranks()
    assert finding.works is works
    assert told in finding.found
    assert bool(finding.advice) is not works


def test_messages_leave_where_the_rendezvous_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gloo by the address of this machine's name: on many machines, that is loopback's."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "192.0.2.7")
    found = doctor.interfaces({"MASTER_ADDR": "127.0.0.1"})
    assert found == {"messages": "lo", "gloo": "192.0.2.7"}
