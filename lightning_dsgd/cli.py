"""The console script: Lightning's command line, with this package's strategies registered.

    lightning-dsgd fit --config recipes/digits_local_sgd.yaml --trainer.strategy dpsgd
    lightning-dsgd fit --config ... --trainer.strategy wagma --trainer.strategy.sync_period 20
    lightning-dsgd strategies
    lightning-dsgd doctor

`python -m lightning_dsgd` is the same, for launchers that start a module.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence

from lightning_dsgd import wings

COMMANDS = {
    "fit": "train a model (Lightning's command line: `lightning-dsgd fit --help`)",
    "validate": "evaluate on the validation data",
    "test": "evaluate on the test data",
    "predict": "run on the prediction data",
    "strategies": "the table of strategies; with a name, the details of one",
    "doctor": "what works on this machine, and what to do about the rest",
    "bench": "measure strategies side by side (`lightning-dsgd bench throughput --help`)",
    "simulate": "predict throughput on many ranks (`lightning-dsgd simulate --help`)",
    "probe": "measure what messages and sums cost on this cluster (`lightning-dsgd probe --help`)",
    "advise": "which strategy is fastest for you (`lightning-dsgd advise --help`)",
    "timeline": "draw where a run's time went (`lightning-dsgd timeline --help`)",
    "launch": "start a script's ranks, and look after them (`lightning-dsgd launch --help`)",
}


def main(args: Sequence[str] | None = None) -> None:
    """Runs one command.

    Args:
        args: what follows the program's name; by default what this process got.  Lightning starts
            the other ranks with the arguments of this process: for several ranks, leave it out.
    """
    if args is None:
        _find_the_users_modules()
    given = sys.argv[1:] if args is None else list(args)
    # Lightning's parser also takes options before the command: `--config FILE fit`.
    if not given or given[0] in ("-h", "--help") or not given[0].startswith("-"):
        command = _parser().parse_args(given[:1] or ["--help"]).command
        if command in wings.COMMANDS:
            # Lazily: `--help` of another command needs none of it.
            try:
                module = wings.load(wings.COMMANDS[command], f"`lightning-dsgd {command}`")
            except wings.WingMissing as error:
                sys.exit(f"error: {error}")
            module.main(given[1:])
            return
    _run_lightning(None if args is None else given)


def _find_the_users_modules() -> None:
    """Lets `--model my_model.MyModel` name a file of the working folder, as `python -m` does.

    Lightning starts the other ranks with the same command, so they find it too.
    """
    folder = os.getcwd()
    if not sys.flags.safe_path and folder not in sys.path:
        sys.path.insert(0, folder)


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
    if importlib.util.find_spec("jsonargparse") is None:
        sys.exit(
            "lightning-dsgd: error: Lightning's command line needs the package jsonargparse, which "
            "is not installed; install it (pip install 'jsonargparse[signatures]>=4.39,<5')"
        )
    # Imported here as it takes seconds, and the other commands and `--help` do without.
    from lightning.pytorch import LightningDataModule, LightningModule
    from lightning.pytorch.cli import LightningCLI

    from lightning_dsgd.trainer.named import STRATEGIES
    from lightning_dsgd.trainer.names import take_on_command_line

    take_on_command_line(STRATEGIES)
    LightningCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
        args=args,
    )
