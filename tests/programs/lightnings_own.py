"""Lightning's own tests of ddp on CPUs, with strategies of this package in its place.

    python -m tests.programs.lightnings_own CLONE [--strategies balanced,allreduce,wagma]

CLONE is a clone of https://github.com/Lightning-AI/pytorch-lightning, at a version near the one
that is installed.  Its tests run unchanged, first with ddp itself: a test that fails with ddp is
left out.  Of the others the table counts those that made a strategy by ddp's name, and names each
that fails with a strategy of ours, with the error.  Options of the name, as
"ddp_find_unused_parameters_true" has one, do not count for ours; a `DDPStrategy(...)` that a test
makes itself stays.  Tests that Lightning marks as standalone do not run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
DDP = "ddp"
LEFT_OUT = "test_fsdp|test_model_parallel|test_gpu|test_xla|tensorrt|test_registry|onnx"
"""Files that need devices or other packages, or test the names themselves."""
LIMIT_S = 3600


def files_about_ddp(tests: Path) -> list[str]:
    """Returns the files of tests in which a strategy is asked for by ddp's name."""
    found = [
        path.relative_to(tests)
        for path in sorted(tests.rglob("test_*.py"))
        if re.search(r"""["']ddp""", path.read_text())
    ]
    return [str(path) for path in found if not re.search(LEFT_OUT, path.name)]


def outcomes(tests: Path, strategy: str, chosen: list[str]) -> dict[str, dict[str, str]]:
    """Runs the tests with a strategy in ddp's place; returns what became of each."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        results.touch()
        settings = {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{tests}",
            "IN_PLACE_OF_DDP": strategy,
            "RESULTS": str(results),
            "CUDA_VISIBLE_DEVICES": "",
        }
        plugin = "tests.programs.in_place_of_ddp"
        quiet = [
            "-q",
            "--continue-on-collection-errors",
            "--no-header",
            "--disable-warnings",
            "-o",
            "addopts=",
            "--tb=short",
        ]
        command = [sys.executable, "-m", "pytest", "-p", plugin, f"--rootdir={tests}", *quiet]
        command += chosen
        log = Path(tempfile.gettempdir()) / f"lightnings_own_{strategy}.log"
        print(f"{strategy}: pytest's output is in {log}", flush=True)
        with log.open("w") as file:
            ended = subprocess.run(
                command,
                cwd=tests,
                env=os.environ | settings,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
            )
        if ended.returncode > 2:  # 1: tests failed; 2: files could not be imported too
            raise SystemExit(f"pytest ended with {ended.returncode}: {log.read_text()[-2000:]}")
        rows = [json.loads(line) for line in results.read_text().splitlines()]
    return {row["test"]: row for row in rows if row["outcome"] != "skipped"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clone", type=Path, metavar="CLONE")
    parser.add_argument("--strategies", default="balanced,allreduce,wagma")
    parser.add_argument("--output", type=Path, help="a file for the outcomes, as JSON")
    args = parser.parse_args()
    tests = args.clone.resolve() / "tests"
    chosen = files_about_ddp(tests / "tests_pytorch")
    if not chosen:
        parser.error(f"CLONE must have tests of ddp in tests/tests_pytorch, got {args.clone}")
    before = outcomes(tests, DDP, [f"tests_pytorch/{file}" for file in chosen])
    count = {test for test, row in before.items() if row["outcome"] == "passed" and row["asked"]}
    if not count:
        raise SystemExit("no test asks for ddp by name and passes with it: see pytest's output")
    print(f"{len(count)} tests ask for ddp by name and pass with it", flush=True)
    report = {}
    for strategy in args.strategies.split(","):
        rows = outcomes(tests, strategy, sorted(count))
        passed = {test for test, row in rows.items() if row["outcome"] == "passed"}
        failed = {
            test: rows[test]["error"] if test in rows else "did not run"
            for test in sorted(count - passed)
        }
        report[strategy] = failed
        print(f"\n{strategy}: {len(count) - len(failed)} of {len(count)} pass", flush=True)
        for test, error in failed.items():
            print(f"  {test.removeprefix('tests_pytorch/')}\n    {' '.join(error.split())[:300]}")
    if args.output:
        args.output.write_text(json.dumps({"tests": sorted(count), "failed": report}, indent=1))
    if any(report.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
