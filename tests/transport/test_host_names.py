"""The name of the machine where the ranks meet does not resolve: who gave it, until when."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time

import pytest

from lightning_dsgd.elastic.launch import node
from lightning_dsgd.elastic.launch.node import Place
from lightning_dsgd.plain.launch import find_launch
from lightning_dsgd.session import options
from lightning_dsgd.session.opening import Opening
from lightning_dsgd.transport import Timeout, TransportError, host_names
from tests.support.ports import free_port

NAME = "n1"
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
IN_SLURM = "got 'n1' from SLURM_STEP_NODELIST=n[1-2], as the first node (no such name)"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How often the machine was asked for the name; it knows no name but its own."""
    found: list[str] = []
    resolve = socket.getaddrinfo

    def get(host: str, *args: object, **kwargs: object) -> object:
        if host == NAME and not kwargs:
            found.append(host)
            raise OSError("no such name")
        return resolve(host, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", get)
    monkeypatch.setattr(host_names, "_ASK_EVERY_S", 0.01)
    monkeypatch.setattr(host_names, "_WARN_AFTER_S", 0.05)
    for variable in [name for name in os.environ if name.startswith(("SLURM", "TORCHELASTIC"))]:
        monkeypatch.delenv(variable)
    for variable in ("MASTER_ADDR", "MASTER_PORT"):  # which `Opening` sets, and so are put back
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    return found


@pytest.mark.parametrize(
    ("variables", "source"),
    [
        (SLURM, IN_SLURM),
        # As Lightning leaves the variables behind.
        ({**SLURM, "MASTER_ADDR": NAME}, IN_SLURM),
        ({"SLURM_NODELIST": "m[1-2]", "MASTER_ADDR": NAME}, "got 'n1' from MASTER_ADDR ("),
        ({"MASTER_ADDR": NAME}, "got 'n1' from MASTER_ADDR ("),
        (
            {"MASTER_ADDR": NAME, "TORCHELASTIC_RUN_ID": "1"},
            "from MASTER_ADDR, which the launcher of the ranks has set (",
        ),
    ],
)
def test_ranks_tell_soon_which_name_does_not_resolve_and_end_in_time(
    variables, source, asked, monkeypatch, caplog
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    address = find_launch().address if variables is SLURM else (NAME, 1)
    assert address is not None
    assert address[0] == NAME
    chosen = options.choose("DecentralizedStrategy", options.Options, {"startup_timeout_s": 0.5})
    with (
        caplog.at_level(logging.WARNING, "lightning_dsgd"),
        pytest.raises(Timeout, match="must resolve on ") as end,
    ):
        Opening(chosen, print).join_process_group(1, 4, address, "gloo", None)  # type: ignore[arg-type]
    assert source in str(end.value)
    assert "it has not for 0.5 s" in str(end.value)
    [said] = caplog.messages
    assert source in said
    assert "it is asked for again, for 0.5 s in all" in said
    assert len(asked) > 1


def test_a_name_that_the_cluster_learns_later_is_waited_for(asked, monkeypatch, caplog):
    threading.Timer(0.2, setattr, [host_names.socket, "getaddrinfo", lambda *_: []]).start()
    host_names.await_name(NAME, "MASTER_ADDR", 60.0)
    assert asked
    assert len(caplog.messages) == 1


def test_a_resolver_that_does_not_answer_holds_nobody_longer(asked, monkeypatch):
    silent, resolve = threading.Event(), socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *a, **k: resolve(*a, **k) if k else silent.wait(60.0)
    )
    begin = time.monotonic()
    with pytest.raises(Timeout, match=r"got 'n1' from MASTER_ADDR \(no answer yet\)"):
        host_names.await_name(NAME, "MASTER_ADDR", 0.2)
    assert time.monotonic() - begin < 30.0
    silent.set()


def test_the_supervisor_of_a_node_names_its_option_and_heeds_signals(asked, monkeypatch, caplog):
    monkeypatch.setattr(node, "_STORE_S", 0.3)
    place = Place(2, 2, 0, NAME, free_port())
    with (
        pytest.raises(TransportError, match="got 'n1' from --rendezvous"),
        node.NodeRegister(place, lambda: False).open(),
    ):
        pass
    with (
        pytest.raises(TransportError, match="ended by a signal, before n1 resolved"),
        node.NodeRegister(place, lambda: True).open(),
    ):
        pass
