"""Chooses unused ports for the servers of the tests."""

from __future__ import annotations

import errno
import os
import random
import socket
import threading

from vllm_backplane.peering.addresses import Address

FIRST, LAST = 20000, 32000
"""Range of the ports, below the system's ephemeral ports. A server may take minutes from its start until it listens,
and in that time the system could give an ephemeral port to a client connection of a concurrent test."""

_drawn: set[int] = set()
"""Ports that were chosen before. No port is chosen twice, because an earlier server may not listen yet."""
_drawing = threading.Lock()


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a port of `host` that is not in use, and that no other pytest-xdist worker chooses."""
    # Each pytest-xdist worker chooses from its own part of the range.
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    place = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    with _drawing:  # several threads start servers
        ports = [port for port in range(FIRST + place % count, LAST, count) if port not in _drawn]
        while True:
            port = random.choice(ports)
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                try:
                    probe.bind((host, port))
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                    continue
            _drawn.add(port)
            return port


def free_address(host: str = "127.0.0.1") -> Address:
    """Returns `host` with an unused port."""
    return Address(host, free_port(host))
