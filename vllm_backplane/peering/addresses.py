"""Where servers meet: addresses of this host alone. What they say is neither encrypted nor signed, and whoever could
answer a question could put words into a model's mouth."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def of_rank(self, rank: int) -> Address:
        """Every worker has a port of its own, one after another."""
        return Address(self.host, self.port + rank)

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def loopback_address(value: object) -> Address:
    expected = "an address of this host, such as 127.0.0.1:9000 or [::1]:9000"
    if not isinstance(value, str):
        raise ValueError(expected)
    host, _, port = value.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        at, number = ipaddress.ip_address(host), int(port)
    except ValueError:
        raise ValueError(expected) from None
    if not at.is_loopback:
        raise ValueError(f"{expected}; reach another host through a tunnel that authenticates it")
    if not 0 < number < 1 << 16:
        raise ValueError(f"{expected}, with a port from 1 to 65535")
    return Address(str(at), number)


def loopback_text(value: object) -> str:
    """For options, which are told as text."""
    return str(loopback_address(value))
