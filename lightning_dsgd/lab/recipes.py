"""The command `recipes`: which recipes and examples there are, and a copy of one to work with.

    lightning-dsgd recipes                     # the list
    lightning-dsgd recipes digits_wagma        # writes recipes/digits_wagma.yaml
    lightning-dsgd recipes digits_wagma --print
    lightning-dsgd recipes own                 # writes the folder examples/own

What the copy says at its beginning then works as it stands:
`lightning-dsgd fit --config recipes/digits_wagma.yaml`.
"""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from lightning_dsgd.lab.options import Parser

PACKAGE: Final = Path(__file__).parents[1]
WIDTH: Final = 100
HEADS: Final = {
    "recipes": "Small recipes, for one machine",
    "recipes/sweeps": "Sweeps, for W&B's agents",
    "examples": "Examples",
}
"""The folders, and what they hold."""
OWN: Final = "examples/own"
"""A folder that is copied whole, and the name of what it holds."""


def files(folder: str, *suffixes: str) -> list[Path]:
    """Returns the files of a folder, of this installation or of the repository that it runs in."""
    root = PACKAGE if (PACKAGE / "recipes").is_dir() else PACKAGE.parent
    return sorted(
        path for path in (root / folder).glob("*.*") if path.suffix in suffixes and path.is_file()
    )


def said(path: Path) -> str:
    """Returns what a file says of itself at its beginning."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    if path.suffix == ".ipynb":
        first = "".join(json.loads(text)["cells"][0]["source"])
        return first.partition("\n")[0].strip("# ")
    return " ".join(text.partition("\n#\n")[0].replace("\n#", "").removeprefix("#").split())


def named() -> dict[str, list[Path]]:
    """Returns the files by the name to ask for; the first says what they are."""
    found = {}
    for folder in HEADS:
        below = folder.partition("/")[2]
        for path in files(folder, ".yaml", ".py", ".ipynb"):
            found[f"{below}/{path.stem}" if below else path.stem] = [path]
    if own := files(OWN, ".yaml", ".yml", ".py", ".sbatch"):
        found["own"] = sorted(own, key=lambda path: path.name != "config.yaml")
    return found


def target(path: Path) -> Path:
    """Returns where a file goes in a working folder."""
    return path.relative_to(next(up for up in path.parents if (up / "recipes").is_dir()))


def table() -> Iterator[str]:
    """Yields the lines of the list."""
    found = named()
    width = max(map(len, found)) + 4
    last = ""
    for name, (path, *_) in found.items():
        folder = str(target(path).parent)
        if folder != last and folder in HEADS:
            yield f"{HEADS[folder]}:" if not last else f"\n{HEADS[folder]}:"
            last = folder
        lines = textwrap.wrap(said(path), WIDTH - width, break_on_hyphens=False)
        yield f"  {name}".ljust(width) + f"\n{' ' * width}".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Prints the list, or copies one."""
    parser = Parser("recipes", __doc__)
    parser.add_argument("names", nargs="*", metavar="name", help="copy these into this folder")
    parser.add_argument("--print", action="store_true", help="print them, and write no file")
    args = parser.parse_args(argv)
    found = named()
    if not found:
        parser.error(f"this installation has no recipes: none are in {PACKAGE}; install it anew")
    for name in args.names:
        if name not in found:
            close = get_close_matches(name, found, n=1)
            advice = f"did you mean {close[0]}?" if close else "`lightning-dsgd recipes` lists them"
            parser.error(f"no recipe or example is called so, got {name!r}; {advice}")
        texts = {target(path): path.read_text(encoding="utf-8") for path in found[name]}
        if args.print:
            print("\n".join(texts.values()))
            continue
        for file, text in texts.items():
            if file.exists() and file.read_text(encoding="utf-8") != text:
                parser.error(f"{file} is another file, and is left as it is; move it away")
        for file, text in texts.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            print(f"written: {file}")
    if not args.names:
        print("\n".join(table()))
        print("\nA copy of one: lightning-dsgd recipes NAME")
