"""Whether this machine is to be taken away: what a URL, a file or a command says.

    AWS         http://169.254.169.254/latest/meta-data/spot/instance-action
                404: no; JSON: yes; asked with a token (IMDSv2)
                spot/termination-time and other pages: any text: yes
    Google      http://metadata.google.internal/computeMetadata/v1/instance/preempted
                FALSE: no; TRUE: yes; `instance/maintenance-event` too: NONE, TERMINATE_...
    Azure       http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01
                yes if an event other than a freeze names this machine
    another URL     404, nothing, FALSE or NONE: no; any other text: yes
    a file          is there: yes
    a command       ends with 1: no; with 0: yes

Any other answer, and none within `_ANSWER_WITHIN_S`, is told once, and again when that is over.

**Threads.**  One of its own asks every `_EVERY_S`; the supervisor's reads `given`.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

_EVERY_S: Final = 2.0
_ANSWER_WITHIN_S: Final = 5.0
_TOKEN: Final = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
_NO: Final = ("", "FALSE", "NONE")
_NAME: Final = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"


class Notice:
    """Asks whether there is notice, until there is; the head of the file tells whom.

    Args:
        source: the URL, the file or the command
        say: tells the user that the source cannot be read
    """

    def __init__(self, source: str, say: Callable[[str], None]) -> None:
        self.source, self._say = source, say
        self.given = ""
        """What the notice says; empty as long as there is none."""
        self._trouble = ""

    def begin(self) -> None:
        """Begins to ask.

        Raises:
            ValueError: if the source cannot be one, or is a file that is there already
        """
        self._ask = self._way_to_ask()
        threading.Thread(target=self._watch, name="notice", daemon=True).start()

    def _way_to_ask(self) -> Callable[[], str]:
        url = urlsplit(self.source)
        if url.scheme in ("http", "https") and url.hostname:
            # No proxy: it would ask for its own machine.
            self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            for begin, ask in (
                ("/latest/meta-data/", self._ask_aws),
                ("/computeMetadata/", self._ask_google),
                ("/metadata/scheduledevents", self._ask_azure),
            ):
                if url.path.startswith(begin):
                    return ask
            return self._ask_url
        is_file = "/" in self.source and not self.source.split()[1:]
        if not self.source.strip() or "://" in self.source:
            raise ValueError(
                "--notice must be a URL of http, a file or a command, got "
                f"{self.source!r}; try /run/leave, which is a file as it has a slash and no blank"
            )
        if not is_file or shutil.which(self.source):
            return self._ask_command
        if Path(self.source).exists():
            raise ValueError(
                "the file of --notice must not be there before there is notice, got "
                f"{self.source}; remove it"
            )
        return self._ask_file

    def _watch(self) -> None:
        while not self.given:
            self.look()
            time.sleep(_EVERY_S)

    def look(self) -> None:
        """Asks once, and tells the user if that has begun or ceased to be possible."""
        trouble = ""
        try:
            self.given = self._ask()
        except (OSError, ValueError, http.client.HTTPException, subprocess.TimeoutExpired) as err:
            trouble = f"{type(err).__name__}: {err}"
        if trouble and not self._trouble:
            self._say(
                f"--notice {self.source} cannot be read ({trouble}), so no notice is noticed; it "
                f"is asked again every {_EVERY_S:g} s"
            )
        elif self._trouble and not trouble:
            self._say(f"--notice {self.source} can be read now")
        self._trouble = trouble

    # ---- the sources; each returns what the notice says, or an empty text ----

    def _ask_aws(self) -> str:
        token = self._get("/latest/api/token", _TOKEN, method="PUT")
        try:
            text = self._get("", {"X-aws-ec2-metadata-token": token})
        except urllib.error.HTTPError as err:
            if err.code == 404:
                return ""
            raise
        is_json = urlsplit(self.source).path.endswith("/instance-action")
        return json.dumps(_object(text)) if is_json else text.strip()

    def _ask_google(self) -> str:
        text = self._get("", {"Metadata-Flavor": "Google"}).strip()
        if text == "TRUE" or text.startswith("TERMINATE"):
            return text
        if text in _NO or text.startswith("MIGRATE"):
            return ""
        raise ValueError(f"it must be TRUE, FALSE or the name of an event, got {text[:80]!r}")

    def _ask_azure(self) -> str:
        found = _object(self._get("", {"Metadata": "true"})).get("Events")
        if not isinstance(found, list):
            raise ValueError("it must have a list of Events")
        events = [event for event in found if _object(event).get("EventType") != "Freeze"]
        if not events:
            return ""
        name = self._get(_NAME, {"Metadata": "true"}).strip()
        mine = [event for event in events if name in event.get("Resources") or ()]
        return json.dumps(mine[0]) if mine else ""

    def _ask_url(self) -> str:
        try:
            text = self._get("", {}).strip()
        except urllib.error.HTTPError as err:
            if err.code == 404:
                return ""
            raise
        return "" if text.upper() in _NO else text

    def _get(self, path: str, headers: dict[str, str], method: str = "GET") -> str:
        """Returns the text of the source's URL, or of a path of its host."""
        url = urlsplit(self.source)
        whole = f"{url.scheme}://{url.netloc}{path}" if path else self.source
        asked = urllib.request.Request(whole, headers=headers, method=method)
        with self._opener.open(asked, timeout=_ANSWER_WITHIN_S) as answer:
            text: str = answer.read().decode()
        return text

    def _ask_file(self) -> str:
        try:
            os.stat(self.source)
        except FileNotFoundError:
            os.stat(Path(self.source).parent)
            return ""
        return f"{self.source} is there"

    def _ask_command(self) -> str:
        command = subprocess.Popen(
            self.source,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = command.wait(_ANSWER_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(command.pid, signal.SIGKILL)  # also what the shell has started
            command.wait()
            raise
        if status not in (0, 1):
            raise ValueError(f"it must end with 0 or 1, got {status}")
        return "" if status else f"{self.source} has ended with 0"


def _object(value: Any) -> dict[str, Any]:
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise ValueError(f"it must be an object of JSON, got {str(value)[:80]!r}")
    return found
