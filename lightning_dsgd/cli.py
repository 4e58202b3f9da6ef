"""The console script: Lightning's command line, with this package's strategies registered.

    lightning-dsgd fit --config recipes/digits_local_sgd.yaml --trainer.strategy dpsgd
    lightning-dsgd strategies

`python -m lightning_dsgd` is the same, for launchers that start a module.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Sequence

COMMANDS = {
    "fit": "train a model (Lightning's command line: `lightning-dsgd fit --help`)",
    "validate": "evaluate on the validation data",
    "test": "evaluate on the test data",
    "predict": "run on the prediction data",
    "strategies": "list the names for --trainer.strategy",
    "bench": "measure strategies side by side (`lightning-dsgd bench throughput --help`)",
}
BENCHES = {
    "throughput": "steps per second, with simulated computation, stragglers and links",
    "convergence": "steps, seconds and bytes to a target, over seeds",
    "report": "tables and plots of result files",
}


def main(args: Sequence[str] | None = None) -> None:
    """Runs one command.

    Args:
        args: what follows the program's name; by default that of this process.  Lightning starts
            the other ranks with the arguments of this process: for several ranks, leave it out.
    """
    given = sys.argv[1:] if args is None else list(args)
    # Lightning's parser also takes options before the command: `--config FILE fit`.
    if not given or given[0] in ("-h", "--help") or not given[0].startswith("-"):
        command = _parser().parse_args(given[:1]).command
        if command == "strategies":
            argparse.ArgumentParser(prog="lightning-dsgd strategies").parse_args(given[1:])
            print(list_strategies())
            return
        if command == "bench":
            _run_bench(given[1:])
            return
    _run_lightning(None if args is None else given)


def _run_bench(args: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lightning-dsgd bench",
        epilog="\n".join(f"  {name:12}{text}" for name, text in BENCHES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=BENCHES, metavar="what", help="one of those below")
    what = parser.parse_args(args[:1] or ["--help"]).what
    # Lazily: a strategy name, or a help text, needs none of it.
    importlib.import_module(f"lightning_dsgd.bench.{what}").main(args[1:])


def list_strategies() -> str:
    """One line for each registered strategy: its name, its class and the hyperparameters."""
    from lightning.pytorch.strategies import StrategyRegistry

    lines = []
    for name, entry in StrategyRegistry.items():
        cls = entry["strategy"]
        if cls.__module__.startswith("lightning_dsgd."):
            arguments = ", ".join(
                f"{parameter.name}={parameter.default!r}"
                for parameter in inspect.signature(cls).parameters.values()
                if parameter.default is not parameter.empty
            )
            lines.append((name, f"{cls.__name__}({arguments})"))
    width = max((len(name) for name, _ in lines), default=0)
    return "\n".join(f"{name:{width}}  {call}" for name, call in lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-dsgd",
        description="Decentralised data-parallel SGD with PyTorch Lightning.",
        epilog="commands:\n" + "\n".join(f"  {name:12}{text}" for name, text in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="one of those below")
    return parser


def _run_lightning(args: list[str] | None) -> None:
    # Imported here as it takes a second, and `strategies` and `--help` do without.
    from lightning.pytorch import LightningDataModule, LightningModule
    from lightning.pytorch.cli import LightningCLI

    LightningCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
        args=args,
    )
