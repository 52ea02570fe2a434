"""Two tiers that talk over loopback, and everything that can go wrong between them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import numpy
import pytest
import torch

from tests.breaking_relay import Fault, Relay
from tests.ports import free_address
from vllm_backplane.errors import BackplaneError, OptionError
from vllm_backplane.kv_offload import peer_server as listening
from vllm_backplane.kv_offload.block_keys import KeyChain
from vllm_backplane.kv_offload.cache_rows import Pages
from vllm_backplane.kv_offload.metadata import Load, Orders, Piece
from vllm_backplane.kv_offload.peer_client import Peer
from vllm_backplane.kv_offload.peer_protocol import BlockLine, Kind, Question, identity
from vllm_backplane.kv_offload.peer_server import Listener
from vllm_backplane.kv_offload.settings import parse
from vllm_backplane.kv_offload.slots import MemorySlots
from vllm_backplane.kv_offload.store import BlockStore, Outcome, Unusable
from vllm_backplane.kv_offload.worker import Carrier
from vllm_backplane.peering import server as answering
from vllm_backplane.peering.addresses import Address, loopback_address
from vllm_backplane.peering.digests import without_origin

SIZE, BLOCKS = 4096, 4
HEAD = 17
"""Bytes before those of a block; before all blocks is one for the status."""
SECONDS = 1.0
"""After which those give up that nobody answers."""
BLOCK_SECONDS = 5.0
"""After which those do that get no more than one block; that one must have come by then, through three threads."""
PATIENCE = 30.0
"""Of those who are to be answered, on a machine that has other work."""
MODEL, OTHER = b"a" * 32, b"b" * 32
KEYS = KeyChain(1, None).up_to(range(BLOCKS), BLOCKS)
ROWS = [numpy.random.default_rng(number).integers(0, 256, SIZE, numpy.uint8) for number in range(BLOCKS)]


def silent(_: str) -> None:
    pass


@pytest.fixture
def store() -> Iterator[BlockStore]:
    made = BlockStore(MemorySlots(BLOCKS, SIZE, 0))
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
    listener = Listener(address, MODEL, store, silent)
    yield address
    listener.close()


def asker(address: Address, model: bytes = MODEL, seconds: float = PATIENCE) -> Peer:
    peer = Peer(address, seconds, silent)
    peer.identity = model
    return peer


def outcomes(found: list[object]) -> list[Outcome | None]:
    return [one.outcome if isinstance(one, Unusable) else None for one in found]


def test_what_one_has_the_other_gets(served: Address) -> None:
    peer = asker(served)
    assert peer.held(KEYS) == 3
    assert peer.held(KEYS[1:]) == 2
    assert peer.held([KEYS[3]]) == 0
    *found, missing = peer.blocks(KEYS, SIZE)
    for row, expected in zip(found, ROWS, strict=False):
        assert not isinstance(row, Unusable)
        assert (row == expected).all()
    assert isinstance(missing, Unusable) and missing.outcome is Outcome.MISSING


def test_another_model_gets_nothing(served: Address) -> None:
    peer = asker(served, OTHER)
    assert outcomes(list(peer.blocks(KEYS, SIZE))) == [Outcome.UNREACHABLE] * BLOCKS
    assert peer.held(KEYS) == 0


def test_a_block_that_is_damaged_where_it_is_kept_is_not_sent(store: BlockStore, served: Address) -> None:
    store._slots.read(1)[100] ^= 1
    assert outcomes(list(asker(served).blocks(KEYS[:3], SIZE))) == [None, Outcome.MISSING, None]


@pytest.mark.parametrize(
    ("fault", "seconds", "expected"),
    [
        (None, PATIENCE, [None] * 3),
        (Fault(1 + (HEAD + SIZE) + HEAD + 500, flip=True), PATIENCE, [None, Outcome.DAMAGED, None]),
        (Fault(SIZE + 500), PATIENCE, [None, Outcome.UNREACHABLE, Outcome.UNREACHABLE]),
        (Fault(SIZE + 500, hang=2 * PATIENCE), BLOCK_SECONDS, [None, Outcome.UNREACHABLE, Outcome.UNREACHABLE]),
        (Fault(0, hang=2 * PATIENCE), SECONDS, [Outcome.UNREACHABLE] * 3),
        (Fault(0, flip=True), PATIENCE, [Outcome.UNREACHABLE] * 3),
        (Fault(1, flip=True), PATIENCE, [Outcome.UNREACHABLE] * 3),
    ],
    ids=["nothing", "a bit", "cut off", "hangs in the middle", "hangs", "no status", "no block"],
)
def test_what_goes_wrong_on_the_way(
    store: BlockStore, fault: Fault | None, seconds: float, expected: list[Outcome | None]
) -> None:
    """With the seconds after which one gives up whom the relay leaves hanging."""
    listener = Listener(free_address(), MODEL, store, silent)
    relay = Relay(Address(*listener._socket.getsockname()), fault)
    began = time.monotonic()
    found = list(asker(relay.address, seconds=seconds).blocks(KEYS[:3], SIZE))
    assert outcomes(found) == expected
    assert time.monotonic() - began < PATIENCE
    for row, wanted in zip(found, ROWS, strict=False):
        assert isinstance(row, Unusable) or (row == wanted).all()
    relay.close()
    listener.close()


def test_who_is_not_there_is_left_alone_for_a_while(served: Address) -> None:
    told: list[str] = []
    peer = Peer(free_address(), SECONDS, told.append)
    peer.identity = MODEL
    assert [peer.held(KEYS), peer.held(KEYS)] == [0, 0]
    assert len(told) == 1, "it was asked twice"


def test_nobody_takes_all_places_for_ever(store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who connect and say nothing are dropped; meanwhile others are told that it is busy."""
    monkeypatch.setattr(answering, "ASKERS", 2)
    monkeypatch.setattr(listening, "QUESTION_SECONDS", 5 * SECONDS)
    address = free_address()
    listener = Listener(address, MODEL, store, silent)
    mute = [socket.create_connection((address.host, address.port)) for _ in range(2)]
    told: list[str] = []
    refused = Peer(address, PATIENCE, told.append)
    refused.identity = MODEL
    assert refused.held(KEYS) == 0
    assert "too many" in told[0] or "reset" in told[0]
    end = time.monotonic() + PATIENCE
    while asker(address).held(KEYS) != 3:
        assert time.monotonic() < end, "they keep their places"
        time.sleep(SECONDS / 10)
    for connection in mute:
        connection.close()
    listener.close()


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n" * 10, b"\0" * 200, b""])
def test_what_is_no_question_is_not_answered(served: Address, sent: bytes) -> None:
    with socket.create_connection((served.host, served.port)) as connection:
        connection.settimeout(5)
        connection.sendall(sent)
        with contextlib.suppress(OSError):  # it has hung up already
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(100) == b""
    assert asker(served).held(KEYS) == 3


def test_a_port_that_is_taken_is_an_error(served: Address, store: BlockStore) -> None:
    with pytest.raises(BackplaneError, match="name another port"):
        Listener(served, MODEL, store, silent)


def test_a_load_from_both_sides(served: Address) -> None:
    """Blocks of the tier and of the other server, and one that neither can give."""
    cache = torch.zeros(8, SIZE // 4)
    own = BlockStore(MemorySlots(1, SIZE, 0))
    own.write(KEYS[0], 0, ROWS[0])
    carrier = Carrier(Pages([cache], 8), own, asker(served), silent)
    pieces = [Piece(key, 7 - place, from_peer=place > 0) for place, key in enumerate(KEYS)]
    carrier.load(Orders(loads=[Load("one", tuple(pieces))]))
    end, complete = time.monotonic() + PATIENCE, set[str]()
    while not complete and time.monotonic() < end:
        complete = carrier.arrived(idle=True)
    assert complete == {"one"}
    for place in range(3):
        assert cache[7 - place].view(torch.uint8).numpy().tobytes() == ROWS[place].tobytes()
    assert not cache[:5].any()
    assert carrier.take_failed_blocks() == {4}
    assert carrier.take_counts() == {"loaded": 1, "fetched": 2, "missing": 1}
    carrier.close()


def test_what_is_under_way_when_weights_change_does_not_count(store: BlockStore) -> None:
    """Neither what has not come yet nor what has been put into the KV cache already."""
    listener = Listener(free_address(), MODEL, store, silent)
    relay = Relay(Address(*listener._socket.getsockname()), Fault(2 * SIZE, hang=PATIENCE))
    cache = torch.zeros(8, SIZE // 4)
    carrier = Carrier(Pages([cache], 8), BlockStore(MemorySlots(1, SIZE, 0)), asker(relay.address), silent)
    pieces = tuple(Piece(key, place, from_peer=True) for place, key in enumerate(KEYS[:3]))
    carrier.load(Orders(loads=[Load("one", pieces)]))
    end = time.monotonic() + PATIENCE
    while not cache[0].any() and time.monotonic() < end:
        assert carrier.arrived(idle=True) == set()
    carrier.forget()
    relay.cut.set()
    complete = set[str]()
    while not complete and time.monotonic() < end:
        complete = carrier.arrived(idle=True)
    assert complete == {"one"}
    assert carrier.take_failed_blocks() == {0, 1, 2}
    carrier.close()
    relay.close()
    listener.close()


# --- identity


def test_identity_sees_every_byte() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(200))
    described = {"model": without_origin({"_name_or_path": "/here", "layers": 2, "text": {"_name_or_path": "/here"}})}
    first = identity(model, described)
    assert identity(model, {"model": {"layers": 2, "text": {}}}) == first, "where it was read from does not matter"
    assert identity(model, {"model": {"layers": 3, "text": {}}}) != first
    with torch.no_grad():
        kept = model[0].weight[123, 45].item()
        model[0].weight[123, 45] += 1e-3
        assert identity(model, described) != first
        model[0].weight[123, 45] = kept
        assert identity(model, described) == first
        model[1].running_mean[3] = 1
        assert identity(model, described) != first


# --- options


@pytest.mark.parametrize("text", ["127.0.0.1:9000", "[::1]:9000", "127.3.4.5:1"])
def test_addresses_of_this_host(text: str) -> None:
    assert str(loopback_address(text)) == text


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"listen": "0.0.0.0:9000"}, "tunnel"),
        ({"peer": "192.168.1.7:9000"}, "tunnel"),
        ({"peer": "localhost:9000"}, "such as 127"),
        ({"peer": "127.0.0.1"}, "such as 127"),
        ({"peer": "127.0.0.1:0"}, "port from 1"),
        ({"peer": 9000}, "such as 127"),
        ({"peer": "127.0.0.1:9000", "listen": "127.0.0.1:9000"}, "does not ask itself"),
        ({"peer": "127.0.0.1:9000", "peer_timeout": 0}, "more than 0"),
        ({"peers": "127.0.0.1:9000"}, "did you mean 'peer'"),
    ],
)
def test_what_settings_cannot_say(given: dict[str, object], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        parse({"capacity": "1GiB", **given})


def test_a_question_is_what_was_asked() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        asked = Question(Kind.GET, MODEL, list(KEYS))
        BlockLine(ours, 1).ask(asked)
        assert BlockLine(theirs, 1).asked() == asked
