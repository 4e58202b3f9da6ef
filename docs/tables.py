"""Writes the table of strategies into the documents that have it.

python docs/tables.py
"""

from __future__ import annotations

import re
from pathlib import Path

from lightning_dsgd.catalogue import markdown

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"(<!-- lightning-dsgd strategies --markdown (\S+) -->\n)(?:.+\n)*")


def main() -> None:
    """Finds each by the comment before it."""
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        new = TABLE.sub(lambda found: f"{found[1]}{markdown(found[2])}\n", text)
        if new != text:
            page.write_text(new)


if __name__ == "__main__":
    main()
