"""Writes the tables of strategies, recipes, examples, features and results into the documents.

And what `lightning-dsgd advise` knows of accuracy, which comes from a result too, into the package.

python docs/tables.py
"""

from __future__ import annotations

import ast
import json
import re
import runpy
from pathlib import Path

from lightning_dsgd.advise import accuracy
from lightning_dsgd.bench import target
from lightning_dsgd.catalogue import BRIEF, markdown
from lightning_dsgd.results import text

ROOT = Path(__file__).parents[1]
TARGETS = [f"docs/results/choosing/target_{name}.json" for name in ("digits", "slow_link")]
TABLE = re.compile(r"(<!-- lightning-dsgd strategies --markdown (\S+) -->\n)(?:.+\n)*")
RECIPES = re.compile(r"(<!-- what (\S+)/\*.yaml say at their beginning -->\n)(?:.+\n)*")
SHORT = re.compile(r"(<!-- the strategies in short, with pages in (\S+) -->\n)(?:.+\n)*")
EXAMPLES = re.compile(r"(<!-- what examples/\*.py say at their beginning -->\n)(?:.+\n)*")
FEATURES = re.compile(r"(<!-- what tests/trainer/works_with.py lists -->\n)(?:.+\n)*")

TIMES = re.compile(r"(<!-- seconds to (99|100)% in (\S+) -->\n)(?:.+\n)*")
QUALITIES = re.compile(r"(<!-- quality and speed in (\S+) -->\n)(?:.+\n)*")


def recipes(folder: str) -> str:
    """Each with the first sentences of its comment."""
    lines = ["| recipe | what |", "|---|---|"]
    for path in sorted(ROOT.glob(f"{folder}/*.yaml")):
        said = path.read_text().partition("\n#\n")[0].replace("\n#", "").removeprefix("#").split()
        lines.append(f"| `{path.relative_to(ROOT)}` | {' '.join(said)} |")
    return "\n".join(lines)


def examples() -> str:
    """Each with the first line of its docstring; the demo has a page of its own."""
    lines = ["| example | what |", "|---|---|"]
    for path in sorted(ROOT.glob("examples/*.py")):
        if path.stem != "demo":
            said = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
            lines.append(f"| [{path.stem}](../examples/{path.name}) | {said} |")
    return "\n".join(lines)


def features() -> str:
    """Each with what holds of it, and the test that shows it."""
    return str(runpy.run_path(str(ROOT / "tests" / "trainer" / "works_with.py"))["markdown"]())


def times(percent: str, file: str) -> str:
    """Of a result of `lightning-dsgd bench target`."""
    return target.time_table(json.loads((ROOT / file).read_text()), f"{int(percent) / 100:g}")


def qualities(file: str) -> str:
    """Of a result of `lightning-dsgd bench target`."""
    return target.quality_table(json.loads((ROOT / file).read_text()))


def renewed(text: str) -> str:
    """The document with its tables as they should be; each is found by the comment before it."""
    text = TABLE.sub(lambda found: f"{found[1]}{markdown(found[2])}\n", text)
    text = SHORT.sub(lambda found: f"{found[1]}{markdown(found[2], BRIEF)}\n", text)
    text = RECIPES.sub(lambda found: f"{found[1]}{recipes(found[2])}\n", text)
    text = FEATURES.sub(lambda found: f"{found[1]}{features()}\n", text)
    text = TIMES.sub(lambda found: f"{found[1]}{times(found[2], found[3])}\n", text)
    text = QUALITIES.sub(lambda found: f"{found[1]}{qualities(found[2])}\n", text)
    return EXAMPLES.sub(lambda found: f"{found[1]}{examples()}\n", text)


def known_accuracy() -> str:
    """What the package holds of the results; of a strategy in two of them, the first."""
    results = [json.loads((ROOT / file).read_text()) for file in TARGETS]
    return text(accuracy.distilled(results)) + "\n"


def main() -> None:
    """All documents."""
    (ROOT / "lightning_dsgd" / "advise" / accuracy.FILE).write_text(known_accuracy())
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        new = renewed(text)
        if new != text:
            page.write_text(new)


if __name__ == "__main__":
    main()
