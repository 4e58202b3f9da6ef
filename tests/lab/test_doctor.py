"""The report on this machine: it always comes to its end, and says what to do."""

from __future__ import annotations

import json
import sys
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
def test_the_report_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    subjects = [line[4:21].strip() for line in lines if line[:4] in ("ok  ", "--  ")]
    for subject in ("Python", "torch", "CUDA", "NCCL", "Lightning", "W&B", "MPI"):
        assert subject in subjects
    assert any(line.startswith("ok  torch") for line in lines)


@pytest.mark.exhaustive
def test_a_child_that_hangs_is_given_up() -> None:
    code = 'print(\'{"library": "some"}\', flush=True); import time; time.sleep(100)'
    found, why = doctor.ask(code, timeout_s=8.0)
    assert found == {"library": "some"}  # what it said before
    assert "8 s" in why


def test_a_child_that_dies_is_reported_and_one_that_does_not_runs_this_interpreter() -> None:
    found, why = doctor.ask("import os; os.abort()")
    assert found == {}
    assert "status" in why
    code = "import json, sys; print(json.dumps({'it': sys.executable}))"
    assert doctor.ask(code) == ({"it": sys.executable}, "")


@pytest.mark.parametrize(
    ("version", "works"), [("2.6.1", True), ("2.6.3", False), ("2.5.0", False)]
)
def test_lightnings_release_decides(
    version: str, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {"wandb": "0.30", "scikit-learn": None, "matplotlib": None, "jsonargparse": None}
    monkeypatch.setattr(
        doctor, "_VERSIONS", f"print({json.dumps({'lightning': version} | others)!r})"
    )
    lightning, *rest = doctor.packages()
    assert lightning.works is works
    assert ("!=2.6.2" in lightning.advice) is not works
    assert ("malware" in lightning.found) is (version == "2.6.3")
    assert any(f.advice == "for `lightning-dsgd fit`: pip install jsonargparse" for f in rest)


LIBRARY = """
class rc: initialize = True
class MPI:
    THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)
    Get_library_version = staticmethod(lambda: "MPI of a test\\n more")
    Init_thread = staticmethod(lambda wanted: MPI.THREAD_{})
    Finalize = staticmethod(lambda: None)
"""
MPI4PY = {
    "no library": ("raise RuntimeError('no MPI library')", "no MPI library", "uninstall mpi4py"),
    "in a job": ("import os; raise RuntimeError(f\"{os.environ.get('PMI_RANK')=}\")", "=None", ""),
    "all threads": (LIBRARY.format("MULTIPLE"), "MPI of a test, thread level MULTIPLE", None),
    "one thread": (LIBRARY.format("SERIALIZED"), "MPI of a test, thread level SERIALIZED", ""),
}
"""What mpi4py does when it is imported, what the report finds, and what it advises, if it does."""


@pytest.mark.parametrize("case", MPI4PY)
def test_mpi_is_asked_outside_this_job(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, found, advice = MPI4PY[case]
    (tmp_path / "mpi4py.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # child processes find it before all others
    monkeypatch.setattr(doctor, "_VERSIONS", 'print(\'{"mpi4py": "4.1.0"}\')')
    monkeypatch.setenv("PMI_RANK", "1")
    finding = doctor.mpi()[0]
    assert found in finding.found
    assert finding.works is (advice is None)
    assert (advice or "") in finding.advice
    assert bool(finding.advice) is not finding.works


def test_torch_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_LIBRARIES", "raise ImportError('libcudart.so: not found')")
    (finding,) = doctor.torch_and_cuda()
    assert not finding.works
    assert "libcudart.so" in finding.found
    assert finding.advice


FOUND = [
    Finding("Python", True, "3.11"),
    Finding("torch", True, "2.13"),
    Finding("Lightning", True, "2.6"),
    Finding("MPI", False, "mpi4py is not installed", "pip install mpi4py"),
]
ENDS = {
    "": None,
    "--json": None,
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
    if ENDS[options] == 2:
        assert "python, torch, lightning, mpi, got 'mpii'; did you mean mpi?" in err
    elif "--json" in options:
        assert json.loads(out) == [asdict(finding) for finding in FOUND]
    else:
        assert "--  MPI" in out
    monkeypatch.setattr(doctor, "examine", lambda: [*FOUND[:2], Finding("Lightning", False, "")])
    with pytest.raises(SystemExit, match="missing here: Lightning"):
        main(["doctor"])


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Finding]:
        raise OSError("no more processes")

    for name in ("torch_and_cuda", "packages", "mpi", "emulated_networks"):
        monkeypatch.setattr(doctor, name, broken)
    report = doctor.report(doctor.examine())
    assert report.count("OSError: no more processes") == 4
    assert "launcher" in report
