"""What the site takes from elsewhere: the changelog, which stands at the root of a clone."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds CHANGELOG.md, whose links are relative to the root."""
    text = Path(config.docs_dir, "..", "CHANGELOG.md").read_text()
    page = File.generated(config, "changelog.md", content=text.replace("](docs/", "]("))
    files.append(page)
    return files
