"""The console script: Lightning's command line, with this package's strategies registered.

lightning-dsgd fit --config recipes/digits_local_sgd.yaml --trainer.strategy dpsgd
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from lightning_dsgd import __version__, hyperparameters, wings

COMMANDS: Final = {
    "fit": "train a model (Lightning's command line: `lightning-dsgd fit --help`)",
    "validate": "evaluate on the validation data",
    "test": "evaluate on the test data",
    "predict": "run on the prediction data",
    "strategies": "the table of strategies; with a name, the details of one",
    "doctor": "what works on this machine, and what to do about the rest",
    "recipes": "the list of recipes and examples; with a name, a copy of one",
    "why": "why a job is stuck or slow, and what would help, here or on another cluster",
    "timeline": "draw where a run's time went (`lightning-dsgd timeline --help`)",
    "launch": "start a script's ranks, and look after them (`lightning-dsgd launch --help`)",
}


def main(args: Sequence[str] | None = None) -> None:
    """Runs one command.

    Args:
        args: what follows the program's name; by default what this process got.  Lightning starts
            the other ranks with the arguments of this process: for several ranks, leave it out.
    """
    if args is None and not sys.flags.safe_path:
        # So `--model my_model.MyModel` names a file of the working folder, as with `python -m`.
        sys.path.insert(0, os.getcwd())
    given = sys.argv[1:] if args is None else list(args)
    # Lightning's parser also takes options before the command: `--config FILE fit`.
    if not given or given[0] in ("-h", "--help", "--version") or not given[0].startswith("-"):
        command = _command(given[:1] or ["--help"])
        if command in wings.COMMANDS:
            try:
                module = wings.load(wings.COMMANDS[command], f"`lightning-dsgd {command}`")
            except wings.WingMissing as error:
                sys.exit(f"error: {error}")
            try:
                module.main(given[1:])
            except BrokenPipeError:  # of `| head`; and Python would complain again at its end
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return
    try:
        _run_lightning(None if args is None else given)
    except ValueError as error:
        refusal = _refusal(error)
        if args is not None or refusal is None:
            raise
        _end_refused(refusal)


def _command(given: Sequence[str]) -> str:
    parser = argparse.ArgumentParser(
        prog="lightning-dsgd",
        description="Decentralised data-parallel SGD with PyTorch Lightning.",
        epilog="commands:\n"
        + "\n".join(f"  {name:12}{text}" for name, text in COMMANDS.items())
        + "\n\nexit status: 0 if it was done; 1 if it failed, was refused or found something "
        "missing;\n  2 if this command line is wrong",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", metavar="command", help="one of those below")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    command: str = parser.parse_args(given).command
    if command not in COMMANDS:
        meant = hyperparameters.did_you_mean(command, COMMANDS)
        parser.error(f"the command must be one of {', '.join(COMMANDS)}, got {command!r}{meant}")
    return command


def _refusal(error: BaseException) -> ValueError | None:
    """Returns the error of this package that the error is, or holds, as jsonargparse's do."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not isinstance(error, ValueError) or not frames:
        return None
    if str(frames[-1].f_globals["__name__"]).startswith("lightning_dsgd."):
        return error
    held = frames[-1].f_locals.get("exceptions", ())
    return next(filter(None, map(_refusal, held)), None)


def _end_refused(error: ValueError) -> NoReturn:
    """Ends this rank with one line: a traceback would lead through Lightning and this package."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    rank = getattr(rank_zero_only, "rank", 0) or 0
    sys.exit(f"[rank {rank}] error: {error}" if rank else f"error: {error}")


def _run_lightning(args: list[str] | None) -> None:
    # Imported here as it takes seconds, and the other commands and `--help` do without.
    from lightning.pytorch import LightningModule
    from lightning.pytorch.cli import LightningCLI, SaveConfigCallback

    class Saved(SaveConfigCallback):
        def setup(self, trainer: Any, *rest: Any, **named: Any) -> None:
            """Without a folder of the logger, a file may be where the user's own one is."""
            written = Path(trainer.log_dir or "", self.config_filename).resolve()
            if written in (Path(str(given)).resolve() for given in self.config.get("config") or ()):
                self.config_filename = "config_of_run.yaml"
            super().setup(trainer, *rest, **named)

    theirs = COMMANDS.keys() - wings.COMMANDS.keys()
    usages = {name: {"usage": f"lightning-dsgd {name} [options]"} for name in theirs}
    LightningCLI(
        LightningModule,  # a module may have loaders of its own, so a data module is optional
        subclass_mode_model=True,
        save_config_callback=Saved,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"prog": "lightning-dsgd", **usages},
        args=args,
    )
