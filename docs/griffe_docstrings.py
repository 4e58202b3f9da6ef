"""For the API reference, which is made without importing: `__doc__ = Base.__doc__` is followed."""

from __future__ import annotations

from typing import Any

import griffe


class InheritedDocstrings(griffe.Extension):
    """Gives a class the docstring of the base that it names."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called when everything is loaded."""
        module = pkg["strategy"]
        for cls in module.classes.values():
            if "__doc__" in cls.members:
                base = str(cls.members["__doc__"].value).removesuffix(".__doc__")
                cls.docstring = module[base].docstring
                cls.del_member("__doc__")
