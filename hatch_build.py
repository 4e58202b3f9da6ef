"""What the build adds: recipes, examples, and whole links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

CARRIED = ("recipes/**/*.yaml", "examples/*.py", "examples/*.ipynb", "examples/own/*.*")
"""What a wheel carries inside the package, for `lightning-dsgd recipes`."""
IMAGE = re.compile(r"!\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")


class Contents(BuildHookInterface):  # type: ignore[type-arg]
    """Adds recipes and examples to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Has the wheel carry recipes and examples."""
        if version == "standard":  # an editable installation finds them in the repository
            for pattern in CARRIED:
                for file in sorted(Path(self.root).glob(pattern)):
                    name = file.relative_to(self.root).as_posix()
                    build_data["force_include"][str(file)] = f"lightning_dsgd/{name}"


class Links(MetadataHookInterface):
    """The index's page, and its links to the repository, whose address stands in pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Adds README.md and the addresses."""
        address, version = self.config["repository"], metadata["version"]
        branch = "main" if "dev" in version else f"v{version}"
        text = on_the_index(Path(self.root, "README.md").read_text("utf-8"), address, branch)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if address:
            metadata["urls"] = {
                "Repository": address,
                "Changelog": f"{address}/blob/{branch}/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }


def on_the_index(text: str, address: str, branch: str) -> str:
    """Returns a page whose links lead into the repository; without an address it has none."""
    if not address:
        return LINK.sub(r"\1", IMAGE.sub(r"\1", text))
    text = IMAGE.sub(rf"![\1]({address}/raw/{branch}/\2)", text)
    return LINK.sub(rf"[\1]({address}/blob/{branch}/\2)", text)
