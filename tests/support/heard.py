"""What a process logs, also one that pytest does not capture."""

from __future__ import annotations

import logging


class Heard(logging.Handler):
    """Keeps all that these loggers are given from now on."""

    def __init__(self, *loggers: str) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        for name in loggers:
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
