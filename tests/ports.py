"""Ports for servers of the tests, at which nobody listens for a while yet."""

from __future__ import annotations

import errno
import os
import random
import socket
import threading

from vllm_backplane.peering.addresses import Address

FIRST, LAST = 20000, 32000
"""Below those that the system gives to connections: it may be minutes until a server that is started listens, and
meanwhile connections of the same tests, and of those beside them, would be given its port."""

_drawn: set[int] = set()
"""Never twice: the first server may not listen yet when the second is given its port."""
_drawing = threading.Lock()


def free_port(host: str = "127.0.0.1") -> int:
    # Tests that run side by side look at the same ports, and each has its part of them.
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
    return Address(host, free_port(host))
