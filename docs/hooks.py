"""What the site takes from elsewhere: changelog, examples, contracts and docstrings."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from lightning_dsgd.algorithms import ALGORITHMS, BY_UNITS

MODULE = re.compile(r"\]\(((?:\.\./)+)(lightning_dsgd/[\w/]+)\.py\)")
"""A link from a page to a module: on the site to its contract, on the page `contracts.md`."""
CONTRACT = "::: {}\n    options: {{members: {}, heading_level: 2, show_root_full_path: true}}\n"
MEMBERS = {"lightning_dsgd.session.phases": "[FOLLOWING]"}
"""What a contract's module shows besides its docstring."""
OPTIONS = "\n## Algorithms and their options\n"
"""Where the page of the API lists the algorithms."""
BARE = "options: {members: false, inherited_members: false}"
OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+((?:benchmarks/|[A-Z]+\b)[^)\s]*)\)")
"""A link to what the site does not have: the research tree, and files at the repository's root."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Links to the repository, once its address is known."""
    project = tomllib.loads(Path(config.docs_dir).parent.joinpath("pyproject.toml").read_text())
    address = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    if address:  # as a link, not as `repo_url`, with which pages ask GitHub for the number of stars
        config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": address}]
    return config


def sections(page: str) -> str:
    """For the algorithms that have no section on the page of strategies: what their files say."""
    text = ""
    for algorithm in ALGORITHMS.values():
        section = algorithm.__module__.rpartition(".")[2]
        if f"\n## {section}\n" not in page + text:
            module = inspect.getdoc(inspect.getmodule(algorithm)) or ""
            what = inspect.getdoc(algorithm) or ""
            text += f"\n## {section}\n\n```text\n{what}\n\n{module}\n```\n"
    return text


def options() -> str:
    """The directives that show the options of each algorithm of this package."""
    paths = [f"{a.__module__}.{a.__name__}" for a in (BY_UNITS | ALGORITHMS).values()]
    ours = [path for path in paths if path.startswith("lightning_dsgd.")]
    return "".join(f"\n::: {path}\n    {BARE}\n" for path in ours)


def module_of(path: str) -> str:
    """The name of a module, from its path without ".py"."""
    return path.removesuffix("/__init__").replace("/", ".")


def contracts(text: str) -> str:
    """The docstrings of the modules that the page "How it works" links to, in its order."""
    modules = dict.fromkeys(module_of(found[2]) for found in MODULE.finditer(text))
    directives = (CONTRACT.format(each, MEMBERS.get(each, "false")) for each in modules)
    return "# The contracts\n\nThe docstrings of the modules.\n\n" + "\n".join(directives)


def from_docs(text: str) -> str:
    """A page of the repository's root, with links as from the folder of the documents."""
    text = re.sub(r"\]\((?!\w+:|#)", "](../", text)
    return text.replace("](../docs/", "](").replace("](../CHANGELOG.md", "](changelog.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds README.md, CHANGELOG.md, the contracts, and a page for each example."""
    root = Path(config.docs_dir).parent
    for name, uri in (("README.md", "index.md"), ("CHANGELOG.md", "changelog.md")):
        text = from_docs((root / name).read_text())
        files.append(File.generated(config, uri, content=text))
    text = Path(config.docs_dir, "internals.md").read_text()
    files.append(File.generated(config, "contracts.md", content=contracts(text)))
    for path in sorted(root.glob("examples/*.py")):
        text = f"# {path.name}\n\n```python\n{path.read_text()}```\n"
        page = File.generated(
            config, f"examples/{path.stem}.md", content=text, inclusion=InclusionLevel.NOT_IN_NAV
        )
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Leads to contracts and examples, and to the repository for what the site does not have."""
    if page.file.src_uri == "strategies.md":
        markdown += sections(markdown)
    if page.file.src_uri == "api.md":
        markdown = markdown.replace(OPTIONS, OPTIONS + options())
    markdown = MODULE.sub(
        lambda found: f"]({found[1][3:]}contracts.md#{module_of(found[2])})", markdown
    )
    markdown = re.sub(r"\]\(\.\./examples/(\w+)\.py\)", r"](examples/\1.md)", markdown)
    social = config.extra.get("social")
    if not social:
        return OUTSIDE.sub(r"\1", markdown)
    return OUTSIDE.sub(rf"[\1]({social[0]['link']}/blob/main/\2)", markdown)
