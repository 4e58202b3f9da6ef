"""Writes what editors and type checkers see of the strategies that are made from algorithms.

    python -S docs/stub.py

The build runs it, where neither torch nor Lightning is installed: `stand_ins` take their places, as
no stub depends on what these do.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_dsgd.algorithm import Algorithm

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_dsgd"

NAMED = """# Made by docs/stub.py from the algorithms' dataclasses.
from collections.abc import Mapping
from inspect import Parameter
from typing import Any, Final

from lightning_dsgd.algorithm import Algorithm
from lightning_dsgd.trainer.strategy import DecentralizedStrategy

__all__: list[str] = {names}

def named(algorithm: type[Algorithm], base: type, module: str) -> type: ...
def options(base: type) -> list[Parameter]: ...
def make_all(base: type, module: str) -> dict[str, type]: ...
def make_known(package: str, strategies: Mapping[str, type], base: type) -> None: ...
def class_of(name: str, package: str = "lightning.pytorch") -> type | None: ...

STRATEGIES: Final[dict[str, type[DecentralizedStrategy]]]

"""
TWIN = """# Made by docs/stub.py from the algorithms' dataclasses.
from typing import Any, Final

from lightning_dsgd.trainer.strategy import DecentralizedMixin
from pytorch_lightning.strategies import DDPStrategy

__all__: list[str] = {names}

STRATEGIES: Final[dict[str, type]]

class DecentralizedStrategy(DecentralizedMixin, DDPStrategy): ...

"""


def argument(parameter: Parameter) -> str:
    """As it stands in a signature."""
    kind = parameter.annotation
    text = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    text = str(kind) if "|" in str(kind) else text
    default = f'"{parameter.default}"' if isinstance(parameter.default, str) else parameter.default
    return f"{parameter.name}: {text} = {default}"


def stub_class(algorithm: type[Algorithm]) -> str:
    """The strategy of one algorithm, with the arguments of both."""
    from lightning_dsgd import hyperparameters, keywords
    from lightning_dsgd.trainer.arguments import TrainerOptions
    from lightning_dsgd.trainer.named import STRATEGIES

    strategy = STRATEGIES[algorithm.name]
    parameters = inspect.signature(strategy.__init__).parameters
    own = [argument(parameters[name]) for name in hyperparameters.names(algorithm)]
    every = [argument(parameters[name]) for name in keywords.names(TrainerOptions)]
    arguments = ["self", *own, "*", *every, "**kwargs: Any"]
    doc = inspect.cleandoc(strategy.__doc__ or "")
    body = f'"""{doc}\n"""\n\ndef __init__(\n'
    body += "".join(f"    {each},\n" for each in arguments) + ") -> None: ..."
    indented = textwrap.indent(body, "    ", lambda line: bool(line.strip()))
    return f"class {strategy.__name__}(DecentralizedStrategy):\n{indented}\n"


def stubs() -> dict[Path, str]:
    """What each file is to hold; those of the algorithms of other packages are left out."""
    from lightning_dsgd.algorithms import ALGORITHMS

    ours = [a for a in ALGORITHMS.values() if a.__module__.startswith("lightning_dsgd.")]
    classes = "\n".join(map(stub_class, ours))
    names = [f"{algorithm.__name__}Strategy" for algorithm in ours]
    return {
        PACKAGE / "trainer" / "named.pyi": NAMED.replace("{names}", listed("STRATEGIES", *names))
        + classes,
        PACKAGE / "pytorch_lightning.pyi": TWIN.replace(
            "{names}", listed("DecentralizedStrategy", *names)
        )
        + classes,
    }


def listed(*names: str) -> str:
    """For `__all__`."""
    return "[\n" + "".join(f'    "{name}",\n' for name in names) + "]"


def main() -> None:
    """Writes both files, and prints their paths within the project."""
    sys.path.insert(0, str(ROOT))
    import stand_ins

    stand_ins.install()
    for path, text in stubs().items():
        path.write_text(text)
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
