"""A headless Chromium that a test drives over a pipe, with the DevTools protocol: no further package is needed."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--hide-scrollbars", "--window-size=1200,1000",
)  # fmt: skip
PATIENCE = 60.0


def find_chromium() -> str | None:
    """The browser of this machine, or what ``CHROMIUM`` names."""
    return os.environ.get("CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One page in a browser of its own.

    Attributes:
        problems: errors of scripts and of the console so far.
        requests: addresses that were asked for, so far.
    """

    def __init__(self, chromium: str) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._folder = tempfile.TemporaryDirectory()
        read_here, write_there = os.pipe()
        read_there, write_here = os.pipe()
        self._read, self._write = read_here, write_here
        # The browser reads from 3 and writes to 4.
        command = f'exec "$0" "$@" 3<&{read_there} 4>&{write_there}'
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                command,
                chromium,
                "--remote-debugging-pipe",
                *FLAGS,
                f"--user-data-dir={self._folder.name}",
            ],
            pass_fds=(read_there, write_there),
            stderr=subprocess.DEVNULL,
        )
        os.close(read_there)
        os.close(write_there)
        self._number = 0
        self._buffer = b""
        self._session: str | None = None
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, address: str) -> None:
        """Go to an address and wait until it is there."""
        self._loaded = False
        self.call("Page.navigate", url=address)
        deadline = time.monotonic() + PATIENCE
        while not self._loaded:
            self._take(deadline)

    def value(self, expression: str) -> Any:
        """What an expression gives in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def prefer(self, scheme: str) -> None:
        """Have the reader prefer ``light`` or ``dark``."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def call(self, method: str, **parameters: Any) -> Any:
        """One command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self._take(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _take(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise TimeoutError(f"the browser said nothing for {PATIENCE:.0f} s")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise ConnectionError(f"the browser has ended with code {self._process.wait(10)}")
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, about: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(about["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(about["args"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.problems.append(about["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded = True

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)
        os.close(self._read)
        os.close(self._write)
        self._folder.cleanup()
