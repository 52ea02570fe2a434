"""Defines the fuzz targets of messages between servers: an accepted message must be the bytes that its parts give."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from tests.fuzz.campaign import Target
from tests.fuzz.mutations import mutate_json_bytes

SECONDS = 2.0


def _received(data: bytes, receive: Callable[[socket.socket], Any]) -> Any:
    """Returns what `receive` makes of the bytes that a peer sends before it closes the connection."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            theirs.sendall(data)
        return receive(ours)


def receive_weights_request(data: bytes) -> None:
    """Receives a request for weights."""
    from vllm_backplane.peering.connection import Connection
    from vllm_backplane.weights import weights_protocol

    request = _received(data, lambda sock: weights_protocol.Request.receive(Connection(sock, SECONDS)))
    sent = _sent(lambda sock: request.send(Connection(sock, SECONDS)))
    assert data[: len(sent)] == sent


def receive_manifest(data: bytes) -> None:
    """Receives the description of a worker's weights."""
    from vllm_backplane.peering.connection import Connection
    from vllm_backplane.weights import weights_protocol

    text = _received(data, lambda sock: weights_protocol.receive_manifest(Connection(sock, SECONDS)))
    assert data[4 : 4 + len(text)] == text


def decode_manifest(data: bytes) -> None:
    """Decodes the description of a worker's weights."""
    from vllm_backplane.weights.weights_protocol import Manifest

    manifest = Manifest.decode(data)
    assert Manifest.decode(manifest.encode()) == manifest or b"NaN" in data


def receive_blocks_request(data: bytes) -> None:
    """Receives a request for KV blocks."""
    from vllm_backplane.kv_offload.blocks_protocol import BlockConnection

    request = _received(data, lambda sock: BlockConnection(sock, SECONDS).receive_request())
    sent = _sent(lambda sock: BlockConnection(sock, SECONDS).send_request(request))
    assert data[: len(sent)] == sent


def receive_blocks(data: bytes) -> None:
    """Receives the answer to a request for three KV blocks of 64 bytes."""
    import numpy as np

    from vllm_backplane.kv_offload.blocks_protocol import BlockConnection, Status

    def receive(sock: socket.socket) -> list[tuple[bytes, bytes] | None]:
        connection = BlockConnection(sock, SECONDS)
        found: list[tuple[bytes, bytes] | None] = []
        if connection.receive_status(Status) is Status.OK:
            for _ in range(3):
                row = np.zeros(64, dtype=np.uint8)
                checksum = connection.receive_block_into(row)
                found.append(None if checksum is None else (checksum, row.tobytes()))
        return found

    blocks = _received(data, receive)
    expected = b"".join(b"\0" if block is None else b"\1" + block[0] + block[1] for block in blocks)
    assert data[1 : 1 + len(expected)] == expected


def _sent(send: Callable[[socket.socket], None]) -> bytes:
    """Returns the bytes that `send` writes."""
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
            send(ours)
        return b"".join(iter(lambda: theirs.recv(1 << 16), b""))


def targets() -> list[Target]:
    """Returns the targets of this file."""
    from vllm_backplane.peering.connection import WireError

    clean: tuple[type[BaseException], ...] = (WireError, TimeoutError)
    weights = ("vllm_backplane/peering", "vllm_backplane/weights")
    blocks = ("vllm_backplane/peering", "vllm_backplane/kv_offload")
    imports = ("vllm_backplane.weights.weights_protocol", "vllm_backplane.kv_offload.blocks_protocol")
    return [
        Target("weights-request", receive_weights_request, clean, weights, imports=imports),
        Target("weights-manifest", receive_manifest, clean, weights, imports=imports),
        Target("weights-manifest-text", decode_manifest, clean, weights, mutate=mutate_json_bytes, imports=imports),
        Target("blocks-request", receive_blocks_request, clean, blocks, imports=imports),
        Target("blocks-answer", receive_blocks, clean, blocks, imports=imports),
    ]
