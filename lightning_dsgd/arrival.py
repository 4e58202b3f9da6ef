"""Imports a module right after a package has been imported, whoever imports the package.

`import lightning_dsgd` loads neither of Lightning's packages: each takes seconds.  The strategies'
names are registered right after a script, or another library, has imported one of them.

A script need not import this package.  torch imports what is installed under the entry point
"torch.backends", and so this package, whose hooks below then wait for Lightning:
`PL_TRAINER_STRATEGY=balanced python train.py`.  Where Lightning is what imports torch, it is in
`sys.modules` then, but not ready to be imported from: the hook waits for its last module.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

_LAST: Final = "_graveyard"
"""What each of Lightning's packages imports last: "this import needs to go last"."""


def when_imported(package: str, module: str) -> None:
    """Imports `module` once `package` has been imported: now, if it has been already."""
    if package not in sys.modules:
        sys.meta_path.insert(0, _Watch(package, module))
    elif _is_being_imported(package):
        sys.meta_path.insert(0, _Watch(f"{package}.{_LAST}", module))
    else:
        importlib.import_module(module)


def be_installed() -> None:
    """Does nothing: torch has imported the package to find this entry point, which is enough."""


def _is_being_imported(package: str) -> bool:
    spec = sys.modules[package].__spec__
    return bool(getattr(spec, "_initializing", False))


class _Watch(MetaPathFinder):
    """A finder that waits in `sys.meta_path` until its package is looked for, then leaves."""

    def __init__(self, package: str, module: str) -> None:
        self._package = package
        self._module = module

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self._package:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenImport(spec.loader, self._module)
        return spec


class _ThenImport(Loader):
    """A loader that loads a package as another loader does, and then imports our module."""

    def __init__(self, loader: Loader, module: str) -> None:
        self._loader = loader
        self._module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        importlib.import_module(self._module)
