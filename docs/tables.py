"""Writes the tables of decisions, strategies, recipes, examples and results into the documents.

A table that is written by hand names its results in a comment, "<!-- figures of FILE FILE -->".
Where a result lacks its commit or its hyperparameters, the head of the table says "Stale: ...".  A
link to such a result, on a page without a table of it, is followed by "(stale)".

python docs/tables.py
"""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import combinations
from math import inf
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.compare import target_tables
from benchmarks.compare.situations import SITUATIONS
from lightning_dsgd.algorithms import ALL_ALGORITHMS, BY_UNITS, make_algorithm
from lightning_dsgd.algorithms.written import as_code
from lightning_dsgd.lab import decisions, target_rows
from lightning_dsgd.lab.catalogue import markdown
from lightning_dsgd.lab.decisions import Choice, Situation
from lightning_dsgd.lab.epochs import CLAIMED
from lightning_dsgd.lab.in_force import lacks, measured_with
from lightning_dsgd.lab.recipes import said

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"(<!-- what strategies send and need, told in (\S+) -->\n)(?:.+\n)*")
COSTS = ("name", "communicates", "with", "extra memory", "bytes sent per step")
RECIPES = re.compile(r"(<!-- what (\S+)/\*.yaml say at their beginning -->\n)(?:.+\n)*")
DECISIONS = re.compile(r"(<!-- what to use -->\n)(?:.+\n)*")
DECISIONS_IN_SHORT = re.compile(r"(<!-- what to use in short, with pages in (\S+) -->\n)(?:.+\n)*")
IN_SHORT = ("alike", "unknown", "random", "heavy-tail", "slow-rank", "slow-link", "memory")
WITH_ADAM = (decisions.DDP, decisions.BALANCED, "allreduce")
"""These step with the sum of all gradients, so Adam's steps are those of DDP."""
ADAMW = (
    ("language", ("choosing/adam_language.json", "choosing/adam_language_claimed.json")),
    ("translation", ("choosing/adam_translation.json", "choosing/adam_translation_claimed.json")),
)
"""Tasks with AdamW, and what `python -m benchmarks target` measured, of the same seeds."""
GAINS = re.compile(r"(<!-- what the first choices gained, with pages in (\S+) -->\n)(?:.+\n)*")
GAINED = ("random", "heavy-tail", "slow-rank", "slow-link")
WORDS = {decisions.FIRST: "", decisions.THEN: "then ", decisions.OWN_RATE: "with DDP's rate: "}
WORDS[decisions.SAME_LOSS] = "with DDP's loss curve: "
EXAMPLES = re.compile(r"(<!-- what examples/\*.py say at their beginning -->\n)(?:.+\n)*")

# A result, with a choice of its strategies: "docs/results/x.json of popsgd,wagma:overlap=true".
RESULT = r"in (\S+(?: of \S+)?) -->\n)(?:.+\n)*"
TIMES = re.compile(rf"(<!-- seconds to (99|100)% {RESULT}")
AT_BASELINES_LR = re.compile(rf"(<!-- seconds to (99|100)% with the baseline's rate {RESULT}")
ENDS = re.compile(rf"(<!-- seconds to the end {RESULT}")
QUALITIES = re.compile(rf"(<!-- quality and speed {RESULT}")
IN_FORCE = re.compile(r"(<!-- what was in force in (\S+) -->\n)(?:.+\n)*")
PAPERS = re.compile(r"(<!-- what papers state and ours in (\S+) of (\S+) -->\n)(?:.+\n)*")
OTHER_SEEDS = re.compile(rf"(<!-- the soonest row by other seeds {RESULT}")
SOONEST = re.compile(
    r"(<!-- soonest (\w+) to (99|100)% in docs/results/choosing/ of (.+) -->\n)(?:.+\n)*"
)

# The head of any table below a comment that names results.
HEAD = re.compile(r"(<!-- (?!what \w+ in force)[^>\n]*results/[^>\n]* -->\n\| ?)([^|\n]*)")
LABEL = re.compile(r"(?:^|\. )Stale: .*")
FILES = re.compile(r"results/([\w./]+\.json)")
LINK = re.compile(r"(\[[^\]]*\]\((?:\.\./)*(?:docs/)?results/([\w./]+\.json)\))((?: \(stale\))?)")


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


def used(choice: Choice | None, pages: str = "") -> str:
    """A choice with its settings, and links."""
    if choice is None:
        return ""
    if choice.strategy == decisions.DDP:
        return "Lightning's `ddp`"
    name, given = decisions.options(choice.strategy, choice.data)
    section = ALL_ALGORITHMS[name].__module__.rpartition(".")[2]
    settings = [f"`{key}={as_code(value)}`" for key, value in given.items()]
    if choice.data == CLAIMED:
        settings[-1] = f"[{settings[-1]}]({pages}claimed_batches.md)"
    *others, last = settings or [""]
    joined = f"{', '.join(others)} and {last}" if others else last
    page = f"{section}.md" if name in BY_UNITS else f"strategies.md#{section}"
    text = f"[`{name}`]({pages}{page})" + (f" with {joined}" if joined else "")
    return text + (f" ({choice.least_ranks} ranks or more)" if choice.least_ranks > 2 else "")


def decisions_in_short(pages: str) -> str:
    """One row for each answer: situations with the same one are in the same row.

    What a situation chooses for SGD was measured with its best learning rate; a choice that was not
    gives way to the one that keeps DDP's, if there is one.
    """
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in IN_SHORT:
        here = decisions.SITUATIONS[name]
        cases = (decisions.SAME_LOSS, decisions.FIRST, decisions.OWN_RATE)
        found = (here.choice(case) for case in cases)
        stay = Choice(decisions.FIRST, decisions.DDP, "Nothing here sums gradients in less.")
        with_adam = next((each for each in found if each and each.name in WITH_ADAM), stay)
        with_sgd = here.first if here.first.source else here.choice(decisions.OWN_RATE)
        if with_sgd is None and here.first.strategy not in decisions.NOT_COMPARED:
            with_sgd = here.first
        cells = (used(with_adam, pages), used(with_sgd, pages))
        rows.setdefault(cells, []).append(here.short)
    lines = [
        "| your situation | with Adam, or to keep DDP's loss | with SGD, and another loss curve |",
        "|---|---|---|",
    ]
    for cells, situations in rows.items():
        lines.append(f"| {', '.join(situations)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def all_decisions() -> str:
    """One row for each choice: why, what it gained where it was measured, and what it costs."""
    groups: dict[tuple[Choice, ...], list[Situation]] = {}
    for here in decisions.SITUATIONS.values():
        groups.setdefault(here.choices, []).append(here)
    heads = ["your situation", "use", "why", "times", "costs", "with AdamW"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for choices, situations in groups.items():
        text = "; ".join(map(linked, situations))
        for choice in choices:
            cells = [text, WORDS[choice.case] + used(choice), choice.why]
            cells += [*gain_and_cost(choice, situations), with_adamw(choice, situations)]
            lines.append(f"| {' | '.join(cells)} |")
            text = ""
    return "\n".join(lines)


def linked(situation: Situation) -> str:
    """What describes a situation, with a link to its page, if it has one."""
    page = situation.page.removeprefix("choosing.md")
    return f"[{situation.text}]({page})" if page else situation.text


def gain_and_cost(choice: Choice, situations: list[Situation]) -> tuple[str, str]:
    """When training ends and 99% is there, over fp32 all-reduce's; memory and accuracy."""
    if choice.strategy in decisions.NOT_COMPARED:
        return "", ""
    is_claimed = choice.data == CLAIMED
    copies = make_algorithm(choice.strategy).num_copies(8, is_claimed=is_claimed)
    held = rf"{copies:g} \|x\|" if copies else "no memory"
    if not choice.source:
        return "", held
    times, points = [], []
    for situation in situations:
        row = measured_row(choice, situation)
        found = row["at_baseline_lr"] if choice.case == decisions.OWN_RATE else row
        at_99 = found["to_target"]["0.99"]
        end = f"{row['end']['share']:.2f}, " if "end" in row else ""
        few = f" ({at_99['reached']} of {row['seeds']})" if at_99["reached"] < row["seeds"] else ""
        few += ", stale" if label([choice.source]) else ""
        times.append(f"{end}{at_99['share']:.2f}{few}")
        points.append(f"{round(100 * found['difference'], 1) + 0:+.1f}")
    return "; ".join(times), f"{held}, {'; '.join(points)} points"


def with_adamw(choice: Choice, situations: list[Situation]) -> str:
    """The final loss with scaled steps, beside all-reduce's, and how soon all-reduce's is there."""
    if choice.strategy in WITH_ADAM:
        return "DDP's loss"
    spec, parts = f"{choice.strategy}:scale_steps=true", []
    for task, files in ADAMW:
        by_place = {
            (row["situation"], row["strategy"]): row
            for file in files
            for row in json.loads((ROOT / "docs/results" / file).read_text())["summary"]
        }
        for place in (situation.measured for situation in situations):
            row = by_place.get((place, f"{spec}, {choice.data}"), by_place.get((place, spec)))
            if row:
                found = row["at_baseline_lr"] if choice.case == decisions.OWN_RATE else row
                base = by_place[place, target_rows.BASELINE]["value"]
                ours = base + found["difference"]
                is_soon = soon(found["to_target"]["1"], row["seeds"])
                parts.append(f"{task} {ours:.3f} (DDP's {base:.3f}), {is_soon}")
    return "; ".join(parts)


def soon(at: dict[str, Any], num_seeds: int) -> str:
    """How many seeds have all of the baseline's quality, and how soon if most have it.

    A seed without it counts as the time limit, so a mean of few that have it would tell nothing.
    """
    if not at["reached"]:
        return "never"
    seeds = f"{at['reached']} of {num_seeds} seeds"
    return f"{at['share']:.2f} ({seeds})" if 2 * at["reached"] > num_seeds else seeds


def gains(pages: str) -> str:
    """When training ends and shares of the quality are there with the first choices."""
    lines = [
        "| your situation | strategy | training ends | 99% is there | all of it | final accuracy |",
        "|---|---|---|---|---|---|",
    ]
    for name in GAINED:
        situation = decisions.SITUATIONS[name]
        first = situation.first
        result = json.loads((ROOT / "docs/results" / first.source).read_text())
        place = (situation.measured, first.label)
        row = next(r for r in result["summary"] if (r["situation"], r["strategy"]) == place)
        cells = [situation.short, used(first, pages), f"{row['end']['share']:.2f}"]
        for share in ("0.99", "1"):
            at = row["to_target"][share]
            is_all = at["reached"] == row["seeds"]
            some = "" if is_all else f", {at['reached']} of {row['seeds']} seeds"
            cells.append(f"{at['share']:.2f}{some}")
        cells.append(f"{round(100 * row['difference'], 1) + 0:+.1f} points")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def measured_row(choice: Choice, situation: Situation) -> dict[str, Any]:
    """The row of the result that backs a choice, relative to all-reduce in fp32."""
    result = json.loads((ROOT / "docs/results" / choice.source).read_text())
    rows = result["summary"]
    if result["settings"].get("baseline", target_rows.BASELINE) != target_rows.BASELINE:
        better = result["higher_is_better"]
        rows = target_rows.summarize(result["curves"], higher_is_better=better)
    place = (situation.measured, choice.label)
    return next(row for row in rows if (row["situation"], row["strategy"]) == place)


def targets(of: str) -> dict[str, Any]:
    """A result of `python -m benchmarks target`, with the rows of the baseline and of those chosen.

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


def papers(file: str, names: str) -> str:
    """Figures of papers beside ours: ratios or rates, or points of accuracy with their error."""
    lines = ["| figure | what | paper | ours | ours/paper |", "|---|---|---|---|---|"]
    figures = json.loads((ROOT / file).read_text())["figures"]
    for name in names.split(","):
        for row in figures[name]["comparisons"]:
            number = "+.1f" if "error" in row else ".3g"
            stated = row["paper"] if isinstance(row["paper"], str) else f"{row['paper']:{number}}"
            ours = f"{row['ours']:{number}}" + (
                f" ± {row['error']:.1f}" if row.get("error") else ""
            )
            ratio = f"{row['ours/paper']:.2f}" if "ours/paper" in row else ""
            ratio += ", fitted" if row.get("fitted") else ""
            lines.append(f"| `{name}` | {row['what']} | {stated} | {ours} | {ratio} |")
    return "\n".join(lines)


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


def label(files: list[str]) -> str:
    """Says what these results lack, as in "Stale: no commit"; empty if nothing."""
    missing = [each for file in files for each in lacking(file)]
    return "Stale: " + ", ".join(dict.fromkeys(missing)) if missing else ""


@cache
def lacking(file: str) -> list[str]:
    """What a result of docs/results lacks."""
    return lacks(json.loads((ROOT / "docs/results" / file).read_text()))


def labelled(found: re.Match[str]) -> str:
    """The head of a table, with the label of the results that the comment above it names."""
    comment, cell = found[1], LABEL.sub("", found[2].rstrip())
    files = FILES.findall(comment)
    if names := re.search(r"docs/results/choosing/ of (.+) -->", comment):
        tasks = (task.partition(": ")[2] for task in names[1].split("; "))
        files = [f"choosing/{name}.json" for task in tasks for name in task.split()]
    parts = [part for part in (cell, label(files)) if part]
    return comment.rstrip() + " " + ". ".join(parts) + " " * bool(parts)


def linked_results(text: str) -> str:
    """The document, with "(stale)" behind links to results that no table of it shows."""
    shown = {file for head in HEAD.finditer(text) for file in FILES.findall(head[1])}

    def marked(found: re.Match[str]) -> str:
        return found[1] + (" (stale)" if found[2] not in shown and label([found[2]]) else "")

    return LINK.sub(marked, text)


def renewed(text: str) -> str:
    """The document with its tables as they should be; each is found by the comment before it."""
    text = TABLE.sub(lambda found: f"{found[1]}{markdown(found[2], COSTS)}\n", text)
    text = DECISIONS.sub(lambda found: f"{found[1]}{all_decisions()}\n", text)
    text = DECISIONS_IN_SHORT.sub(lambda found: f"{found[1]}{decisions_in_short(found[2])}\n", text)
    text = GAINS.sub(lambda found: f"{found[1]}{gains(found[2])}\n", text)
    text = RECIPES.sub(lambda found: f"{found[1]}{recipes(found[2])}\n", text)
    text = TIMES.sub(lambda found: f"{found[1]}{times(found[2], found[3])}\n", text)
    text = AT_BASELINES_LR.sub(
        lambda found: f"{found[1]}{at_baselines_lr(found[2], found[3])}\n", text
    )
    text = ENDS.sub(lambda found: f"{found[1]}{ends(found[2])}\n", text)
    text = IN_FORCE.sub(lambda found: f"{found[1]}{in_force(found[2])}\n", text)
    text = QUALITIES.sub(lambda found: f"{found[1]}{qualities(found[2])}\n", text)
    text = PAPERS.sub(lambda found: f"{found[1]}{papers(found[2], found[3])}\n", text)
    text = OTHER_SEEDS.sub(lambda found: f"{found[1]}{by_other_seeds(found[2])}\n", text)
    text = SOONEST.sub(lambda found: f"{found[1]}{soonest(*found.groups()[1:])}\n", text)
    text = EXAMPLES.sub(lambda found: f"{found[1]}{examples()}\n", text)
    return with_labels(text)


def by_other_seeds(file: str) -> str:
    """What the soonest row takes where it was chosen on the seeds that score it, and on others."""
    result = json.loads((ROOT / file).read_text())
    situations = dict.fromkeys(cell["situation"] for cell in result["curves"])
    lines = [
        "| | 99%: the same seeds | other seeds | all of it: the same seeds | other seeds |",
        "|---|---|---|---|---|",
    ]
    for situation in situations:
        cells = [cell for cell in result["curves"] if cell["situation"] == situation]
        found = [f"{each:.2f}" for share in (0.99, 1.0) for each in soonest_shares(cells, share)]
        lines.append(f"| {situation} | {' | '.join(found)} |")
    return "\n".join(lines)


def soonest_shares(cells: list[dict[str, Any]], share: float) -> tuple[float, float]:
    """The soonest row's share, chosen on all seeds; chosen on each half, scored on the other."""
    ratios: dict[str, dict[int, float]] = {}
    bases = {c["seed"]: c for c in cells if target_rows.label(c) == target_rows.BASELINE}
    for cell in cells:
        if (name := target_rows.label(cell)) != target_rows.BASELINE:
            base = bases[cell["seed"]]
            of_base, mine = (seconds_to(each, share * base["value"][-1]) for each in (base, cell))
            limit = max(base["seconds"][-1], cell["seconds"][-1])
            ratios.setdefault(name, {})[cell["seed"]] = min(mine, limit) / of_base

    def mean(name: str, seeds: set[int]) -> float:
        return geometric_mean(ratios[name][seed] for seed in seeds)

    def first(seeds: set[int]) -> str:
        return min(ratios, key=lambda name: mean(name, seeds))

    every = {*bases}
    halves = [{*half} for half in combinations(sorted(every), len(every) // 2)]
    scores = [mean(first(half), every - half) for half in halves]
    return mean(first(every), every), geometric_mean(scores)


def seconds_to(cell: dict[str, Any], target: float) -> float:
    """When a training has so good a value; infinite if never."""
    place = target_rows.reached(cell, target, higher_is_better=True)
    return inf if place is None else float(cell["seconds"][place])


def with_labels(text: str) -> str:
    """The document, where what lacks its commit or hyperparameters is called stale."""
    return linked_results(HEAD.sub(labelled, text))


def main() -> None:
    """All documents."""
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")):
        text = page.read_text()
        new = renewed(text)
        if new != text:
            page.write_text(new)


if __name__ == "__main__":
    main()
