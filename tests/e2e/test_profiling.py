"""Tests profiling over HTTP: the trace has nested ranges of steps, layers and operators.

The commands and requests are those of docs/serve/profiling.md.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from processes import SIM
from server import LIMITS, Server

pytestmark = [pytest.mark.server, pytest.mark.models]

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serve" / "profiling.md").read_text()
LAYERS = {"cpu": 30, "sim": 4}
TOKENS = 4
VARIABLES = {
    "cpu": {},
    "sim": SIM,
}


class Served(NamedTuple):
    """Holds a server, the folder of its traces, and the number of layers of its model."""

    server: Server
    traces: Path
    layers: int


class Range(NamedTuple):
    """Describes a named range of time in one thread of a trace."""

    thread: tuple[object, object]
    begin: float
    end: float
    name: str

    def contains(self, other: Range) -> bool:
        """Returns whether `other` is within this range, in the same thread."""
        return self.thread == other.thread and self.begin <= other.begin and other.end <= self.end


@pytest.fixture(scope="module", params=["cpu", pytest.param("sim", marks=pytest.mark.exhaustive)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(device: str, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(device)
    traces = folder / "traces"
    [documented] = re.findall(r"^vllm-backplane serve (.*)$", PAGE, re.MULTILINE)
    cache = ("--kv-cache-memory-bytes", str(32 << 20))
    model = () if device == "cpu" else (str(tiny_llama),)  # on cpu the default model, as on the page
    arguments = (*model, *documented.replace("/path/to/traces", str(traces)).split(), *LIMITS, *cache)
    with Server(folder, *arguments, variables=VARIABLES[device]) as running:
        assert f"Operators on device {device}:" in running.text()
        yield Served(running, traces, LAYERS[device])


def run_page(server: Server) -> str:
    """Runs the commands of the page, and returns the text that was generated during the trace."""
    commands = re.findall(r"^curl -s -X POST http://127\.0\.0\.1:8000(\S+)(?: -H .* -d '(.*)')?$", PAGE, re.MULTILINE)
    assert [path for path, _ in commands] == ["/start_profile", "/v1/completions", "/stop_profile"]
    text = ""
    for path, body in commands:
        response = server.http.post(path, **({"json": json.loads(body)} if body else {}))
        assert response.status_code == 200, response.text
        if body:
            text = response.json()["choices"][0]["text"]
    return text


def ranges(folder: Path) -> list[Range]:
    """Returns the ranges of the worker's trace, whose events must have the fields that Perfetto requires."""
    [file] = folder.glob("*rank0*.pt.trace.json.gz")
    with gzip.open(file, "rt") as opened:
        events = json.load(opened)["traceEvents"]
    assert all("ph" in event and "name" in event for event in events)
    complete = [event for event in events if event["ph"] == "X"]
    return [
        Range((event["pid"], event["tid"]), event["ts"], event["ts"] + event["dur"], event["name"])
        for event in complete
    ]


@pytest.mark.feature("Serving: /start_profile and /stop_profile", "{device}")
def test_a_trace_has_steps_layers_and_operators(served: Served) -> None:
    request = {"prompt": "Once upon a time", "max_tokens": TOKENS, "temperature": 0}
    before = served.server.http.post("/v1/completions", json=request).json()["choices"][0]["text"]
    assert run_page(served.server) == before
    assert served.server.http.post("/v1/completions", json=request).json()["choices"][0]["text"] == before
    found = ranges(served.traces)
    steps = [one for one in found if one.name == "step"]
    assert len(steps) == TOKENS, "the trace must not contain the requests before and after it"
    assert sum(one.name == "sample" for one in found) == TOKENS
    layer = re.compile(r"model\.layers\.\d+ \(LlamaDecoderLayer\)")
    for step in steps:
        inside = [one for one in found if step.contains(one)]
        assert any(one.name.startswith("execute_context_") for one in inside), "vLLM's own range must exist"
        layers = [one for one in inside if layer.fullmatch(one.name)]
        assert len(layers) == len({one.name for one in layers}) == served.layers
        for one in layers:
            names = {each.name for each in inside if one.contains(each)}
            number = one.name.split(" ")[0]
            assert {f"{number}.self_attn (LlamaAttention)", f"{number}.mlp (LlamaMLP)"} <= names
            assert len({name for name in names if name.startswith("backplane::")}) >= 4, names


def test_an_unusable_folder_is_an_error_and_serving_goes_on(served: Served) -> None:
    """Tests a folder that cannot be written to. It must be the last test, because it removes the folder."""
    shutil.rmtree(served.traces)
    served.traces.write_text("in the way")
    refused = served.server.http.post("/start_profile")
    assert refused.status_code == 500
    assert "traces cannot be written to" in refused.json()["error"]["message"]
    served.traces.unlink()
    # A new client, because the server closes the connection after an error 500.
    client = served.server.client()
    [model] = client.models.list().data
    completion = client.completions.create(model=model.id, prompt="Once", max_tokens=2)
    assert completion.usage is not None and completion.usage.completion_tokens == 2
