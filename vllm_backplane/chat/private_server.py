"""Starts a server for one conversation and ends it afterwards.

The server listens on a Unix socket in a folder that only this user can open, and requires a random key, which it gets
by its environment.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vllm_backplane.chat.client import Client, ConnectionLost
from vllm_backplane.chat.endpoint import Endpoint
from vllm_backplane.errors import BackplaneError
from vllm_backplane.process.owned_process import OwnedProcess

KEY_VARIABLE = "VLLM_API_KEY"
MAX_SOCKET_PATH = 107
"""Bytes of the longest path that a Unix socket can have."""
POLL_SECONDS = 0.1
HEALTH_SECONDS = 10.0
ENDING_SECONDS = 2.0
"""Seconds between the end of a server's connections and the end of its process."""


class PrivateServer:
    """Runs a server that ends with this object's context, or with this process."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts the server. `command` gets the options for the socket on which it listens."""
        self._process = OwnedProcess("chat")
        self.api_key = secrets.token_urlsafe(32)
        path = self._process.folder / "socket"
        self.endpoint = Endpoint.unix(str(path))
        try:
            if len(os.fsencode(path)) > MAX_SOCKET_PATH:
                raise BackplaneError(f"{path} is too long for the path of a socket; set TMPDIR to a shorter path")
            self._process.start([*command, "--uds", str(path)], {**environment, KEY_VARIABLE: self.api_key})
        except BaseException:
            self._process.stop()
            raise

    def __enter__(self) -> PrivateServer:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._process.stop()

    @property
    def log(self) -> Path:
        return self._process.log

    def wait_until_ready(self, progress: Callable[[str], None]) -> None:
        """Waits until the server is up, and passes its progress messages on. Raises BackplaneError if it ends."""
        client = Client(self.endpoint, self.api_key, HEALTH_SECONDS)
        while not client.is_healthy():
            self._process.pass_on(progress)
            if (status := self._process.status(POLL_SECONDS)) is not None:
                raise self._process.failure(status, "the server did not start")

    def explained(self, fault: BackplaneError) -> BackplaneError:
        """Returns the reason why the server has ended in place of a lost connection, or `fault` while it runs."""
        if not isinstance(fault, ConnectionLost):
            return fault
        # The connection is lost a moment before the process ends.
        status = self._process.status(ENDING_SECONDS)
        return fault if status is None else self._process.failure(status, "the server has ended")
