"""Checks the transfer of weights from one model to another over loopback, with all faults that can occur in it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig, FusedMoEQuantDesc

from tests.breaking_relay import Fault, Relay
from tests.ports import free_address
from vllm_backplane.errors import BackplaneError, OptionError
from vllm_backplane.peering import server as loopback_server
from vllm_backplane.peering.addresses import Address
from vllm_backplane.peering.connection import Connection, WireError
from vllm_backplane.weights import peer_loader as loader
from vllm_backplane.weights import weights_client, weights_server
from vllm_backplane.weights.load_formats import PeerSettings, parse_peer_settings
from vllm_backplane.weights.model_tensors import model_tensors
from vllm_backplane.weights.weights_client import WeightsClient
from vllm_backplane.weights.weights_protocol import Kind, Manifest, receive_manifest
from vllm_backplane.weights.weights_server import WeightsServer, build_manifest

SECONDS = 5.0
DESCRIPTION: dict[str, Any] = {"model": {"layers": 2}, "--dtype": "torch.float32"}


def made(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).requires_grad_(False)
    model.register_buffer("scale", torch.rand(3, dtype=torch.bfloat16))
    model.turned = torch.rand(8, 5).t()
    model.rows = 64
    model.kind = Kind.GET
    model.limit = float("nan")
    return model


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def server() -> Iterator[tuple[WeightsServer, Address]]:
    address = free_address()
    made_server = WeightsServer(address, *build_manifest(made(1), DESCRIPTION), lambda: None, lambda _: None)
    yield made_server, address
    made_server.close()


@pytest.fixture
def relay(server: tuple[WeightsServer, Address], monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    monkeypatch.setattr(weights_client, "RETRY_SECONDS", 0.01)
    made_relay = Relay(server[1])
    yield made_relay
    made_relay.close()


def fetch(address: Address, warnings: list[str], attempts: int = 3) -> torch.nn.Module:
    client, model = WeightsClient(address, SECONDS, attempts, warnings.append), made(2)
    manifest = client.fetch_manifest()
    client.fetch_tensors(manifest, loader.matching_tensors(manifest, model, str(address)))
    return model


def assert_same(model: torch.nn.Module) -> None:
    expected, got = model_tensors(made(1))[0], model_tensors(model)[0]
    assert list(expected) == list(got) and len(got) == 10
    assert all(torch.equal(expected[path], got[path]) for path in expected)


def test_all_that_a_model_holds(relay: Relay, warnings: list[str]) -> None:
    assert_same(fetch(relay.address, warnings))
    assert not warnings and relay.connections == 2


@pytest.mark.parametrize(
    "fault",
    [
        Fault(after=20_000),
        Fault(after=0),
        Fault(after=40_000, flip=True),
        pytest.param(Fault(after=20_000, hang=2 * SECONDS), marks=pytest.mark.slow),
    ],
    ids=["cut", "cut at once", "damaged", "hangs"],
)
def test_what_breaks_off_is_requested_again(relay: Relay, warnings: list[str], fault: Fault) -> None:
    relay.faults = {1: fault}
    assert_same(fetch(relay.address, warnings))
    assert relay.connections == 3
    [line] = warnings
    # A weight has 16384 bytes, a bias 256.
    reached = {0: 0, 20_000: 3, 40_000: 5}[fault.after]
    assert f"from tensor {reached} on" in line and str(relay.address) in line


def test_a_peer_that_keeps_breaking_off_is_given_up(relay: Relay, warnings: list[str]) -> None:
    relay.faults = {number: Fault(after=100) for number in range(1, 20)}
    with pytest.raises(
        BackplaneError, match=rf"could not be fetched from {relay.address}: the peer closed the connection .*3 att"
    ):
        fetch(relay.address, warnings)
    assert relay.connections == 4


def test_a_peer_that_gets_on_is_not_given_up(relay: Relay, warnings: list[str]) -> None:
    """Each attempt receives some tensors."""
    relay.faults = {number: Fault(after=17_000) for number in range(1, 6)}
    assert_same(fetch(relay.address, warnings, attempts=2))
    assert relay.connections > 4


def test_a_peer_that_is_not_there_is_an_error(warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_client, "RETRY_SECONDS", 0.01)
    address = free_address()
    with pytest.raises(BackplaneError, match=rf"{address}: .*refused .* check that the server runs, or load from the"):
        fetch(address, warnings)
    assert len(warnings) == 2


def test_other_weights_meanwhile(server: tuple[WeightsServer, Address], relay: Relay, warnings: list[str]) -> None:
    relay.faults = {1: Fault(after=20_000, then=server[0].invalidate)}
    with pytest.raises(BackplaneError, match=r"has reloaded its weights .* restart it"):
        fetch(relay.address, warnings)


def test_too_many_at_once_wait(
    server: tuple[WeightsServer, Address], relay: Relay, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loopback_server, "WAIT_SECONDS", 0.1)  # less than the client waits
    taken = [server[0]._free_places.acquire() for _ in range(8)]
    assert all(taken)
    with pytest.raises(BackplaneError, match="the server is busy"):
        fetch(relay.address, warnings)
    server[0]._free_places.release()
    assert_same(fetch(relay.address, warnings))
    for _ in taken[1:]:
        server[0]._free_places.release()


def test_something_else_listens(warnings: list[str]) -> None:
    address = free_address()
    with socket.create_server((address.host, address.port)) as other:

        def answer() -> None:
            for _ in range(2):
                connection, _peer = other.accept()
                with connection:
                    connection.recv(100)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(BackplaneError, match="72 is not a known status"):
            WeightsClient(address, SECONDS, 2, warnings.append).fetch_manifest()


def test_a_question_that_is_none(server: tuple[WeightsServer, Address], monkeypatch: pytest.MonkeyPatch) -> None:
    # Long enough that the server closes the connection because of its content, and not because of the deadline.
    monkeypatch.setattr(weights_server, "REQUEST_SECONDS", 300.0)
    with socket.create_connection((server[1].host, server[1].port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n" + bytes(100))
        connection.settimeout(60)
        with contextlib.suppress(ConnectionResetError):  # the server had not read all bytes
            assert connection.recv(10) == b""


def test_a_deep_manifest_is_an_error_of_the_connection() -> None:
    with pytest.raises(WireError, match=r"an invalid manifest \(RecursionError"):
        Manifest.decode(b"[" * 100_000)


def test_a_manifest_that_is_announced_as_huge_is_not_awaited() -> None:
    """The peer sends no more than the length, and does not close the connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"\xff" * 4)
        with pytest.raises(WireError, match="the manifest has 4294967295 bytes, more than 268435456"):
            receive_manifest(Connection(ours, SECONDS))


@pytest.mark.parametrize(
    ("name", "value", "difference"),
    [
        ("rows", 65, "rows is '64' there and '65' here"),
        ("more", torch.ones(2), r"more is None there and \('torch.float32', \(2,\)\) here"),
        ("turned", torch.rand(5, 9), r"turned is .*\(5, 8\)\) there and .*\(5, 9\)\) here"),
        ("scale", torch.ones(3), r"scale is .*bfloat16.* there and .*float32.* here"),
    ],
    ids=["number", "tensor", "shape", "type"],
)
def test_what_was_made_of_the_weights_differs(name: str, value: Any, difference: str) -> None:
    manifest, _ = build_manifest(made(1), DESCRIPTION)
    model = made(2)
    assert loader.matching_tensors(manifest, model, "here")
    setattr(model, name, value)
    with pytest.raises(
        BackplaneError, match=f"in another way than this server would: {difference}; load from the checkpoint"
    ):
        loader.matching_tensors(manifest, model, "here")


def test_what_a_head_reads_is_not_compared() -> None:
    """vLLM sets it after loading: the running server has it, and the new one does not have it yet."""
    offered, model = made(1), made(2)
    offered.aux_hidden_state_layers, model.aux_hidden_state_layers = (2, 5, 8), ()
    assert loader.matching_tensors(build_manifest(offered, DESCRIPTION)[0], model, "here")


def configured(tokens: int, scale: torch.Tensor) -> torch.nn.Module:
    """Returns a model with two configurations of vLLM's MoE layers, one of which holds a tensor."""
    experts, quantized = FusedMoEConfig.__new__(FusedMoEConfig), FusedMoEQuantConfig.__new__(FusedMoEQuantConfig)
    experts.max_num_tokens, experts.is_lora_enabled = tokens, tokens > 64
    quantized._w1, quantized._a1 = FusedMoEQuantDesc(scale=scale), FusedMoEQuantDesc()
    model = made(1)
    model.moe_config, model.moe_quant_config, model.max_num_batched_tokens = experts, quantized, tokens
    return model


def test_options_that_do_not_touch_weights_are_not_compared() -> None:
    offered, model = configured(64, torch.ones(3)), configured(128, torch.zeros(3))
    manifest, _ = build_manifest(offered, DESCRIPTION)
    tensors = dict(
        zip((one.path for one in manifest.tensors), loader.matching_tensors(manifest, model, "here"), strict=True)
    )
    assert tensors["moe_quant_config._w1.scale"] is model.moe_quant_config._w1.scale
    assert not any("moe" in path or "tokens" in path for path in manifest.scalars)


def test_one_number_that_stands_for_many() -> None:
    offered, model = made(1), made(2)
    offered.spread = torch.ones(3, 4)
    model.spread = torch.ones(1, 4).expand(3, 4)
    with pytest.raises(BackplaneError, match=r"spread cannot be received: .* \(an expanded tensor\); load from the"):
        loader.matching_tensors(build_manifest(offered, DESCRIPTION)[0], model, "here")


def test_another_model_or_another_way() -> None:
    loader.require_compatible(DESCRIPTION, dict(DESCRIPTION), "here")
    with pytest.raises(
        BackplaneError, match="at here serves another model: layers is 2 there and 3 here; name a server"
    ):
        loader.require_compatible(DESCRIPTION, DESCRIPTION | {"model": {"layers": 3}}, "here")
    with pytest.raises(
        BackplaneError, match=r"make its weights different: --dtype is .*float32' there and .*bfloat16' here"
    ):
        loader.require_compatible(DESCRIPTION, DESCRIPTION | {"--dtype": "torch.bfloat16"}, "here")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "lacks 'peer'"),
        ({"peer": "10.0.0.1:9"}, "expected an address of this host"),
        ({"peer": "127.0.0.1:9", "atempts": 2}, "did you mean 'attempts'"),
        ({"peer": "127.0.0.1:9", "attempts": 0}, "a whole number of at least 1"),
        ({"peer": "127.0.0.1:9", "timeout": 0}, "'timeout' .* expected seconds"),
    ],
)
def test_settings(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_peer_settings(given)
    assert parse_peer_settings({"peer": "127.0.0.1:9", "timeout": 2}) == PeerSettings(Address("127.0.0.1", 9), 2.0, 4)
