"""Shows the site's reader what classes add to their source: `keywords.lists`, and algorithms."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

import griffe

from lightning_dsgd.algorithm import Algorithm


class Listed(griffe.Extension):
    """Reads signature and docstring from the class itself, as its source does not hold them."""

    def on_class(  # noqa: D102
        self, *, cls: griffe.Class, **kwargs: Any
    ) -> None:
        lists = any("keywords.lists" in str(each.value) for each in cls.decorators)
        if not lists and not cls.path.startswith("lightning_dsgd.algorithms."):
            return
        face = getattr(import_module(cls.parent.path), cls.name, None)
        if not lists and not (isinstance(face, type) and issubclass(face, Algorithm)):
            return
        cls.docstring = griffe.Docstring(inspect.getdoc(face), parent=cls, parser="google")
        written = [
            _parameter(each) for each in inspect.signature(face, eval_str=True).parameters.values()
        ]
        own = griffe.Parameter("self", kind=griffe.ParameterKind.positional_only)
        cls.set_member(
            "__init__", griffe.Function("__init__", parameters=griffe.Parameters(own, *written))
        )


def _parameter(of_face: inspect.Parameter) -> griffe.Parameter:
    """Returns a parameter for the site, with short names of types."""
    annotation = re.sub(r"\w+\.", "", inspect.formatannotation(of_face.annotation))
    default = None if of_face.default is of_face.empty else repr(of_face.default)
    kind = griffe.ParameterKind(of_face.kind.description)
    return griffe.Parameter(of_face.name, annotation=annotation, kind=kind, default=default)
