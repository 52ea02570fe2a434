"""Tests that clients which send nothing, or do not read, do not keep others out."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.ports import free_address
from vllm_backplane.peering import server as peer_server
from vllm_backplane.peering.addresses import Address
from vllm_backplane.peering.connection import Connection
from vllm_backplane.peering.server import MAX_CONNECTIONS, MAX_WAITING, LoopbackServer

BUSY, DONE, LARGE = b"b", b"d", b"l"
LARGE_BYTES = 256 << 20


class Server(LoopbackServer):
    """Answers a byte with another one, or with more than the buffers of a connection hold."""

    def __init__(self, address: Address) -> None:
        self.warnings: list[str] = []
        super().__init__(address, "a test", "listen", self.warnings.append)

    def handle(self, sock: socket.socket) -> None:
        connection = Connection(sock, 60)
        if connection.receive(1) == LARGE:
            connection.send(bytes(LARGE_BYTES))
        connection.send(DONE)

    def reject(self, sock: socket.socket) -> None:
        Connection(sock, 1).send(BUSY)


@pytest.fixture
def server() -> Iterator[tuple[Server, Address]]:
    address = Address("127.0.0.1", free_address().port)
    made = Server(address)
    yield made, address
    made.close()


def connected(address: Address, sent: bytes = b"") -> socket.socket:
    sock = socket.create_connection((address.host, address.port), timeout=30)
    sock.sendall(sent)
    return sock


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "count"),
    [
        pytest.param(b"", MAX_CONNECTIONS, id="silent"),
        pytest.param(b"", 2 * MAX_CONNECTIONS, id="silent, and as many wait"),
        pytest.param(LARGE, MAX_CONNECTIONS, id="not reading"),
    ],
)
def test_an_honest_client_gets_through(server: tuple[Server, Address], sent: bytes, count: int) -> None:
    _, address = server
    others = [connected(address, sent) for _ in range(count)]
    time.sleep(0.2)
    with connected(address, b"x") as honest:
        assert honest.recv(1) == DONE
    for other in others:
        other.close()


@pytest.mark.slow
def test_fast_clients_keep_their_places(server: tuple[Server, Address], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that a client is not disconnected while it reads, although another one waits longer than it may."""
    monkeypatch.setattr(peer_server, "WAIT_SECONDS", 0.5)
    made, address = server
    received: list[int] = []

    def read() -> None:
        with connected(address, LARGE) as sock:
            total = 0
            while total <= LARGE_BYTES:
                total += len(sock.recv(1 << 20))
            received.append(total)

    threads = [threading.Thread(target=read) for _ in range(MAX_CONNECTIONS)]
    for thread in threads:
        thread.start()
    with connected(address, b"x") as honest:
        assert honest.recv(1) in (BUSY, DONE)
    for thread in threads:
        thread.join(60)
    assert received == [LARGE_BYTES + 1] * MAX_CONNECTIONS
    assert made.warnings == []


@pytest.mark.slow
def test_beyond_the_queue_clients_are_rejected(server: tuple[Server, Address], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_server, "SLOW_SECONDS", 600.0)
    _, address = server
    others = [connected(address) for _ in range(MAX_CONNECTIONS + MAX_WAITING)]
    time.sleep(0.5)
    with connected(address, b"x") as late:
        assert late.recv(1) == BUSY
    for other in others:
        other.close()
