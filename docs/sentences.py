"""Prints the words of each page of the menu, and the sentences that are too long.

python docs/sentences.py [PAGE ...]

A list to work from, and no test: it ends with 0 whatever it finds.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONGEST = 25
SECTION = re.compile(r"^  - ([\w ]+):")
PAGE = re.compile(r"^\s+- .+: ([\w/]+\.md)")


def menu() -> Iterator[tuple[str, Path]]:
    """Each page with its section, as mkdocs.yml lists them."""
    section = ""
    for line in (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].splitlines():
        if found := SECTION.match(line):
            section = found[1]
        elif (found := PAGE.match(line)) and (page := ROOT / "docs" / found[1]).exists():
            yield section, page


def sentences(text: str) -> Iterator[str]:
    """Of prose: without code, headings, tables and the addresses of links."""
    text = re.sub(r"^ *```.*?^ *```$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->|^:::.*(?:\n    .*)*", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("**", "")
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-#|]|\d+\.) ?)", text):
        said = " ".join(paragraph.split())
        if said and not said.startswith(("#", "|")):
            yield from re.split(r"(?<=[.:;!?])\s+(?=[A-Z`*\[(])", said.lstrip("-0123456789. "))


def main() -> None:
    """Of all pages of the menu, or of some files."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("pages", nargs="*", type=Path)
    chosen = [("", page) for page in parser.parse_args().pages] or list(menu())
    words: dict[str, int] = {}
    for section, page in chosen:
        text = page.read_text()
        words[section] = words.get(section, 0) + len(text.split())
        long = [said for said in sentences(text) if len(said.split()) > LONGEST]
        print(f"{len(text.split()):6} words, {len(long):3} long sentences: {page}")
        for said in long:
            print(f"    {len(said.split())}: {said}")
    for section, count in words.items():
        print(f"{count:6} words: {section or 'all'}")


if __name__ == "__main__":
    main()
