"""The command `completion`: the script by which a shell completes this command line.

    lightning-dsgd completion bash > ~/.local/share/bash-completion/completions/lightning-dsgd
    lightning-dsgd completion zsh > ~/.lightning-dsgd.zsh    # and `source` it in ~/.zshrc

It completes commands, their options, and the names of strategies and recipes.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Final

from lightning_dsgd import wings
from lightning_dsgd.lab import recipes
from lightning_dsgd.lab.bench.command import BENCHES
from lightning_dsgd.lab.options import Parser
from lightning_dsgd.lab.progress import of_checks

SHELLS: Final = ("bash", "zsh")
LIGHTNINGS: Final = ("fit", "validate", "test", "predict")
ZSH: Final = "autoload -U +X bashcompinit && bashcompinit\n"
BASH: Final = """\
# lightning-dsgd completion: made for this version, to be made anew with the next one.
_lightning_dsgd() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=
    [[ $before == = ]] && before=${{COMP_WORDS[COMP_CWORD-2]}}
    [[ $word == = ]] && word=
    case $before in
        --strategies | --trainer.strategy) words="{strategies}" ;;
        *) case ${{COMP_WORDS[1]}} in
{cases}
        esac ;;
    esac
    ((COMP_CWORD == 1)) && words="{commands}"
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _lightning_dsgd lightning-dsgd
"""
CASE: Final = """            {command}) words="{words}" ;;"""


def listed(text: str) -> list[str]:
    """Returns the options that a help lists."""
    return sorted(set(re.findall(r"^ +(?:-\w[\w ]*, )?(--[\w.-]+)", text, re.MULTILINE)))


def options() -> Iterator[tuple[str, list[str]]]:
    """Yields each command with its options."""
    for name, module in of_checks({"|".join(LIGHTNINGS): "", **wings.COMMANDS}):
        if not module:
            command = [sys.executable, "-m", "lightning_dsgd", "fit", "--help"]
            yield name, listed(subprocess.check_output(command, text=True, timeout=300))
            continue
        helps = io.StringIO()
        for more in BENCHES if name == "bench" else ("",):
            with contextlib.redirect_stdout(helps), contextlib.suppress(SystemExit):
                wings.load(module, name).main([*more.split(), "--help"])
        yield name, listed(helps.getvalue())


def script(shell: str) -> str:
    """Returns the script that has a shell complete this command line."""
    from lightning_dsgd.lab import catalogue  # loads torch

    strategies = [str(each["name"]) for each in catalogue.records(None)]
    names: dict[str, Iterable[str]] = {
        "strategies": strategies,
        "recipes": recipes.named(),
        "bench": BENCHES,
        "completion": SHELLS,
    }
    bash = BASH.format(
        strategies=" ".join(strategies),
        commands=" ".join([*LIGHTNINGS, *wings.COMMANDS]),
        cases="\n".join(
            CASE.format(command=command, words=" ".join([*names.get(command, ()), *found]))
            for command, found in options()
        ),
    )
    return ZSH + bash if shell == "zsh" else bash


def main(argv: list[str] | None = None) -> None:
    """Prints the script."""
    parser = Parser("completion", __doc__)
    parser.add_argument("shell", choices=SHELLS, help="for which shell")
    print(script(parser.parse_args(argv).shell), end="")
