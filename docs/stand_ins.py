"""Lets the package be imported without torch and Lightning, to read the algorithms' dataclasses."""

from __future__ import annotations

import ast
import inspect
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

ABSENT = (
    *("lightning", "lightning_fabric", "lightning_utilities", "mpi4py", "numpy"),
    *("pytorch_lightning", "torch", "torchmetrics", "wandb"),
)
ARGUMENTS = Path(__file__).parents[1] / "lightning_dsgd" / "trainer" / "arguments.py"


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        return _stand_in(name)

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __getitem__ = __or__


class _Anything(metaclass=_Meta):
    """What a module may take for a class, a function, a decorator or a value."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        is_decorator = len(args) == 1 and callable(args[0]) and not kwargs
        return args[0] if is_decorator else super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else self

    def __getattr__(self, name: str) -> Any:
        return _stand_in(name)


def _stand_in(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Meta(name, (_Anything,), {})


class _Module(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        value = _stand_in(name)
        setattr(self, name, value)
        return value


class _StandIns(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_absent = name.partition(".")[0] in ABSENT
        return ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """A stand-in has nothing to run."""


def install() -> None:
    """From now on an import of what is absent gives a stand-in."""
    # The package reads the signatures of Lightning's strategies for what its tables pass on.
    nodes = ast.walk(ast.parse(ARGUMENTS.read_text()))
    names = {ast.unparse(node.target) for node in nodes if isinstance(node, ast.AnnAssign)}
    parameters = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in names]
    _Anything.__init__.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _StandIns())
