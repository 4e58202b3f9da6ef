"""What the site takes from elsewhere: the changelog, the examples, and the list of algorithms."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

from lightning_dsgd import hyperparameters, wings
from lightning_dsgd.algorithms import ALGORITHMS

OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+(benchmarks/[^)\s]+)\)")
"""A link from a page of the site to the research tree, which the site does not have."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lists the strategies' pages in the order of the registry, and links to the repository."""
    project = tomllib.loads(Path(config.docs_dir).parent.joinpath("pyproject.toml").read_text())
    address = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    if address:  # as a link, not as `repo_url`, with which pages ask GitHub for the number of stars
        config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": address}]
    for section in config.nav or ():
        if "Strategies" in section:
            section["Strategies"] = strategies()
    return config


def strategies() -> list[dict[str, str]]:
    """A page for each module of algorithms: one may hold several, as a family."""
    named: dict[str, list[str]] = {}
    for algorithm in ALGORITHMS.values():
        named.setdefault(algorithm.__module__.rpartition(".")[2], []).append(algorithm.name)
    named |= {name: [name] for name in wings.ALGORITHMS}
    return [
        {first + (" and others" if others else ""): f"algorithms/{module}.md"}
        for module, (first, *others) in named.items()
    ]


def page_of(algorithm: Any) -> str:
    """For an algorithm that has no page of its own: what its file says."""
    text = inspect.getdoc(inspect.getmodule(algorithm)) or ""
    arguments = hyperparameters.arguments(algorithm)
    what = inspect.getdoc(algorithm) or ""
    return f"# {algorithm.name}\n\n{what}\n\n```text\n{text}\n\nArgs:\n{arguments}\n```\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds CHANGELOG.md, a page for each example, and for each algorithm that has none."""
    root = Path(config.docs_dir).parent
    text = (root / "CHANGELOG.md").read_text()
    page = File.generated(
        config,
        "changelog.md",
        content=text.replace("](docs/", "](").replace("](benchmarks/", "](../benchmarks/"),
    )
    files.append(page)
    for algorithm in ALGORITHMS.values():
        uri = f"algorithms/{algorithm.__module__.rpartition('.')[2]}.md"
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, content=page_of(algorithm)))
    for path in sorted(root.glob("examples/*.py")):
        text = f"# {path.name}\n\n```python\n{path.read_text()}```\n"
        page = File.generated(
            config, f"examples/{path.stem}.md", content=text, inclusion=InclusionLevel.NOT_IN_NAV
        )
        files.append(page)
    return files


def on_page_markdown(markdown: str, config: MkDocsConfig, **_: Any) -> str:
    """Leads to an example's page, and to the repository for what the site does not have."""
    markdown = re.sub(r"\]\(\.\./examples/(\w+)\.py\)", r"](examples/\1.md)", markdown)
    social = config.extra.get("social")
    if not social:
        return OUTSIDE.sub(r"\1", markdown)
    return OUTSIDE.sub(rf"[\1]({social[0]['link']}/blob/main/\2)", markdown)
