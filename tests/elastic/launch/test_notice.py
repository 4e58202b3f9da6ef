"""Notice that a machine is to be taken away, from pages like the clouds', files and commands."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lightning_dsgd.elastic.launch import notice as notice_module
from lightning_dsgd.elastic.launch.notice import Notice
from tests.elastic.launch.test_joining import check_end, free_address, job, where
from tests.support.launched import Launched, is_alive, until

AWS = "/latest/meta-data/spot/instance-action"
GOOGLE = "/computeMetadata/v1/instance/preempted"
EVENT = "/computeMetadata/v1/instance/maintenance-event"
AZURE = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
STOPS = '{"action": "stop", "time": "2026-11-26T08:22:00Z"}'


def events(kind: str, machine: str) -> str:
    event = {"EventId": "A1", "EventType": kind, "Resources": ["vm_0", machine]}
    return json.dumps({"DocumentIncarnation": 1, "Events": [event]})


@dataclass
class Metadata:
    """A server on this machine that answers as those of the clouds' machines do."""

    pages: dict[str, str] = field(default_factory=lambda: {NAME: "vm_1"})
    """What stands where; 404 elsewhere."""
    url: str = ""

    def answer(self, method: str, path: str, headers: Any) -> tuple[int, str]:
        if path == "/latest/api/token":
            is_asked_for = headers["X-aws-ec2-metadata-token-ttl-seconds"]
            return (200, "a token") if method == "PUT" and is_asked_for else (400, "")
        cloud = path.split("/")[1]
        asked = {
            "latest": headers["X-aws-ec2-metadata-token"] == "a token",
            "computeMetadata": headers["Metadata-Flavor"] == "Google",
            "metadata": headers["Metadata"] == "true",
        }
        if not asked.get(cloud, True):
            return 401 if cloud == "latest" else 403, ""
        return (200, self.pages[path]) if path in self.pages else (404, "<html>not found")


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    served = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = served.answer(self.command, self.path, self.headers)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        do_PUT = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        served.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever).start()
        yield served
        server.shutdown()


def look(source: str) -> tuple[str, list[str]]:
    """The notice that is given, and what the user is told, after three looks."""
    said: list[str] = []
    notice = Notice(source, said.append)
    notice._ask = notice._way_to_ask()
    for _ in range(3):
        notice.look()
    return notice.given, said


@pytest.mark.parametrize(
    ("path", "text", "given"),
    [
        (AWS, STOPS, STOPS),
        (
            "/latest/meta-data/spot/termination-time",
            "2026-11-26T12:00:00Z\n",
            "2026-11-26T12:00:00Z",
        ),
        (GOOGLE, "TRUE", "TRUE"),
        (EVENT, "MIGRATE_ON_HOST_MAINTENANCE", ""),
        (EVENT, "TERMINATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE"),
        (AZURE, events("Preempt", "vm_2"), ""),
        (AZURE, events("Preempt", "vm_1"), '{"EventId": "A1", "EventType": "Preempt", '),
        ("/mine", None, ""),
        ("/mine", "at noon\n", "at noon"),
    ],
)
def test_a_page_says_whether_there_is_notice(metadata, path, text, given, monkeypatch):
    """Also where a proxy is set, which would be asked for its own machine."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    if text is not None:
        metadata.pages[path] = text
    found, said = look(metadata.url + path)
    assert found.startswith(given)
    assert bool(found) is bool(given)
    assert said == []


@pytest.mark.parametrize(
    ("path", "text", "trouble"),
    [
        (AWS, "<html>", "JSONDecodeError"),
        (GOOGLE, "<html>", "it must be TRUE, FALSE or the name of an event, got '<html>'"),
        (AZURE, "{}", "it must have a list of Events"),
    ],
)
def test_a_page_that_cannot_be_read_is_told_once(metadata, path, text, trouble):
    if text is not None:
        metadata.pages[path] = text
    given, (said,) = look(metadata.url + path)
    assert given == ""
    assert trouble in said
    assert f"--notice {metadata.url}{path} cannot be read" in said


def test_files_and_commands_say_whether_there_is_notice(tmp_path):
    file, program = tmp_path / "leave", tmp_path / "program"
    program.write_text("#!/bin/sh\nexit 0")
    program.chmod(0o755)
    assert look(str(file)) == ("", [])
    assert look("test -e /nowhere") == ("", [])
    assert look("false") == ("", [])
    assert look(str(program))[0] == f"{program} has ended with 0"
    for source, trouble in (
        ("exit 7", "it must end with 0 or 1, got 7"),
        ("nowhere", "got 127"),
        (str(tmp_path / "no_folder" / "leave"), "No such file or directory"),
    ):
        given, (said,) = look(source)
        assert (given, trouble in said) == ("", True), said


def test_what_a_command_that_hangs_has_started_is_ended_too(tmp_path, monkeypatch):
    monkeypatch.setattr(notice_module, "_ANSWER_WITHIN_S", 0.2)
    file = tmp_path / "pid"
    # The shell waits for a child of its own, which would be left behind.
    given, (said,) = look(f"sleep 1000 & echo $! >> {file}; wait")
    assert given == ""
    assert "TimeoutExpired" in said
    pids = [int(line) for line in file.read_text().split()]
    assert len(pids) == 3  # of three looks
    until(lambda: not any(map(is_alive, pids)))


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_machine_that_is_taken_away_leaves_and_the_other_goes_on(tmp_path: Path, metadata):
    """Every batch of the epoch is trained on: those that the leaver had claimed, by the other."""
    meet = ("--rendezvous", free_address())

    def node(number: int, *options: str) -> Launched:
        given = ("--node", str(number), *meet, *options)
        return job(tmp_path, "popsgd:claimed", 1, *given, nodes=2)

    with node(0) as stays, node(1, "--notice", metadata.url + AWS) as leaves:
        until(lambda: all(where(tmp_path, rank)["epoch"] >= 1 for rank in range(2)))
        metadata.pages[AWS] = STOPS
        assert leaves.end() == 1
        until(lambda: where(tmp_path, 0)["members"] == [0])
        (tmp_path / "end").touch()
        assert stays.end() == 0
    check_end(tmp_path, [0])
    with contextlib.suppress(FileNotFoundError):
        assert "died" not in stays.said("logs/rank_0.0.log")
    log = leaves.said("logs/rank_1.0.log")
    assert "rank 1 received SIGTERM and has left; the others go on" in log
