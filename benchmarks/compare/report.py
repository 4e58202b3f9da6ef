"""Tables and plots of result files that `throughput`, `convergence` and `target` have written.

    python -m benchmarks report throughput_4.json throughput_8.json --output report

Each throughput file gives a table, and all of them together a plot: steps per second of all ranks
together against the number of ranks, with the ideal line (ranks that never wait for one another),
and the bytes sent per step.  A convergence file gives its table, and its values against seconds and
against steps: one line per strategy, the mean over the seeds, with the range.  A target file gives
its tables, and the quality against seconds, steps and MB sent in each situation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.compare import convergence, plots, target_tables, throughput
from lightning_dsgd.lab.options import Parser


def main(argv: list[str] | None = None) -> None:
    """Writes the report."""
    parser = Parser("report", __doc__, prog="python -m benchmarks report")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="result files")
    parser.add_argument("--output", type=Path, default=Path("report"), help="folder to write")
    args = parser.parse_args(argv)
    try:
        results = [(path, json.loads(path.read_text())) for path in args.files]
        for path, result in results:
            if not isinstance(result, dict) or not {"command", "summary"} <= result.keys():
                raise ValueError(f"{path} is another kind of file")
    except (OSError, ValueError) as err:
        parser.error(f"a result file must be one that `python -m benchmarks` has written: {err}")
    args.output.mkdir(parents=True, exist_ok=True)
    throughputs = [result for _, result in results if _is_throughput(result)]
    sections = [_section(path, result, args.output) for path, result in results]
    if throughputs:
        image = args.output / "throughput.png"
        plots.plot_throughput(throughputs, image)
        sections.insert(0, f"![Throughput]({image.name})")
    report = args.output / "report.md"
    report.write_text("\n\n".join(sections) + "\n")
    print(f"written: {report}")


def _is_throughput(result: dict[str, Any]) -> bool:
    return "mb_sent_per_step" in result["summary"][0]


def _section(path: Path, result: dict[str, Any], folder: Path) -> str:
    if "to_target" in result["summary"][0]:
        image = folder / f"{path.stem}.png"
        plots.plot_target(result, image)
        parts = [f"## {path.stem}", f"`{result['command']}`", target_tables.tables(result)]
        return "\n\n".join([*parts, f"![Quality over seconds, steps and MB]({image.name})"])
    settings, summary = result["settings"], result["summary"]
    lines = [f"## {path.stem}", f"`{result['command']}`"]
    lines += [f"{settings['ranks']} ranks on {result['cores']} cores, {result['network']}."]
    if _is_throughput(result):
        lines.append(throughput.table(summary, summary[0]["strategy"]))
    else:
        percent = "accuracy" in result["monitor"]
        lines.append(convergence.table(summary, percent=percent, target=result["target"]))
        image = folder / f"{path.stem}.png"
        plots.plot_convergence(result, image)
        lines.append(f"![{result['monitor']}]({image.name})")
    return "\n\n".join(lines)


if __name__ == "__main__":
    main()
