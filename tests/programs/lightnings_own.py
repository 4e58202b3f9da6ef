"""Lightning's own tests of ddp on CPUs, with strategies of this package in its place.

    python -m tests.programs.lightnings_own CLONE [--strategies balanced,allreduce,wagma]

CLONE is a clone of https://github.com/Lightning-AI/pytorch-lightning, at a version near the one
that is installed.  Its tests run unchanged.  Of those that make a strategy by ddp's name the table
counts what passes, and names each test that fails with a strategy of ours, with the error.  A test
that fails with ddp too is left out.  Options of the name, as "ddp_find_unused_parameters_true" has
one, do not count for ours; a `DDPStrategy(...)` that a test makes itself stays.

A test runs if ddp's name stands in it, or in a function that it names, and if it needs no devices.
What Lightning marks as standalone runs in a process of its own.  Files that cannot be imported, as
where the clone is at the tag of another version, are named before all tests and at the end, and the
exit status is 1: their tests are in no count.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning_dsgd.lab.in_force import in_force
from lightning_dsgd.lab.results import provenance

ROOT = Path(__file__).parents[2]
DDP = "ddp"
NAMED = re.compile(r"""["']ddp""")
LEFT_OUT = re.compile(
    r"test_fsdp|test_model_parallel|test_gpu|test_xla|tensorrt|test_registry|onnx"
)
"""Files that need devices or other packages, or test the names themselves."""
ALONE = re.compile(r"standalone=True")
DEVICES = re.compile(r"min_cuda_gpus|tpu=True|deepspeed=True")
QUIET = [
    "-q",
    "--continue-on-collection-errors",
    "--no-header",
    "--disable-warnings",
    "--override-ini=addopts=",
    "--tb=short",
]
LIMIT_S = 3600
"""How long a process of pytest may take; `in_place_of_ddp` limits each test."""

PASSED = {"outcome": "passed"}
NOT_IMPORTED = "not imported"
"""The outcome of a file that pytest could not import."""

Rows = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Group:
    """Tests that run in one process of pytest."""

    tests: tuple[str, ...]
    alone: bool = False


def functions(body: Iterable[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yields the functions of a module and of its classes, each with its name for pytest."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from functions(node.body, f"{prefix}{node.name}::")
        elif isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node


def groups_of(tests: Path, part: str) -> list[Group]:
    """Returns the tests that may ask for ddp by name, of the files whose path has the part."""
    together, alone = [], []
    for path in sorted((tests / "tests_pytorch").rglob("test_*.py")):
        file = path.relative_to(tests)
        if LEFT_OUT.search(path.name) or not re.search(part, str(file)):
            continue
        lines = path.read_text().splitlines()
        texts = {}
        for name, node in functions(ast.parse(path.read_text()).body):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            texts[name] = "\n".join(lines[first - 1 : node.end_lineno])
        are_tests = {name for name in texts if name.rpartition("::")[2].startswith("test_")}
        helpers = [name for name in texts if name not in are_tests and NAMED.search(texts[name])]
        asks = re.compile("|".join([NAMED.pattern, *(rf"\b{name}\b" for name in helpers)]))
        for name in texts:
            marks = texts[name].partition("def ")[0]
            if name in are_tests and asks.search(texts[name]) and not DEVICES.search(marks):
                (alone if ALONE.search(marks) else together).append(f"{file}::{name}")
    found = [Group(tuple(together))] if together else []
    return found + [Group((test,), alone=True) for test in alone]


def outcomes(tests: Path, strategy: str, group: Group, log: Path) -> Rows:
    """Runs tests with a strategy in ddp's place; returns what became of each that was not skipped.

    The process of pytest may be ended by a test, or on its behalf.  Those behind it run in another.
    """
    rows: Rows = {}
    rest = list(group.tests)
    while rest:
        new, whole = run(tests, strategy, Group(tuple(rest), group.alone), log)
        rows |= new
        if whole:
            break
        done = {test.partition("[")[0] for test in new} | set(new)
        last = max((place for place, test in enumerate(rest) if test in done), default=-1)
        for test in rest[last + 1 : last + 2]:  # the one behind the last has ended the process
            rows[test] = {"test": test, "asked": True, "outcome": "failed", "error": "no end"}
        rest = rest[last + 2 :]
    without = ("skipped", NOT_IMPORTED)
    return {test: row for test, row in rows.items() if row["outcome"] not in without}


def run(tests: Path, strategy: str, group: Group, log: Path, *options: str) -> tuple[Rows, bool]:
    """Runs tests in one process; returns what became of each, and whether pytest has ended."""
    with tempfile.TemporaryDirectory() as folder, log.open("a") as output:
        results = Path(folder) / "results"
        results.touch()
        settings = {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{tests}",
            "IN_PLACE_OF_DDP": strategy,
            "RESULTS": str(results),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",  # a forked rank cannot use the threads of its parent
            "CHOSEN": json.dumps(group.tests),
            "PL_RUN_STANDALONE_TESTS": str(int(group.alone)),
        }
        plugin = "tests.programs.in_place_of_ddp"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            plugin,
            f"--rootdir={tests}",
            *QUIET,
            *options,
        ]
        files = dict.fromkeys(test.partition("::")[0] for test in group.tests)
        process = subprocess.Popen(
            [*command, *files],
            cwd=tests,
            env=os.environ | settings,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            ended = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            ended = -signal.SIGKILL
        finally:  # ranks that a test has left behind too
            _kill_session(process.pid)
            process.wait()
        rows = [json.loads(line) for line in results.read_text().splitlines()]
        print(f"{strategy}: pytest ended with {ended} after {len(rows)}", file=output, flush=True)
    # 1: tests failed; 2: files could not be imported too; 5: all are for other machines
    return {row["test"]: row for row in rows}, ended in (0, 1, 2, 5)


def _kill_session(session: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


def all_outcomes(tests: Path, strategy: str, groups: Sequence[Group]) -> Rows:
    log = Path(tempfile.gettempdir()) / f"lightnings_own_{strategy}.log"
    log.unlink(missing_ok=True)
    print(f"{strategy}: pytest's output is in {log}", flush=True)
    rows: Rows = {}
    for group in groups:
        rows |= outcomes(tests, strategy, group, log)
    return rows


def not_imported(tests: Path, groups: Sequence[Group]) -> dict[str, str]:
    """Returns the files that pytest cannot import, and why."""
    log = Path(tempfile.gettempdir()) / "lightnings_own_imports.log"
    log.unlink(missing_ok=True)
    every = Group(tuple(test for group in groups for test in group.tests))
    rows, _ = run(tests, DDP, every, log, "--collect-only")
    return {
        row["test"]: said(row["error"]) for row in rows.values() if row["outcome"] == NOT_IMPORTED
    }


def say_missing(files: dict[str, str]) -> None:
    """Names files whose tests are missing in what follows, and in what went before."""
    if files:
        print(
            f"\n{len(files)} FILES OF TESTS CANNOT BE IMPORTED, and their tests are in no count.  "
            f"Check out the tag of the installed Lightning {version('lightning')} in CLONE, and "
            "install what these files need:"
        )
        print("".join(f"  {file}\n    {why}\n" for file, why in files.items()), flush=True)


def of_these(groups: Sequence[Group], count: set[str]) -> list[Group]:
    """Returns the groups, each with those tests alone that count."""
    found = []
    for group in groups:
        kept = sorted(test for test in count if test.partition("[")[0] in group.tests)
        if kept:
            found.append(Group(tuple(kept), group.alone))
    return found


def said(error: str) -> str:
    """Returns the line of an error that names it: the last such, as a rank's stands below ours."""
    lines = error.strip().splitlines() or [""]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Lost|Warning)\b", line)]
    return (named or lines[:1])[-1][:300]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clone", type=Path, metavar="CLONE")
    parser.add_argument("--strategies", default="balanced,allreduce,wagma")
    parser.add_argument("--part", default="", help="a pattern that the path of a file must have")
    parser.add_argument(
        "--forked", action="store_true", help="fork the ranks that a test wants spawned: quicker"
    )
    parser.add_argument("--output", type=Path, help="a file for the outcomes, as JSON")
    args = parser.parse_args()
    os.environ["FORKED"] = str(int(args.forked))
    tests = args.clone.resolve() / "tests"
    groups = groups_of(tests, args.part)
    if not groups:
        parser.error(f"CLONE must have tests of ddp in tests/tests_pytorch, got {args.clone}")
    given = ["CLONE" if word == str(args.clone) else word for word in sys.argv[1:]]
    command = shlex.join(["python", "-m", "tests.programs.lightnings_own", *given])
    settings = {"hyperparameters": in_force(args.strategies.split(","), [2])}
    report: dict[str, Any] = {**provenance(command), **settings, "passed": {}, "failed": {}}
    missing = report["not_imported"] = not_imported(tests, groups)
    say_missing(missing)
    with_ddp: Rows = {}
    for strategy in args.strategies.split(","):
        rows = all_outcomes(tests, strategy, groups)
        asked = {test: row for test, row in rows.items() if row["asked"]}
        passed = sorted(test for test, row in asked.items() if row["outcome"] == "passed")
        failed = set(asked) - set(passed)
        with_ddp |= all_outcomes(tests, DDP, of_these(groups, failed - set(with_ddp)))
        failed = {test for test in failed if with_ddp.get(test, PASSED)["outcome"] == "passed"}
        report["passed"][strategy] = passed
        report["failed"][strategy] = {test: said(asked[test]["error"]) for test in sorted(failed)}
        num_tests = len(passed) + len(failed)
        print(f"\n{strategy}: {len(passed)} of {num_tests} pass", flush=True)
        for test, error in report["failed"][strategy].items():
            print(f"  {test.removeprefix('tests_pytorch/')}\n    {error}")
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")
    say_missing(missing)
    if missing or any(report["failed"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
