"""Tests that a server without a checkpoint loads its weights from a running server (docs/serve/weights-from-a-peer.md).

On sim the model has latent attention and experts, whose weights become other tensors after loading.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reference
from architectures import ARCHITECTURES
from processes import SIM, Child
from server import COMMAND, LIMITS, Server

from tests.breaking_relay import Fault, Relay
from tests.ports import free_address, free_port

pytestmark = [pytest.mark.server, pytest.mark.models]

FEATURE = "Weights: from a running instance"
TOKENS = 12
PROMPTS = [[3, 77, 401, 12], [(17 * place + place * place) % 500 + 5 for place in range(40)], [7, 300, 21, 90, 44]]
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serve" / "weights-from-a-peer.md").read_text()
OTHER_LIMITS = ("--max-model-len", "192", "--max-num-seqs", "3", "--max-num-batched-tokens", "48", "--dtype", "float32")
"""Options of the new server. Options that do not affect weights may differ."""
NAMED = ("--served-model-name", "tiny", "--skip-tokenizer-init")
DEVICES = {
    "cpu": {"BACKPLANE_MEMORY_SHARE": "0.2"},
    "sim": SIM,
}


@pytest.fixture(scope="module", params=["cpu", pytest.param("sim", marks=pytest.mark.exhaustive)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Model:
    """Holds a model with expected outputs, its checkpoint, and a copy of the folder without weights."""

    def __init__(self, folder: Path, without: Path, made: Any) -> None:
        self.folder, self.without_weights = folder, without
        self.size = (folder / "model.safetensors").stat().st_size
        for file in folder.iterdir():
            if file.suffix != ".safetensors":
                shutil.copy(file, without)
        assert (without / "config.json").is_file() and not list(without.glob("*.safetensors"))
        self.expected = [reference.continue_without_cache(made, prompt, TOKENS) for prompt in PROMPTS]
        assert min(one.smallest_margin for one in self.expected) > 1e-3, "near a tie; change the prompts"


@pytest.fixture(scope="module")
def model(device: str, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    without = tmp_path_factory.mktemp("no-weights")
    if device == "cpu":
        return Model(tiny_llama, without, reference.load(tiny_llama))
    folder = tmp_path_factory.mktemp("model")
    return Model(folder, without, ARCHITECTURES["MLA (DeepSeek)"].save(folder))


def documented(option: str) -> dict[str, Any]:
    """Returns the value of an option in the commands of the page."""
    [text] = re.findall(rf"^vllm-backplane serve .*{option} '(.*)'$", PAGE, re.MULTILINE)
    return dict(json.loads(text))


class Source:
    """Holds a running server that offers its weights, and the relay to it."""

    def __init__(self, folder: Path, log: Path, device: str) -> None:
        listen, given = free_address(), documented("--additional-config")
        assert given["backplane"]["weights_listen"] == documented("--model-loader-extra-config")["peer"]
        given["backplane"]["weights_listen"] = str(listen)
        arguments = (str(folder), *NAMED, *LIMITS, "--additional-config", json.dumps(given))
        self.server = Server(log, *arguments, variables=DEVICES[device])
        self.relay = Relay(listen)


@pytest.fixture(scope="module")
def source(device: str, model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    made = Source(model.folder, tmp_path_factory.mktemp("source"), device)
    with made.server:
        yield made
    made.relay.close()


def arguments(source: Source, folder: Path, **extra: Any) -> tuple[str, ...]:
    """Returns the arguments of a server that loads its weights through the relay."""
    loading = documented("--model-loader-extra-config") | {"peer": str(source.relay.address), **extra}
    format_ = ("--load-format", "backplane_peer", "--model-loader-extra-config", json.dumps(loading))
    return (str(folder), *NAMED, *OTHER_LIMITS, *format_)


@pytest.mark.feature(FEATURE, "{device}")
def test_a_server_without_a_checkpoint(source: Source, device: str, model: Model, tmp_path: Path) -> None:
    """Tests loading over a connection that breaks once in the middle."""
    source.relay.faults = {1: Fault(after=model.size // 2)}
    given = arguments(
        source, model.without_weights, timeout=60
    )  # long, so that only the broken connection causes a retry
    with Server(tmp_path, *given, variables=DEVICES[device]) as server:
        for prompt, one in zip(PROMPTS, model.expected, strict=True):
            assert server.complete(prompt, TOKENS)["token_ids"] == one.token_ids
            assert source.server.complete(prompt, TOKENS)["token_ids"] == one.token_ids
        log = server.text()
    assert source.relay.connections == 3
    assert re.search(r"; retrying in 0\.5 s, from tensor [1-9]", log)
    received = re.search(r"Weights: (\S+) MiB in \d+ tensors received from " + str(source.relay.address), log)
    assert received is not None
    assert float(received[1]) * 2**20 > 0.95 * model.size


@pytest.mark.feature(FEATURE, "{device}")
@pytest.mark.parametrize("device", ["cpu", pytest.param("sim", marks=pytest.mark.exhaustive)], indirect=True)
def test_the_running_server_is_killed_in_the_middle(source: Source, device: str, model: Model, tmp_path: Path) -> None:
    """Tests the error if the source ends during loading. It must be the last test, because it kills the source."""
    source.relay.faults = {source.relay.connections + 1: Fault(after=model.size // 2, then=source.server.kill)}
    command = [COMMAND, "serve", *arguments(source, model.without_weights, attempts=2), "--port", str(free_port())]
    with Child(command, tmp_path / "server.log", DEVICES[device], warm=True) as child:
        assert child.wait(400) != 0
        log = child.text()
    assert f"the weights could not be fetched from {source.relay.address}" in log
    assert "2 attempts" in log and "or load from the checkpoint by removing --load-format" in log
