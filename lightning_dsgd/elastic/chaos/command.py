"""Plays a seeded schedule of losses, stops, cuts and joins against a training; says what held.

    lightning-dsgd chaos --seed 7 --ranks 16 --minutes 5
    lightning-dsgd timeline chaos.json    # a page that plays the file
    lightning-dsgd chaos --seed 7 --ranks 4 --minutes 2 --real    # real processes, in real time

By default all of it happens in virtual time, and the same seed and commit write the same file.
With --real, `lightning-dsgd launch` starts processes.  They are killed and stopped, and it starts
lost ones again.  Two such runs differ, and the links of one machine are not cut.

Exit status: 0 if all held, 1 if something did not.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, Final

from lightning_dsgd.elastic.chaos.schedule import KINDS, Terms, draw
from lightning_dsgd.source import commit

_REAL_KINDS: Final = ("loss", "stop")
_MOST_SHOWN: Final = 5
_HEARTBEAT_S, _CALM_S = 10.0, 40.0


def main(argv: list[str] | None = None) -> None:
    """Plays one schedule; exits with 1 if something did not hold."""
    parser = argparse.ArgumentParser(
        prog="lightning-dsgd chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shown = "(default: %(default)s)"
    parser.add_argument("--seed", type=int, default=0, help=f"of the schedule {shown}")
    parser.add_argument("--ranks", type=int, default=16, help=f"at least 3 {shown}")
    parser.add_argument("--minutes", type=float, default=5.0, help=f"of the storm {shown}")
    parser.add_argument(
        "--every-s", type=float, default=15.0, help=f"mean time between two events {shown}"
    )
    parser.add_argument(
        "--strategy", default="popsgd", help=f"one that claims batches, with settings {shown}"
    )
    parser.add_argument("--real", action="store_true", help="with real processes, in real time")
    parser.add_argument("--output", type=Path, default=Path("chaos.json"), help=f"a file {shown}")
    args = parser.parse_args(argv)
    if args.ranks < 3 or args.minutes <= 0 or args.every_s <= 0:
        parser.error(
            "--ranks must be at least 3, as more than half must be left, and --minutes and "
            f"--every-s positive, got {args.ranks}, {args.minutes:g} and {args.every_s:g}"
        )
    kinds = _REAL_KINDS if args.real else KINDS
    terms = Terms(args.ranks, 60 * args.minutes, args.every_s, _HEARTBEAT_S, _CALM_S, kinds)
    # Lazily: a help text needs no torch.
    from lightning_dsgd.algorithms import make_algorithm

    try:
        in_lockstep = make_algorithm(args.strategy).lockstep
    except ValueError as err:
        parser.error(str(err))
    if in_lockstep:
        parser.error(
            "--strategy must not wait for all ranks in every step, as ranks claim their batches, "
            f'got {args.strategy!r}; try "popsgd" or "wagma"'
        )
    raise SystemExit(_play(args, terms))


def _play(args: argparse.Namespace, terms: Terms) -> int:
    from lightning_dsgd.elastic.chaos import real, simulated
    from lightning_dsgd.elastic.chaos.record import as_file, findings

    events = draw(args.seed, terms)
    player = real.play if args.real else simulated.play
    record = player(args.seed, terms, events, args.strategy)
    found = findings(record)
    replay = _replay(args)
    head = {"command": replay, "commit": commit(), "real": args.real}
    told = {"held": [rule for rule, where in found.items() if not where], "failed": found}
    told["failed"] = {rule: where for rule, where in found.items() if where}
    settings = {"strategy": args.strategy, "ranks": args.ranks, "seed": args.seed}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(_text({"chaos": 1} | head | settings | told | as_file(record)))
    counts = Counter(event.kind for event, _ in record.events)
    said = ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))
    joined = sum(bool(p.views) for p in record.processes.values()) - args.ranks
    ended = sum(p.how == "finished" for p in record.processes.values())
    form = "real processes" if args.real else "simulated"
    _say(f"{args.strategy}, {args.ranks} ranks, {args.minutes:g} minutes, {form}: {said or 'calm'}")
    _say(f"{joined} joined, {len(record.views())} views, {ended} ranks at the end")
    for rule, where in found.items():
        _say(f"{'FAILED' if where else 'held  '}  {rule}")
        for each in where[:_MOST_SHOWN]:
            _say(f"        {each}")
        if where[_MOST_SHOWN:]:
            _say(f"        and {len(where) - _MOST_SHOWN} more: see the file")
    _say(f"written: {args.output}")
    if record.folder is not None and told["failed"]:
        _say(f"logs: {record.folder / 'logs'}")
    elif record.folder is not None:
        shutil.rmtree(record.folder)
    if told["failed"]:
        again = "plays the same schedule" if args.real else "replays it"
        _say(f"{again}: {replay}    # at commit {head['commit'] or 'unknown'}")
    return int(bool(told["failed"]))


def _say(line: str) -> None:
    print(line)  # noqa: T201


def _replay(args: argparse.Namespace) -> str:
    words = ["--seed", args.seed, "--ranks", args.ranks, "--minutes", f"{args.minutes:g}"]
    words += ["--every-s", f"{args.every_s:g}", "--strategy", args.strategy]
    return shlex.join(["lightning-dsgd", "chaos", *map(str, words), *["--real"] * args.real])


def _text(value: dict[str, Any]) -> str:
    """Returns the file: JSON, with one event, view or process per line."""
    lines = []
    for key, each in value.items():
        text = json.dumps(each)
        if isinstance(each, list) and each:
            text = "[\n  " + ",\n  ".join(map(json.dumps, each)) + "]"
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
