"""Writes the tables of strategies, recipes, examples and results into the documents.

And what `lightning-dsgd advise` knows of accuracy, which comes from a result too, into the package.

python docs/tables.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lightning_dsgd.lab.adaptive import own_rate
from lightning_dsgd.lab.advise import accuracy
from lightning_dsgd.lab.bench import target_tables
from lightning_dsgd.lab.bench.situations import SITUATIONS
from lightning_dsgd.lab.catalogue import BRIEF, markdown
from lightning_dsgd.lab.in_force import measured_with
from lightning_dsgd.lab.recipes import said
from lightning_dsgd.lab.results import text

ROOT = Path(__file__).parents[1]
TARGETS = sorted(ROOT.glob("docs/results/choosing/target_epochs*.json"))
TABLE = re.compile(r"(<!-- lightning-dsgd strategies --markdown (\S+) -->\n)(?:.+\n)*")
RECIPES = re.compile(r"(<!-- what (\S+)/\*.yaml say at their beginning -->\n)(?:.+\n)*")
SHORT = re.compile(r"(<!-- the strategies in short, with pages in (\S+) -->\n)(?:.+\n)*")
EXAMPLES = re.compile(r"(<!-- what examples/\*.py say at their beginning -->\n)(?:.+\n)*")

# A result, with a choice of its strategies: "docs/results/x.json of popsgd,wagma:overlap=true".
RESULT = r"in (\S+(?: of \S+)?) -->\n)(?:.+\n)*"
TIMES = re.compile(rf"(<!-- seconds to (99|100)% {RESULT}")
AT_BASELINES_LR = re.compile(rf"(<!-- seconds to (99|100)% with the baseline's rate {RESULT}")
ENDS = re.compile(rf"(<!-- seconds to the end {RESULT}")
QUALITIES = re.compile(rf"(<!-- quality and speed {RESULT}")
IN_FORCE = re.compile(r"(<!-- what was in force in (\S+) -->\n)(?:.+\n)*")
SOONEST = re.compile(
    r"(<!-- soonest (\w+) to (99|100)% in docs/results/choosing/ of (.+) -->\n)(?:.+\n)*"
)


def recipes(folder: str) -> str:
    """Each with the first sentences of its comment."""
    lines = ["| recipe | what |", "|---|---|"]
    for path in sorted(ROOT.glob(f"{folder}/*.yaml")):
        lines.append(f"| `{path.relative_to(ROOT)}` | {said(path)} |")
    return "\n".join(lines)


def examples() -> str:
    """Each with the first line of its docstring; the demo has a page of its own."""
    lines = ["| example | what |", "|---|---|"]
    for path in sorted(ROOT.glob("examples/*.py")):
        if path.stem != "demo":
            lines.append(f"| [{path.stem}](../examples/{path.name}) | {said(path)} |")
    return "\n".join(lines)


def targets(of: str) -> dict[str, Any]:
    """A result of `lightning-dsgd bench target`, with the rows of the baseline and of those chosen.

    Args:
        of: "FILE", or "FILE of popsgd,wagma"; a strategy's rows with claimed batches go with it
    """
    file, _, names = of.partition(" of ")
    result: dict[str, Any] = json.loads((ROOT / file).read_text())
    if names:
        chosen = {*names.split(","), result.get("settings", {}).get("baseline", "allreduce")}
        strategies = [row["strategy"].partition(", ")[0] for row in result["summary"]]
        if missing := chosen - {*strategies}:
            raise ValueError(f"{file} must have what is chosen of it, got none of {missing}")
        rows = zip(strategies, result["summary"], strict=True)
        result["summary"] = [row for name, row in rows if name in chosen]
    return result


def times(percent: str, of: str) -> str:
    """When shares of the quality are reached."""
    return target_tables.time_table(targets(of), f"{int(percent) / 100:g}")


def at_baselines_lr(percent: str, of: str) -> str:
    """The same, where each strategy has the baseline's learning rate."""
    return target_tables.default_table(targets(of), f"{int(percent) / 100:g}")


def ends(of: str) -> str:
    """When training ends."""
    return target_tables.end_table(targets(of))


def in_force(file: str) -> str:
    """When a result was measured, and which hyperparameters are others today."""
    return measured_with(json.loads((ROOT / file).read_text()))


def qualities(of: str) -> str:
    """The final quality, the job's rate and the learning rate."""
    return target_tables.quality_table(targets(of))


def soonest(of: str, percent: str, tasks: str) -> str:
    """What is the soonest in each situation, with a column for each task and its results.

    Args:
        of: the name of the strategies to choose from; "strategy" means any
        percent: of all-reduce's quality
        tasks: "digits: target_stretch target_slow_link; resnet: target_resnet"
    """
    share = f"{int(percent) / 100:g}"
    columns: dict[str, dict[str, str]] = {}
    for column in tasks.split("; "):
        task, _, names = column.partition(": ")
        paths = [ROOT / f"docs/results/choosing/{name}.json" for name in names.split()]
        rows = [row for path in paths for row in json.loads(path.read_text())["summary"]]
        by_situation = {name: [r for r in rows if r["situation"] == name] for name in SITUATIONS}
        columns[task] = {name: soonest_cell(here, of, share) for name, here in by_situation.items()}
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for situation in SITUATIONS:
        cells = [cells[situation] for cells in columns.values()]
        lines.append(f"| {situation} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def soonest_cell(rows: list[dict[str, Any]], of: str, share: str) -> str:
    """Of these rows; what all seeds reach the target with comes first."""
    speeds = [row["steps_per_s"] for row in rows if row["strategy"] == target_tables.BASELINE]
    if not speeds:
        return "not measured"
    found = [
        (figures["reached"] < row["seeds"], figures["share"], row)
        for row in rows
        if (figures := row["to_target"][share])["seconds"] is not None
        and row["strategy"] != target_tables.BASELINE
        and of in ("strategy", row["strategy"].partition(":")[0])
    ]
    if not found:
        return "never"
    _, fraction, row = min(found, key=lambda each: each[:2])
    figures = row["to_target"][share]
    notes = [f"mean steps/s {row['steps_per_s'] / speeds[0]:.1f}"]
    if "stretch" in figures:
        notes.append(f"trained {figures['stretch']:g}x")
    if figures["reached"] < row["seeds"]:
        notes.append(f"{figures['reached']} of {row['seeds']}")
    seconds = f"{fraction:.2f} ({figures['seconds']:.0f} s)"
    return f"{seconds}: `{row['strategy']}` ({', '.join(notes)})"


def renewed(text: str) -> str:
    """The document with its tables as they should be; each is found by the comment before it."""
    text = TABLE.sub(lambda found: f"{found[1]}{markdown(found[2])}\n", text)
    text = SHORT.sub(lambda found: f"{found[1]}{markdown(found[2], BRIEF)}\n", text)
    text = RECIPES.sub(lambda found: f"{found[1]}{recipes(found[2])}\n", text)
    text = TIMES.sub(lambda found: f"{found[1]}{times(found[2], found[3])}\n", text)
    text = AT_BASELINES_LR.sub(
        lambda found: f"{found[1]}{at_baselines_lr(found[2], found[3])}\n", text
    )
    text = ENDS.sub(lambda found: f"{found[1]}{ends(found[2])}\n", text)
    text = IN_FORCE.sub(lambda found: f"{found[1]}{in_force(found[2])}\n", text)
    text = QUALITIES.sub(lambda found: f"{found[1]}{qualities(found[2])}\n", text)
    text = SOONEST.sub(lambda found: f"{found[1]}{soonest(*found.groups()[1:])}\n", text)
    return EXAMPLES.sub(lambda found: f"{found[1]}{examples()}\n", text)


def known_accuracy() -> str:
    """What the package holds of the results."""
    results = [json.loads(file.read_text()) for file in TARGETS]
    return text(accuracy.distilled(results)) + "\n"


def known_at_its_rate() -> str:
    """What `adaptive` holds of the results."""
    results = (json.loads((ROOT / "docs/results" / name).read_text()) for name in own_rate.SOURCES)
    return text(own_rate.distilled(results)) + "\n"


def main() -> None:
    """All documents."""
    (ROOT / "lightning_dsgd" / "lab" / "adaptive" / own_rate.FILE).write_text(known_at_its_rate())
    (ROOT / "lightning_dsgd" / "lab" / "advise" / accuracy.FILE).write_text(known_accuracy())
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        new = renewed(text)
        if new != text:
            page.write_text(new)


if __name__ == "__main__":
    main()
