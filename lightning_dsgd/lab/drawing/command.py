"""Where the time of a run went, one track for each rank: computing, waiting and for whom, late.

    lightning-dsgd timeline run/ --output timeline.html
    lightning-dsgd timeline run_ddp/ run_wagma/ --steps 20:40 --output both.html
    lightning-dsgd timeline run/ --output timeline.json    # for https://ui.perfetto.dev
    lightning-dsgd timeline run/ --seconds 2:6 --output timeline.svg

A run's folder is that of the callback `StepTrace`, or of `LoopTrace` in a loop.
The page opens without a network.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, TypeVar

from lightning_dsgd.lab.drawing import browser, picture
from lightning_dsgd.lab.options import Parser

T = TypeVar("T", int, float)

FORMATS: Final = {"html": ".html", "svg": ".svg", "perfetto": ".json"}
_MOST_SPANS: Final = {"html": 400_000, "svg": 20_000, "perfetto": 2_000_000}
"""The most spans that a browser draws at once; Perfetto reads on, so a disk sets its limit."""


def main(argv: list[str] | None = None) -> None:
    """Writes the page, or the file."""
    parser = Parser("timeline", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="in one picture")
    parser.add_argument("--output", type=Path, default=Path("timeline.html"), help="file to write")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="by default as the output's name ends: "
        + ", ".join(f"{suffix} {name}" for name, suffix in FORMATS.items()),
    )
    parser.add_argument("--steps", metavar="FIRST:LAST", help="draws these steps alone")
    parser.add_argument("--seconds", metavar="BEGIN:END", help="draws this of their time alone")
    args = parser.parse_args(argv)
    try:
        form = args.format or _format_of(args.output)
        steps = _pair("--steps", args.steps, int)
        seconds = _pair("--seconds", args.seconds, float)
        runs = [picture.load(run, steps, seconds, _MOST_SPANS[form]) for run in args.runs]
        runs = picture.named_apart(runs, args.runs)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    write = {"html": browser.html, "svg": picture.svg, "perfetto": browser.trace_events}[form]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(write(runs), encoding="utf-8")
    for run in runs:
        print(f"{run.name}: {picture.sentence(run)}")
    print(f"written: {args.output}")


def _format_of(output: Path) -> str:
    for name, suffix in FORMATS.items():
        if output.suffix == suffix:
            return name
    raise ValueError(
        f"--output must end with {', '.join(FORMATS.values())}, or --format be given, got "
        f"{str(output)!r}; try --output timeline.html"
    )


def _pair(option: str, text: str | None, number: type[T]) -> tuple[T, T] | None:
    if text is None:
        return None
    first, colon, last = text.partition(":")
    try:
        pair = number(first), number(last)
    except ValueError:
        pair = None
    if not colon or pair is None or not pair[0] <= pair[1]:
        raise ValueError(
            f"{option} must be two numbers with a colon between, got {text!r}; try 2:6"
        )
    return pair
