"""A command that is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest


def refused(
    main: Callable[[list[str]], None], words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> str:
    """Returns what a command says where its words are refused, as argparse ends then."""
    with pytest.raises(SystemExit) as end:
        main([*words])
    assert end.value.code == 2
    return capsys.readouterr().err
