"""Drives a real Chromium without a display, by the WebDriver protocol of the W3C, which is JSON over HTTP.

A test needs a dozen of its requests, so that a client library would be one more requirement for little. Tests that use
the browser are skipped where it is not installed; `make` installs it where it can (Makefile).
"""

from __future__ import annotations

import base64
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import Child, tail

from tests.ports import free_port

PROGRAMS = ("chromium", "chromedriver")
PACKAGES = (
    "the packages chromium and chromium-driver (Debian) are not installed: apt-get install chromium chromium-driver"
)
START_SECONDS = 60.0
WAIT_SECONDS = 60.0
"""Seconds after which what a test waits for counts as missing."""
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key of a reference to an element, in the standard."""
KEYS = {"enter": "\ue007", "escape": "\ue00c", "tab": "\ue004", "shift": "\ue008"}
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

needs_browser = pytest.mark.skipif(any(shutil.which(name) is None for name in PROGRAMS), reason=PACKAGES)


class Browser(Child):
    """Runs a browser with one window and a profile of its own, which ends with its context."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False)
        super().__init__([str(shutil.which("chromedriver")), f"--port={port}"], folder / "chromedriver.log")
        try:
            self._wait_until_ready()
            chrome = {"binary": shutil.which("chromium"), "args": [*OPTIONS, f"--user-data-dir={folder / 'profile'}"]}
            wanted = {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
            started = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self._session = f"/session/{started['sessionId']}"
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Browser:
        return self

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            assert self.process.poll() is None, f"chromedriver ended\n{tail(self.log)}"
            try:
                if self._send("GET", "/status")["ready"]:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"chromedriver is not ready after {START_SECONDS} s\n{tail(self.log)}")

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        response = self.http.request(method, path, json=body if method == "POST" else None)
        value = response.json()["value"]
        assert response.status_code == 200, f"{method} {path}: {json.dumps(value)[:2000]}"
        return value

    def _command(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        return self._send(method, self._session + path, {} if body is None else body)

    def open(self, address: str) -> None:
        """Opens a page in the window, and waits until it is loaded."""
        self._command("/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        """Runs the body of a function in the page, and returns its result."""
        return self._command("/execute/sync", {"script": script, "args": list(arguments)})

    def element(self, selector: str) -> str:
        """Returns the reference of the first element of a CSS selector."""
        return str(self._command("/element", {"using": "css selector", "value": selector})[_ELEMENT])

    def text(self, selector: str) -> str:
        """Returns the text of the first element of a selector, as it is in the document."""
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def is_shown(self, selector: str) -> bool:
        return bool(self._command(f"/element/{self.element(selector)}/displayed", method="GET"))

    def click(self, selector: str) -> None:
        self._command(f"/element/{self.element(selector)}/click")

    def type(self, selector: str, text: str, *, key: str = "") -> None:
        """Types a text into an element, and a key after it."""
        self._command(f"/element/{self.element(selector)}/value", {"text": text + KEYS.get(key, key)})

    def press(self, *keys: str) -> None:
        """Presses keys, one after another, in whatever has the focus."""
        actions = [{"type": kind, "value": KEYS.get(key, key)} for key in keys for kind in ("keyDown", "keyUp")]
        self._command("/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def errors(self) -> list[str]:
        """Returns the warnings and errors of the console since the last call: exceptions, and what the policy of the
        page has blocked."""
        entries = self._command("/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._command("/screenshot", method="GET")))

    def resize(self, width: int, height: int) -> None:
        self._command("/window/rect", {"width": width, "height": height})

    def emulate(self, feature: str, value: str) -> None:
        """Sets a media feature, such as the color scheme that the user prefers."""
        params = {"features": [{"name": feature, "value": value}]}
        self._command("/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": params})

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Waits until a condition holds."""
        end = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < end, f"not within {WAIT_SECONDS} s: {what}\n{self.text('body')[:2000]}"
            time.sleep(0.05)
