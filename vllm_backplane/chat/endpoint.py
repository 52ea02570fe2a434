"""Parses the address of a server, and opens connections to it: over TCP, TLS or a Unix socket."""

from __future__ import annotations

import http.client
import os
import socket
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from vllm_backplane.errors import BackplaneError, short_repr

CONNECT_SECONDS = 10.0
UNIX = "unix:"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Describes where a server listens."""

    shown: str
    """The address for messages."""
    host: str
    port: int | None = None
    prefix: str = ""
    """The part of the URL's path before ``/v1``."""
    tls: bool = False
    socket_path: str = ""
    """Path of the Unix socket; empty for TCP."""

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Returns the endpoint of a URL, with or without a final ``/v1``. Raises BackplaneError for any other text."""
        if url.startswith(UNIX):
            path = url.removeprefix(UNIX)
            if path.startswith("//"):
                path = path[2:]
            if not path.startswith("/"):
                raise BackplaneError(f"{short_repr(url)} names no absolute path of a socket; write unix:/run/vllm.sock")
            return cls.unix(path)
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or parts.scheme not in ("http", "https") or parts.username or parts.query or parts.fragment:
            raise BackplaneError(
                f"{short_repr(url)} is not the address of a server; write http://127.0.0.1:8000 or unix:/run/vllm.sock"
            )
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(f"{parts.scheme}://{parts.netloc}{prefix}", host, port, prefix, tls=parts.scheme == "https")

    @classmethod
    def unix(cls, path: str) -> Endpoint:
        return cls(f"{UNIX}{path}", "localhost", socket_path=os.path.normpath(path))

    @property
    def is_in_the_clear(self) -> bool:
        """Returns whether others on a network could read what is sent."""
        if self.tls or self.socket_path or self.host == "localhost":
            return False
        try:
            return not ip_address(self.host).is_loopback
        except ValueError:  # a name
            return True

    def connect(self) -> http.client.HTTPConnection:
        """Returns an open connection. Raises OSError if that fails."""
        connection: http.client.HTTPConnection
        if self.socket_path:
            connection = http.client.HTTPConnection(self.host, timeout=CONNECT_SECONDS)
            connection.sock = _connected_socket(self.socket_path)
            return connection
        kind = http.client.HTTPSConnection if self.tls else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=CONNECT_SECONDS)
        connection.connect()
        return connection


def _connected_socket(path: str) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.settimeout(CONNECT_SECONDS)
        connected.connect(path)
    except BaseException:
        connected.close()
        raise
    return connected
