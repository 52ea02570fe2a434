"""Tests model families over HTTP: those with their own routes, and further kinds of decoders.

The commands and requests are those of docs/serve/model-families.md, with tiny models of random weights. The outputs
must be those of transformers. Two servers run at a time.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import multimodal_models
import multimodal_reference
import pytest
from architectures import ARCHITECTURES
from multimodal_reference import TOKENS, Models
from processes import START_METHOD
from server import Server
from test_architectures import DEVICES, LOGPROB_TOLERANCE, PROMPTS
from test_architectures import TOKENS as DECODED
from test_architectures import answers as of_decoder

pytestmark = pytest.mark.server

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serve" / "model-families.md").read_text()
OPTIONS = dict(re.findall(r"^vllm-backplane serve /path/to/(\S+)(.*)$", PAGE, re.MULTILINE))
"""Options of the commands on the page, by model."""
LIMITS = ("--max-num-seqs", "4", "--dtype", "float32", "--max-num-batched-tokens")
CACHE = ("--kv-cache-memory-bytes", str(32 << 20))
"""An explicit size of the KV cache. Otherwise two servers that start at the same time would each take half of the free
memory."""
SOUNDS, PICTURES = [1, 2, 3], [1, 2, 2]
OTHER_QUESTION = "how many cats do you see, and where?"
DECODERS = [
    ("Mamba", "sim"),
    ("Mamba2", "cpu"),
    ("a hybrid of Mamba and attention", "cpu"),
    ("gated delta net (Qwen-Next)", "sim"),
    ("MLA (DeepSeek)", "cpu"),
    ("MLA (DeepSeek)", "sim"),
    ("Qwen-MoE", "sim"),
    ("Gemma2: every second layer sees a window", "sim"),
    ("GPT-OSS: sinks", "cpu"),
]
"""Decoders and the device on which each is served. test_architectures.py tests all of them on both devices, without
HTTP. test_expert_parallel.py serves Mixtral."""

ON_ONE_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("sim", marks=pytest.mark.exhaustive)])
"""Marks tests of models that test_multimodal_models.py and test_embeddings.py also run on sim, without HTTP."""


def documented(route: str) -> Any:
    """Returns the body of the request to a route on the page, or its form fields."""
    curl = argparse.ArgumentParser()
    curl.add_argument("-s", action="store_true")
    curl.add_argument("address")
    curl.add_argument("-H")
    curl.add_argument("-d", type=json.loads)
    curl.add_argument("-F", action="append", type=lambda text: text.split("=", 1))
    lines = re.findall(r"^curl (.*)$", PAGE.replace("\\\n", " "), re.MULTILINE)
    requests = [curl.parse_args(shlex.split(line)) for line in lines]
    [found] = [request for request in requests if request.address == f"http://127.0.0.1:8000{route}"]
    return found.d or dict(found.F)


def post(server: Server, route: str, **given: Any) -> Any:
    """Sends a request, which must succeed, and returns the body of the response."""
    response = server.http.post(route, **given)
    assert response.status_code == 200, response.text
    return response.json()


def concurrently(send: Callable[[Any], Any], given: list[Any]) -> list[Any]:
    """Calls a function with each of `given` at the same time, and returns the results."""
    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(send, given))


def rank(server: Server) -> tuple[Any, Any]:
    """Returns the results of /rerank, and of /score for the same texts."""
    request = documented("/rerank")
    scored = {"text_1": request["query"], "text_2": request["documents"]}
    return post(server, "/rerank", json=request)["results"], post(server, "/score", json=scored)["data"]


def transcribe(server: Server) -> list[Any]:
    """Returns the transcriptions of all sounds."""
    request = documented("/v1/audio/transcriptions")
    name = request.pop("file").removeprefix("@")
    files = [{"file": (name, multimodal_models.as_wav(multimodal_models.sound_int16(number)))} for number in SOUNDS]
    return concurrently(lambda file: post(server, "/v1/audio/transcriptions", data=request, files=file), files)


def questions() -> list[str]:
    """Returns a question for each of PICTURES: that of the page for the first two, and another one for the last."""
    [message] = documented("/v1/chat/completions")["messages"]
    [question] = [part["text"] for part in message["content"] if part["type"] == "text"]
    return [question, question, OTHER_QUESTION]


def describe_pictures(server: Server) -> list[Any]:
    """Returns the choices of chat completions about all pictures."""
    bodies = []
    for number, question in zip(PICTURES, questions(), strict=True):
        body = documented("/v1/chat/completions")
        for part in body["messages"][0]["content"]:
            if part["type"] == "text":
                part["text"] = question
            else:
                part["image_url"]["url"] = multimodal_models.as_data_url(multimodal_models.picture(number))
        bodies.append(body | {"ignore_eos": True, "logprobs": True, "return_token_ids": True})
    return concurrently(lambda body: post(server, "/v1/chat/completions", json=body)["choices"][0], bodies)


def decode(server: Server) -> list[Any]:
    """Returns the tokens of completions of all prompts."""
    request = documented("/v1/completions")
    assert (request["prompt"], request["max_tokens"]) == (PROMPTS[0], DECODED)
    bodies = [request | {"prompt": prompt} for prompt in PROMPTS]
    return concurrently(lambda body: post(server, "/v1/completions", json=body)["choices"][0]["token_ids"], bodies)


MULTIMODAL: dict[str, tuple[Callable[[Server], Any], tuple[str, ...]]] = {
    "reranker": (rank, ("256", "--max-model-len", "256")),
    "whisper": (transcribe, ("256", "--max-model-len", "64", *CACHE)),
    "blip2": (describe_pictures, ("256", "--max-model-len", "128", *CACHE)),
}
"""The function that sends the requests, and the limits of the server (first the tokens of a step), by model."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return multimodal_reference.save(tmp_path_factory.mktemp("multimodal"))


@pytest.fixture(scope="module")
def answers(
    request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, str], Any]]:
    """Returns a function of model and device that returns the responses.

    Only the models and devices of the selected tests are served.
    """

    def serve(logs: Path, model: str, device: str) -> Any:
        if model in MULTIMODAL:
            folder, option = models.folder / model, OPTIONS[model]
            send, limits = MULTIMODAL[model]
        else:
            folder, option = logs / "model", OPTIONS["decoder"]
            # With 64 tokens per step, long prompts have several chunks and share steps with other prompts.
            send, limits = decode, ("64", "--max-model-len", "256", *CACHE)
        variables: dict[str, str | None] = {**DEVICES[device]}
        if model == "whisper":  # vLLM warns about a forked Whisper
            variables[START_METHOD] = None
        with Server(logs, str(folder), *shlex.split(option), *LIMITS, *limits, variables=variables) as server:
            found = send(server)
            assert f"Operators on device {device}:" in server.text()
        return found

    here = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    chosen = [(item.callspec.params["model"], item.callspec.params["device"]) for item in here]
    logs = {work: tmp_path_factory.mktemp("served") for work in chosen}
    for model, device in chosen:
        if model in ARCHITECTURES:
            ARCHITECTURES[model].save(logs[model, device] / "model")  # before threads share the random generator
            of_decoder(model)
    with ThreadPoolExecutor(2) as pool:
        futures: dict[tuple[str, str], Future[Any]] = {work: pool.submit(serve, logs[work], *work) for work in chosen}
        yield lambda model, device: futures[model, device].result()


@pytest.mark.feature("Model family: encoder-only: a reranker", "{device}")
@pytest.mark.feature("Model family: over HTTP: a reranker (/rerank, /score)", "{device}")
@pytest.mark.parametrize("model", ["reranker"])
@ON_ONE_DEVICE
def test_a_reranker(models: Models, answers: Callable[[str, str], Any], model: str, device: str) -> None:
    request = documented("/rerank")
    expected = multimodal_reference.scores(models, request["query"], request["documents"])
    ranked, scored = answers(model, device)
    assert [one["score"] for one in scored] == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
    best_first = sorted(range(len(expected)), key=lambda place: -expected[place])
    assert [one["index"] for one in ranked] == best_first
    assert [one["relevance_score"] for one in ranked] == pytest.approx(
        [expected[place] for place in best_first], abs=LOGPROB_TOLERANCE
    )


@pytest.mark.feature("Model family: over HTTP: encoder-decoder (/v1/audio/transcriptions)", "{device}")
@pytest.mark.parametrize("model", ["whisper"])
@ON_ONE_DEVICE
def test_sound(models: Models, answers: Callable[[str, str], Any], model: str, device: str) -> None:
    assert find_spec("soundfile"), "vLLM needs the package soundfile to read sound; run make setup"
    assert documented("/v1/audio/transcriptions")["max_completion_tokens"] == str(TOKENS)
    sounds = [(multimodal_models.sound_int16(number) / 32768).astype("float32") for number in SOUNDS]
    outputs = multimodal_reference.require_distinct([multimodal_reference.of_sound(models, one) for one in sounds])
    for response, expected in zip(answers(model, device), outputs, strict=True):
        assert max(expected.token_ids) < multimodal_models.WORDS, "the text omits special tokens; change the seed"
        assert [int(word) for word in response["text"].split()] == expected.token_ids


@pytest.mark.feature("Model family: vision and language", "{device}")
@pytest.mark.feature("Model family: over HTTP: vision and language (/v1/chat/completions)", "{device}")
@pytest.mark.parametrize("model", ["blip2"])
@pytest.mark.parametrize("device", DEVICES)
def test_pictures(models: Models, answers: Callable[[str, str], Any], model: str, device: str) -> None:
    assert documented("/v1/chat/completions")["max_tokens"] == TOKENS
    given = zip(map(multimodal_models.picture, PICTURES), questions(), strict=True)
    outputs = multimodal_reference.require_distinct([multimodal_reference.of_picture(models, *one) for one in given])
    for choice, expected in zip(answers(model, device), outputs, strict=True):
        assert choice["token_ids"] == expected.token_ids
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE)


@pytest.mark.feature("Model family: over HTTP: decoders of every further kind, most on one device", "{device}")
@pytest.mark.parametrize(("model", "device"), DECODERS)
def test_a_decoder(answers: Callable[[str, str], Any], model: str, device: str) -> None:
    assert answers(model, device) == [expected.token_ids for expected in of_decoder(model)]
