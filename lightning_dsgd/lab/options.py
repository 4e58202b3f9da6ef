"""The parser of the lab's commands: each option has a text, which ends with its default."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any


class Parser(argparse.ArgumentParser):
    """Parses the options of one command.

    Args:
        command: what follows `lightning-dsgd`, unless `prog` is given
        text: what the help says of the command; indented lines stay as they are
        **given: of the class that this one builds upon
    """

    def __init__(self, command: str, text: str | None, **given: Any) -> None:
        given.setdefault("prog", f"lightning-dsgd {command}")
        super().__init__(description=text, formatter_class=_Help, **given)


class _Help(argparse.HelpFormatter):
    """Wraps paragraphs to the terminal's width, and leaves indented lines alone."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            paragraph if paragraph.startswith(" ") else textwrap.fill(paragraph, width)
            for paragraph in text.strip("\n").split("\n\n")
        )

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        tells = "default" in text or not action.option_strings
        is_flag = action.default is None or isinstance(action.default, bool)
        if tells or is_flag or action.default is argparse.SUPPRESS:
            return text
        return f"{text} (default: %(default)s)"
