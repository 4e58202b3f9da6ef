"""The report on this machine: it always comes to its end, and says what to do."""

from __future__ import annotations

import json
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

    for name in ("torch_and_cuda", "packages", "mpi", "emulated_networks"):
        monkeypatch.setattr(doctor, name, broken)
    report = doctor.report(doctor.examine())
    assert report.count("OSError: no more processes") == 4
    assert "launcher" in report
