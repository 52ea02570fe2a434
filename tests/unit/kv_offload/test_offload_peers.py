"""Checks the exchange of blocks between two servers over loopback, with all faults that can occur in it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import numpy
import pytest
import torch

from tests.breaking_relay import Fault, Relay
from tests.ports import free_address
from vllm_backplane.errors import BackplaneError, OptionError
from vllm_backplane.kv_offload.block_keys import KeyChain
from vllm_backplane.kv_offload.blocks_client import BlockClient
from vllm_backplane.kv_offload.blocks_protocol import MAX_KEYS, BlockConnection, Kind, Request, model_identity
from vllm_backplane.kv_offload.blocks_server import BlockServer
from vllm_backplane.kv_offload.cache_rows import CacheRows
from vllm_backplane.kv_offload.metadata import BlockLoad, RequestLoad, StepMetadata
from vllm_backplane.kv_offload.settings import parse
from vllm_backplane.kv_offload.slots import Bytes, MemorySlots
from vllm_backplane.kv_offload.store import BlockStore, BlockUnavailable, Outcome
from vllm_backplane.kv_offload.worker import OffloadWorker
from vllm_backplane.peering import server as loopback_server
from vllm_backplane.peering.addresses import Address, loopback_address
from vllm_backplane.peering.connection import WireError
from vllm_backplane.peering.digests import without_model_path

SIZE, BLOCKS = 4096, 4
HEADER = 17
"""Bytes before those of each block. One byte for the status precedes all blocks."""
SECONDS = 1.0
"""Timeout of a client that gets no response."""
BLOCK_SECONDS = 5.0
"""Timeout of a client that gets one block and no more. The block must arrive in this time, through three threads."""
PATIENCE = 30.0
"""Timeout of a client that gets a response, long enough for a busy machine."""
MODEL, OTHER = b"a" * 32, b"b" * 32
KEYS = KeyChain(1, None).up_to(range(BLOCKS), BLOCKS)
ROWS = [numpy.random.default_rng(number).integers(0, 256, SIZE, numpy.uint8) for number in range(BLOCKS)]


def silent(_: str) -> None:
    pass


@pytest.fixture
def store() -> Iterator[BlockStore]:
    made = BlockStore(MemorySlots(BLOCKS, SIZE))
    for number, (key, row) in enumerate(zip(KEYS[:3], ROWS, strict=False)):
        made.write(key, number, row)
    yield made
    made.close()


@pytest.fixture(params=["127.0.0.1", "::1"])
def served(request: pytest.FixtureRequest, store: BlockStore) -> Iterator[Address]:
    try:
        address = free_address(request.param)
    except OSError:
        pytest.skip(f"this host has no {request.param}")
    server = BlockServer(address, MODEL, store, silent)
    yield address
    server.close()


def client(address: Address, model: bytes = MODEL, seconds: float = PATIENCE) -> BlockClient:
    peer = BlockClient(address, seconds, silent)
    peer.identity = model
    return peer


def outcomes(found: list[object]) -> list[Outcome | None]:
    return [one.outcome if isinstance(one, BlockUnavailable) else None for one in found]


def test_what_one_has_the_other_gets(served: Address) -> None:
    peer = client(served)
    assert peer.count_stored(KEYS) == 3
    assert peer.count_stored(KEYS[1:]) == 2
    assert peer.count_stored([KEYS[3]]) == 0
    *found, missing = peer.fetch(KEYS, SIZE)
    for row, expected in zip(found, ROWS, strict=False):
        assert not isinstance(row, BlockUnavailable)
        assert (row == expected).all()
    assert isinstance(missing, BlockUnavailable) and missing.outcome is Outcome.MISSING


def test_another_model_gets_nothing(served: Address) -> None:
    peer = client(served, OTHER)
    assert outcomes(list(peer.fetch(KEYS, SIZE))) == [Outcome.UNREACHABLE] * BLOCKS
    assert peer.count_stored(KEYS) == 0


def test_a_block_that_is_damaged_where_it_is_kept_is_not_sent(store: BlockStore, served: Address) -> None:
    store._slots.read(1)[100] ^= 1
    assert outcomes(list(client(served).fetch(KEYS[:3], SIZE))) == [None, Outcome.MISSING, None]


@pytest.mark.parametrize(
    ("fault", "seconds", "expected"),
    [
        (None, PATIENCE, [None] * 3),
        (Fault(1 + (HEADER + SIZE) + HEADER + 500, flip=True), PATIENCE, [None, Outcome.DAMAGED, None]),
        (Fault(SIZE + 500), PATIENCE, [None, Outcome.UNREACHABLE, Outcome.UNREACHABLE]),
        pytest.param(
            Fault(SIZE + 500, hang=2 * PATIENCE),
            BLOCK_SECONDS,
            [None, Outcome.UNREACHABLE, Outcome.UNREACHABLE],
            marks=pytest.mark.slow,
        ),
        (Fault(0, hang=2 * PATIENCE), SECONDS, [Outcome.UNREACHABLE] * 3),
        (Fault(0, flip=True), PATIENCE, [Outcome.UNREACHABLE] * 3),
        (Fault(1, flip=True), PATIENCE, [Outcome.UNREACHABLE] * 3),
    ],
    ids=["nothing", "a bit", "cut off", "hangs in the middle", "hangs", "no status", "no block"],
)
def test_what_goes_wrong_on_the_way(
    store: BlockStore, fault: Fault | None, seconds: float, expected: list[Outcome | None]
) -> None:
    """`seconds` is the client's timeout, which a fault that hangs exceeds."""
    server = BlockServer(free_address(), MODEL, store, silent)
    relay = Relay(Address(*server._socket.getsockname()), fault)
    began = time.monotonic()
    found = list(client(relay.address, seconds=seconds).fetch(KEYS[:3], SIZE))
    assert outcomes(found) == expected
    assert time.monotonic() - began < PATIENCE
    for row, wanted in zip(found, ROWS, strict=False):
        assert isinstance(row, BlockUnavailable) or (row == wanted).all()
    relay.close()
    server.close()


def test_who_is_not_there_is_left_alone_for_a_while(served: Address) -> None:
    warnings: list[str] = []
    peer = BlockClient(free_address(), SECONDS, warnings.append)
    peer.identity = MODEL
    assert [peer.count_stored(KEYS), peer.count_stored(KEYS)] == [0, 0]
    assert len(warnings) == 1, "the peer got two requests"


@pytest.mark.slow
def test_no_client_takes_all_places(store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that connect and send nothing are disconnected when another one waits."""
    monkeypatch.setattr(loopback_server, "MAX_CONNECTIONS", 2)
    address = free_address()
    server = BlockServer(address, MODEL, store, silent)
    mute = [socket.create_connection((address.host, address.port)) for _ in range(2)]
    warnings: list[str] = []
    honest = BlockClient(address, PATIENCE, warnings.append)
    honest.identity = MODEL
    assert honest.count_stored(KEYS) == 3, warnings
    for connection in mute:
        connection.close()
    server.close()


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n" * 10, b"\0" * 200, b""])
def test_what_is_no_question_is_not_answered(served: Address, sent: bytes) -> None:
    with socket.create_connection((served.host, served.port)) as connection:
        connection.settimeout(5)
        connection.sendall(sent)
        with contextlib.suppress(OSError):  # the server has closed the connection already
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(100) == b""
    assert client(served).count_stored(KEYS) == 3


def test_a_port_that_is_taken_is_an_error(served: Address, store: BlockStore) -> None:
    with pytest.raises(BackplaneError, match="name another port"):
        BlockServer(served, MODEL, store, silent)


def test_a_load_from_both_sides(served: Address) -> None:
    """Loads blocks of this server's store and of the peer, and one that neither has."""
    cache = torch.zeros(8, SIZE // 4)
    own = BlockStore(MemorySlots(1, SIZE))
    own.write(KEYS[0], 0, ROWS[0])
    worker = OffloadWorker(CacheRows([cache], 8), own, client(served), silent)
    blocks = [BlockLoad(key, 7 - place, from_peer=place > 0) for place, key in enumerate(KEYS)]
    worker.start_loads(StepMetadata(loads=[RequestLoad("one", tuple(blocks))]))
    end, complete = time.monotonic() + PATIENCE, set[str]()
    while not complete and time.monotonic() < end:
        complete = worker.finish_loads(idle=True)
    assert complete == {"one"}
    for place in range(3):
        assert cache[7 - place].view(torch.uint8).numpy().tobytes() == ROWS[place].tobytes()
    assert not cache[:5].any()
    assert worker.take_failed_blocks() == {4}
    assert worker.take_counts() == {"loaded": 1, "fetched": 2, "missing": 1}
    worker.close()


def test_what_is_under_way_when_weights_change_does_not_count(store: BlockStore) -> None:
    """Neither blocks that have not arrived yet nor blocks that are in the KV cache already may be used."""
    server = BlockServer(free_address(), MODEL, store, silent)
    relay = Relay(Address(*server._socket.getsockname()), Fault(2 * SIZE, hang=PATIENCE))
    cache = torch.zeros(8, SIZE // 4)
    worker = OffloadWorker(CacheRows([cache], 8), BlockStore(MemorySlots(1, SIZE)), client(relay.address), silent)
    blocks = tuple(BlockLoad(key, place, from_peer=True) for place, key in enumerate(KEYS[:3]))
    worker.start_loads(StepMetadata(loads=[RequestLoad("one", blocks)]))
    end = time.monotonic() + PATIENCE
    while not cache[0].any() and time.monotonic() < end:
        assert worker.finish_loads(idle=True) == set()
    worker.reset()
    relay.cut.set()
    complete = set[str]()
    while not complete and time.monotonic() < end:
        complete = worker.finish_loads(idle=True)
    assert complete == {"one"}
    assert worker.take_failed_blocks() == {0, 1, 2}
    worker.close()
    relay.close()
    server.close()


def test_a_change_of_weights_ends_the_exchange(store: BlockStore) -> None:
    """Tests a response during which weights change, and blocks of the new weights are stored under the same keys."""
    address = free_address()
    server = BlockServer(address, MODEL, store, silent)
    found = client(address).fetch(KEYS[:3], SIZE)
    read = store.read_copy
    waiting, replaced = threading.Event(), threading.Event()

    def read_second_late(key: bytes) -> tuple[bytes, Bytes]:
        if key == KEYS[1]:
            waiting.set()
            assert replaced.wait(PATIENCE)
        return read(key)

    store.read_copy = read_second_late  # type: ignore[method-assign]
    first = next(found)
    assert waiting.wait(PATIENCE)
    server.identity = b""
    store.clear()
    server.identity = OTHER
    store.write(KEYS[1], 0, ROWS[3])
    replaced.set()
    assert outcomes([first, *found]) == [None, Outcome.MISSING, Outcome.MISSING]
    new = client(address, OTHER)
    assert new.count_stored([KEYS[1]]) == 1
    new.identity = b""
    assert new.count_stored([KEYS[1]]) == 0
    [refused] = new.fetch([KEYS[1]], SIZE)
    assert isinstance(refused, BlockUnavailable) and "are being replaced" in str(refused)
    server.close()


# --- identity


def test_identity_sees_every_byte() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(200))
    described = {
        "model": without_model_path({"_name_or_path": "/here", "layers": 2, "text": {"_name_or_path": "/here"}})
    }
    first = model_identity(model, described)
    assert model_identity(model, {"model": {"layers": 2, "text": {}}}) == first, "the path of the model must not matter"
    assert model_identity(model, {"model": {"layers": 3, "text": {}}}) != first
    with torch.no_grad():
        kept = model[0].weight[123, 45].item()
        model[0].weight[123, 45] += 1e-3
        assert model_identity(model, described) != first
        model[0].weight[123, 45] = kept
        assert model_identity(model, described) == first
        model[1].running_mean[3] = 1
        assert model_identity(model, described) != first


# --- options


@pytest.mark.parametrize("text", ["127.0.0.1:9000", "[::1]:9000", "127.3.4.5:1"])
def test_addresses_of_this_host(text: str) -> None:
    assert str(loopback_address(text)) == text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"listen": "0.0.0.0:9000"}, "tunnel"),
        ({"peer": "192.168.1.7:9000"}, "tunnel"),
        ({"peer": "localhost:9000"}, "such as 127"),
        ({"peer": "127.0.0.1"}, "such as 127"),
        ({"peer": "127.0.0.1:0"}, "port from 1"),
        ({"peer": 9000}, "such as 127"),
        ({"peer": "127.0.0.1:9000", "listen": "127.0.0.1:9000"}, "name another server in 'peer'"),
        ({"peer": "127.0.0.1:9000", "peer_timeout": 0}, "more than 0"),
        ({"peers": "127.0.0.1:9000"}, "did you mean 'peer'"),
    ],
)
def test_invalid_settings_are_rejected(given: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse({"capacity": "1GiB", **given})


def test_keys_beyond_the_limit_are_not_awaited() -> None:
    """The client sends no key, and does not close the connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        BlockConnection(ours, SECONDS).send_request(Request(Kind.HAVE, MODEL, [b""] * (MAX_KEYS + 1)))
        with pytest.raises(WireError, match="other than a request for KV blocks"):
            BlockConnection(theirs, SECONDS).receive_request()


def test_a_received_request_equals_the_sent_one() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        request = Request(Kind.GET, MODEL, list(KEYS))
        BlockConnection(ours, 1).send_request(request)
        assert BlockConnection(theirs, 1).receive_request() == request
