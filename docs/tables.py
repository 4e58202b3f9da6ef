"""Writes the tables of strategies and of recipes into the documents that have them.

python docs/tables.py
"""

from __future__ import annotations

import re
from pathlib import Path

from lightning_dsgd.catalogue import markdown

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"(<!-- lightning-dsgd strategies --markdown (\S+) -->\n)(?:.+\n)*")
RECIPES = re.compile(r"(<!-- what (\S+)/\*.yaml say at their beginning -->\n)(?:.+\n)*")


def recipes(folder: str) -> str:
    """Each with the first sentences of its comment."""
    lines = ["| recipe | what |", "|---|---|"]
    for path in sorted(ROOT.glob(f"{folder}/*.yaml")):
        said = path.read_text().partition("\n#\n")[0].replace("\n#", "").removeprefix("#").split()
        lines.append(f"| `{path.relative_to(ROOT)}` | {' '.join(said)} |")
    return "\n".join(lines)


def renewed(text: str) -> str:
    """The document with its tables as they should be; each is found by the comment before it."""
    text = TABLE.sub(lambda found: f"{found[1]}{markdown(found[2])}\n", text)
    return RECIPES.sub(lambda found: f"{found[1]}{recipes(found[2])}\n", text)


def main() -> None:
    """All documents."""
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        new = renewed(text)
        if new != text:
            page.write_text(new)


if __name__ == "__main__":
    main()
