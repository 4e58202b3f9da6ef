"""What the handlers of SIGTERM and Ctrl-C leave behind, in one process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_dsgd.session import signals as module
from lightning_dsgd.session.phases import Phase
from lightning_dsgd.session.signals import Signals


class Replica:
    shows_consensus = False


class Training:
    replica = Replica()


class Session:
    """A rank that trains, and notes what it is asked to do."""

    is_fork = is_evaluating = has_ended = False
    is_training = True
    phase = Phase.TRAINING
    training: Any = Training()

    def __init__(self) -> None:
        self.asked: list[int] = []

    def request_stop(self, signum: int) -> None:
        self.asked.append(signum)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Leaves this process's handlers as they were."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def own(signum: int, frame: Any) -> None:
    """A handler of the script's own."""


def test_a_scripts_own_handler_is_given_back() -> None:
    signal.signal(signal.SIGINT, own)
    signals = Signals(Session())
    signals.take_sigint()
    assert signal.getsignal(signal.SIGINT) == signals.on_sigint
    signals.give_back()
    assert signal.getsignal(signal.SIGINT) is own


def test_the_interpreters_handlers_are_given_back_and_a_scripts_own_is_not_taken() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, own)
    signals = Signals(Session())
    signals.take()
    assert signal.getsignal(signal.SIGINT) == signals.on_sigint
    assert signal.getsignal(signal.SIGTERM) is own
    signals.give_back()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is own


def test_a_handler_that_is_not_pythons_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python says None of it, and cannot put it back."""
    calls: list[Any] = []
    monkeypatch.setattr(module.signal, "signal", lambda *args: calls.append(args))
    signals = Signals(Session())
    signals.take_sigint()
    signals.give_back()
    assert calls == [(signal.SIGINT, signals.on_sigint)]


def test_a_first_interrupt_asks_all_to_stop_and_a_second_interrupts_at_once() -> None:
    session = Session()
    signals = Signals(session)
    signals.take_sigint()
    signal.raise_signal(signal.SIGINT)
    assert session.asked == [signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert session.asked == [signal.SIGINT]
