"""The command for a GPU that is lent: `benchmarks/gpu.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BARE = """
import os, sys
for name in ("wandb", "jsonargparse", "hatchling", "sklearn", "psutil"):
    sys.modules[name] = None
sys.path = [p for p in sys.path if not os.path.isdir(os.path.join(p, "lightning_dsgd"))]
"""
"""What every Python does first: it has neither the package nor more than the command needs."""
HUNG = """
import dataclasses, os, signal, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from benchmarks import gpu
from benchmarks.on_gpu import alone, gpt, place, tested, together

def hang(*_, **__):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path({reached!r}).open("a").write("hung\\n")
    while True:
        time.sleep(1)

for module in (alone, gpt, place, together):
    module.finish = hang
alone.accelerators.name_of = alone.captured = hang
tested.pytest_with = tested.stuck_rank.watched = hang
tested.TRAIN = "import subprocess, time\\n" \\
    "subprocess.Popen(['sleep', '1000'], start_new_session=True)\\n" \\
    "open({reached!r}, 'a').write('hung\\\\n')\\ntime.sleep(1000)"
chosen = {chosen!r}
every = {{part.name: part for call in gpu.CALLS.values() for part in call}}
parts = [dataclasses.replace(every[name], limit_s={limit_s}) for name in chosen]
last = dataclasses.replace(every["card"], name="last", rows=lambda _: iter([]))
gpu.CALL_S = {limit_s} * len(parts) + 60
gpu.parts_of = lambda *_: [*parts, last]
gpu.main(["1", "--rehearse", "--output", "hung.json"])
"""
"""Every wait for a device hangs, ignores SIGTERM and has a child in a session of its own."""
PARTS = (
    *("card", "ceilings", "mended", "copies", "passes", "selection", "gpt"),
    *("added", "straggler", "memory", "capture", "launched", "stuck", "tests"),
)


def started(folder: Path, *command: str, mark: str = "") -> subprocess.Popen[str]:
    """Runs Python from a checkout that is not installed."""
    (folder / "sitecustomize.py").write_text(BARE)
    bare = {
        "PYTHONPATH": str(folder),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # the entry point is of what is installed
        "OMP_NUM_THREADS": "1",
        "MASTER_PORT": "1",  # which no part may inherit
        "RANK": "7",
        "MARK_OF_A_TEST": mark,
    }
    given: Any = {"cwd": folder, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([sys.executable, *command], env=os.environ | bare, text=True, **given)


def ran(folder: Path, *command: str, mark: str = "") -> tuple[int, str]:
    with started(folder, *command, mark=mark) as process:
        said, _ = process.communicate()
    return process.returncode, said


def processes_with(mark: str) -> list[str]:
    """The commands of all processes that have the mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text())
        except OSError:  # it has ended
            continue
    return found


def check_hung(folder: Path, chosen: tuple[str, ...], limit_s: float) -> None:
    """Has each of these parts hang in its midst: it ends, and nothing of it lives on."""
    mark, reached = str(uuid.uuid4()), folder / "reached"
    script = folder / "hung.py"
    script.write_text(
        HUNG.format(root=str(ROOT), chosen=chosen, limit_s=limit_s, reached=str(reached))
    )
    status, said = ran(folder, str(script), mark=mark)
    assert not processes_with(mark)
    parts = json.loads((folder / "hung.json").read_text())["parts"]
    for name in chosen:
        assert any("ended by force" in row.get("error", "") for row in parts[name]), (name, said)
        assert f"{name}: " in said
    assert status == 1
    assert len(reached.read_text().splitlines()) >= len(chosen)


def test_a_part_that_hangs_ends_with_all_that_it_has_started(tmp_path: Path) -> None:
    check_hung(tmp_path, ("added",), 3.0)


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_every_part_that_hangs_ends(tmp_path: Path) -> None:
    check_hung(tmp_path, (*PARTS[1:], PARTS[0]), 8.0)


@pytest.mark.exhaustive
@pytest.mark.timeout(500)
def test_every_part_can_be_rehearsed(tmp_path: Path) -> None:
    status, said = ran(
        tmp_path, str(ROOT / "benchmarks" / "gpu.py"), "--rehearse", "--output", "r.json"
    )
    result = json.loads((tmp_path / "r.json").read_text())
    assert list(result["parts"]) == list(dict.fromkeys(PARTS))
    assert status == 0, said
    assert result["is_whole"]
    parts = result["parts"]
    assert len(parts["gpt"]) == 9
    assert all(row["step_ms"] > 0 for row in parts["gpt"])
    assert {row["strategy"] for row in parts["added"]} >= {"balanced", "ddp"}
    [stuck] = parts["stuck"]
    assert "error" not in stuck
    assert {row["outcome"] for row in (*parts["mended"], *parts["tests"])} == {"skipped"}


def test_a_killed_command_loses_nothing(tmp_path: Path) -> None:
    mark = str(uuid.uuid4())
    parts = ("--parts", "selection", "capture", "gpt")
    command = (str(ROOT / "benchmarks" / "gpu.py"), "--rehearse", *parts, "--output", "r.json")
    with started(tmp_path, *command, mark=mark) as process:
        assert process.stdout is not None
        said = next((line for line in process.stdout if line.startswith("capture: ")), "")
        process.terminate()
    result = json.loads((tmp_path / "r.json").read_text())
    assert said, "it has ended before anything was measured"
    assert result["parts"]["selection"][0]["elements"] == 10_000
    assert not result["is_whole"]
    assert not processes_with(mark)
