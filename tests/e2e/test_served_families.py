"""Families with routes of their own, and a decoder of each further kind, over HTTP: what transformers compute.

docs/serve/model-families.md has the commands and the requests; those here are the same, with tiny models of random
weights.
Two servers at a time are started, asked and ended.
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

import perceiving
import perceiving_reference
import pytest
from architectures import ARCHITECTURES
from perceiving_reference import TOKENS, Models
from server import Server
from test_architectures import DEVICES, LOGPROB_TOLERANCE, PROMPTS
from test_architectures import TOKENS as DECODED
from test_architectures import answers as of_decoder

pytestmark = pytest.mark.server

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serve" / "model-families.md").read_text()
OPTIONS = dict(re.findall(r"^vllm-backplane serve /path/to/(\S+)(.*)$", PAGE, re.MULTILINE))
"""Of the page's commands, by model."""
LIMITS = ("--max-num-seqs", "4", "--dtype", "float32", "--max-num-batched-tokens")
CACHE = ("--kv-cache-memory-bytes", str(32 << 20))
"""Two servers that start at once would each take half of what is free."""
FORK = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
"""Not spawned: each process would import all of vLLM again."""
SOUNDS, PICTURES = [1, 2, 3], [1, 2, 2]
ELSE_ASKED = "how many cats do you see, and where?"
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
"""Each on a device, or on both: test_architectures.py has all of them on both, in one process. Mixtral is served by
test_expert_parallel.py."""


def documented(route: str) -> Any:
    """The body of the page's request to a route, or the fields of a form."""
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
    answer = server.http.post(route, **given)
    assert answer.status_code == 200, answer.text
    return answer.json()


def at_once(ask: Callable[[Any], Any], given: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(ask, given))


def rank(server: Server) -> tuple[Any, Any]:
    asked = documented("/rerank")
    scored = {"text_1": asked["query"], "text_2": asked["documents"]}
    return post(server, "/rerank", json=asked)["results"], post(server, "/score", json=scored)["data"]


def transcribe(server: Server) -> list[Any]:
    asked = documented("/v1/audio/transcriptions")
    name = asked.pop("file").removeprefix("@")
    files = [{"file": (name, perceiving.as_file(perceiving.recorded(number)))} for number in SOUNDS]
    return at_once(lambda file: post(server, "/v1/audio/transcriptions", data=asked, files=file), files)


def questions() -> list[str]:
    """The page's is asked of two pictures, and another one of the second."""
    [message] = documented("/v1/chat/completions")["messages"]
    [asked] = [part["text"] for part in message["content"] if part["type"] == "text"]
    return [asked, asked, ELSE_ASKED]


def look(server: Server) -> list[Any]:
    bodies = []
    for number, question in zip(PICTURES, questions(), strict=True):
        body = documented("/v1/chat/completions")
        for part in body["messages"][0]["content"]:
            if part["type"] == "text":
                part["text"] = question
            else:
                part["image_url"]["url"] = perceiving.as_address(perceiving.picture(number))
        bodies.append(body | {"ignore_eos": True, "logprobs": True, "return_token_ids": True})
    return at_once(lambda body: post(server, "/v1/chat/completions", json=body)["choices"][0], bodies)


def decode(server: Server) -> list[Any]:
    asked = documented("/v1/completions")
    assert (asked["prompt"], asked["max_tokens"]) == (PROMPTS[0], DECODED)
    bodies = [asked | {"prompt": prompt} for prompt in PROMPTS]
    return at_once(lambda body: post(server, "/v1/completions", json=body)["choices"][0]["token_ids"], bodies)


PERCEIVING: dict[str, tuple[Callable[[Server], Any], tuple[str, ...]]] = {
    "reranker": (rank, ("256", "--max-model-len", "256")),
    "whisper": (transcribe, ("256", "--max-model-len", "64", *CACHE)),
    "blip2": (look, ("256", "--max-model-len", "128", *CACHE)),
}
"""What is asked of a model, and its limits: at first the tokens of a step."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return perceiving_reference.save(tmp_path_factory.mktemp("perceiving"))


@pytest.fixture(scope="module")
def answers(
    request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, str], Any]]:
    """Of a model on a device; of those that tests ask for."""

    def serve(logs: Path, model: str, device: str) -> Any:
        if model in PERCEIVING:
            folder, option = models.folder / model, OPTIONS[model]
            ask, limits = PERCEIVING[model]
        else:
            folder, option = logs / "model", OPTIONS["decoder"]
            # The prompts take several steps, and meet in them.
            ask, limits = decode, ("64", "--max-model-len", "256", *CACHE)
        variables = DEVICES[device] | ({} if model == "whisper" else FORK)  # vLLM warns of Whisper in forked processes
        with Server(logs, str(folder), *shlex.split(option), *LIMITS, *limits, variables=variables) as server:
            found = ask(server)
            assert f"Operators on device {device}:" in server.text()
        return found

    here = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    chosen = [(item.callspec.params["model"], item.callspec.params["device"]) for item in here]
    logs = {work: tmp_path_factory.mktemp("served") for work in chosen}
    for model, device in chosen:
        if model in ARCHITECTURES:
            ARCHITECTURES[model].save(logs[model, device] / "model")  # before there are threads: chance is theirs, too
            of_decoder(model)
    with ThreadPoolExecutor(2) as pool:
        futures: dict[tuple[str, str], Future[Any]] = {work: pool.submit(serve, logs[work], *work) for work in chosen}
        yield lambda model, device: futures[model, device].result()


@pytest.mark.feature("Model family: encoder-only: a reranker", "{device}")
@pytest.mark.feature("Model family: over HTTP: a reranker (/rerank, /score)", "{device}")
@pytest.mark.parametrize("model", ["reranker"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_reranker(models: Models, answers: Callable[[str, str], Any], model: str, device: str) -> None:
    asked = documented("/rerank")
    wanted = perceiving_reference.scores(models, asked["query"], asked["documents"])
    ranked, scored = answers(model, device)
    assert [one["score"] for one in scored] == pytest.approx(wanted, abs=LOGPROB_TOLERANCE)
    best_first = sorted(range(len(wanted)), key=lambda place: -wanted[place])
    assert [one["index"] for one in ranked] == best_first
    assert [one["relevance_score"] for one in ranked] == pytest.approx(
        [wanted[place] for place in best_first], abs=LOGPROB_TOLERANCE
    )


@pytest.mark.feature("Model family: over HTTP: encoder-decoder (/v1/audio/transcriptions)", "{device}")
@pytest.mark.parametrize("model", ["whisper"])
@pytest.mark.parametrize("device", DEVICES)
def test_sound(models: Models, answers: Callable[[str, str], Any], model: str, device: str) -> None:
    assert find_spec("soundfile"), "vLLM reads no sound without the package soundfile; run make setup"
    assert documented("/v1/audio/transcriptions")["max_completion_tokens"] == str(TOKENS)
    waves = [(perceiving.recorded(number) / 32768).astype("float32") for number in SOUNDS]
    wanted = perceiving_reference.different([perceiving_reference.of_sound(models, one) for one in waves])
    for told, expected in zip(answers(model, device), wanted, strict=True):
        assert max(expected.token_ids) < perceiving.WORDS, "a special token, which is not told; change the seed"
        assert [int(word) for word in told["text"].split()] == expected.token_ids


@pytest.mark.feature("Model family: vision and language", "{device}")
@pytest.mark.feature("Model family: over HTTP: vision and language (/v1/chat/completions)", "{device}")
@pytest.mark.parametrize("model", ["blip2"])
@pytest.mark.parametrize("device", DEVICES)
def test_pictures(models: Models, answers: Callable[[str, str], Any], model: str, device: str) -> None:
    assert documented("/v1/chat/completions")["max_tokens"] == TOKENS
    given = zip(map(perceiving.picture, PICTURES), questions(), strict=True)
    wanted = perceiving_reference.different([perceiving_reference.of_picture(models, *one) for one in given])
    for choice, expected in zip(answers(model, device), wanted, strict=True):
        assert choice["token_ids"] == expected.token_ids
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE)


@pytest.mark.feature("Model family: over HTTP: decoders of every further kind, most on one device", "{device}")
@pytest.mark.parametrize(("model", "device"), DECODERS)
def test_a_decoder(answers: Callable[[str, str], Any], model: str, device: str) -> None:
    assert answers(model, device) == [expected.token_ids for expected in of_decoder(model)]
