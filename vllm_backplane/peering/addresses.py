"""Parses the addresses at which servers of one host reach each other, and accepts loopback addresses only.

The traffic is neither encrypted nor authenticated: a program that could answer in place of the peer could change what a
model generates.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Address:
    """Holds an IP address and a TCP port."""

    host: str
    port: int

    def of_rank(self, rank: int) -> Address:
        """Returns the address of a worker: consecutive ranks use consecutive ports."""
        return Address(self.host, self.port + rank)

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def loopback_address(value: object) -> Address:
    """Parses `host:port`. Raises ValueError, whose text completes "expected ...", unless the host is a loopback IP."""
    expected = "an address of this host, such as 127.0.0.1:9000 or [::1]:9000"
    if not isinstance(value, str):
        raise ValueError(expected)
    host, _, port = value.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        ip, number = ipaddress.ip_address(host), int(port)
    except ValueError:
        raise ValueError(expected) from None
    if not ip.is_loopback:
        raise ValueError(f"{expected}; reach another host through a tunnel that authenticates it")
    if not 0 < number < 1 << 16:
        raise ValueError(f"{expected}, with a port from 1 to 65535")
    return Address(str(ip), number)


def loopback_text(value: object) -> str:
    """Returns a checked loopback address as text, the form in which option values are stored."""
    return str(loopback_address(value))
