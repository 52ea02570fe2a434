"""Tests vLLM's API features on each device, with the command and requests of docs/serve/api-features.md.

There is one server for each device: on cpu with the default model in full precision, and on sim with a tiny model.
Where possible, outputs are compared with those of transformers.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import prompts
import pytest
import reference
import torch
from server import Server

pytestmark = [pytest.mark.server, pytest.mark.models]

MODEL = "SmolLM2-135M-Instruct"
TOKENS = 10
TEXTS = (prompts.SHORT[0], prompts.SHORT[4])
CHUNK = 128
"""Largest number of tokens in a step."""
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serve" / "api-features.md").read_text()
ENVIRONMENT = {
    "BACKPLANE_SIM_FALLBACK": "forbid",
    "BACKPLANE_SIM_MEMORY": "2GiB",
    "BACKPLANE_SIM_RACES": "fail",  # grammar masks are copied while the card computes, which must be synchronized
}

CITY = {"type": "string", "enum": ["Paris", "Rome", "Tokyo"]}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": CITY, "days": {"type": "integer", "enum": [1, 2, 3]}, "wind": {"type": "boolean"}},
    "required": ["city", "days", "wind"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The weather", "parameters": WEATHER, "strict": True}
TOOLS = [{"type": "function", "function": FUNCTION}]


@pytest.fixture(scope="module", params=["cpu", pytest.param("sim", marks=pytest.mark.exhaustive)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


ON_ONE_DEVICE = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("sim", marks=pytest.mark.exhaustive)], indirect=True
)
"""Marks tests of vLLM's HTTP server and scheduler, which are the same code on each device."""


@pytest.fixture(scope="module")
def folder(device: str, smollm2: Path, tiny_llama: Path) -> Path:
    """Returns the folder of the model."""
    return {"cpu": smollm2, "sim": tiny_llama}[device]


@pytest.fixture(scope="module")
def server(device: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    [documented] = re.findall(r"^vllm-backplane serve (.*)$", PAGE, re.MULTILINE)
    model, *options = documented.split()
    given = (model, *options) if device == "cpu" else (str(folder), "--served-model-name", MODEL, *options)
    limits = ("--max-model-len", "512", "--max-num-batched-tokens", str(CHUNK), "--dtype", "float32")
    # A model as small as this one may generate blanks without end where JSON allows them.
    limits += ("--structured-outputs-config", json.dumps({"backend": "xgrammar", "disable_any_whitespace": True}))
    variables = {"BACKPLANE_DEVICE": device, **ENVIRONMENT}
    with Server(tmp_path_factory.mktemp(device), *given, *limits, variables=variables) as running:
        assert f"Operators on device {device}" in running.text()
        yield running


class Case:
    """Holds the transformers model, prompts in tokens, and expected outputs."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = reference.load(folder)
        self.prompts: list[list[int]] = [self.tokenizer.encode(text) for text in TEXTS]
        self.expected = reference.continue_together(self.model, self.prompts, TOKENS)

    @torch.inference_mode()
    def scores(self, sequences: list[list[int]]) -> torch.Tensor:
        """Returns the log-probabilities of the token after each sequence; all sequences must have the same length."""
        return torch.log_softmax(self.model(input_ids=torch.tensor(sequences)).logits[:, -1].double(), dim=-1)

    def beams(self, prompt: list[int], width: int, tokens: int) -> list[tuple[float, list[int]]]:
        """Returns the best continuations of a beam search, each with its sum of log-probabilities and its tokens."""
        found: list[tuple[float, list[int]]] = [(0.0, [])]
        for _ in range(tokens):
            best = self.scores([prompt + ids for _, ids in found]).topk(2 * width)
            grown = [
                (score + float(best.values[row, place]), [*ids, int(best.indices[row, place])])
                for row, (score, ids) in enumerate(found)
                for place in range(2 * width)
            ]
            found = sorted(grown, reverse=True)[:width]
        return found

    def prompt_for_beams(self, width: int, tokens: int) -> tuple[list[int], list[tuple[float, list[int]]]]:
        """Returns the first prompt whose best beam is not what greedy decoding gives, and whose beams are not near a
        tie, with its beams."""
        for prompt in (prompt[: len(prompt) - cut] for cut in range(4) for prompt in self.prompts):
            scores = [score for score, _ in self.beams(prompt, width + 1, tokens)]
            found, [(_, greedy)] = self.beams(prompt, width, tokens), self.beams(prompt, 1, tokens)
            if found[0][1] != greedy and min(a - b for a, b in itertools.pairwise(scores)) > 5e-3:
                return prompt, found
        pytest.fail("no prompt fits; add another one")


@pytest.fixture(scope="module")
def case(folder: Path) -> Case:
    case = Case(folder)
    assert min(answer.smallest_margin for answer in case.expected) > 5e-3, "near a tie; change the prompts"
    return case


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    """Sends a greedy request, which must succeed, and returns the body of the response."""
    response = server.http.post(path, json={"model": MODEL, "temperature": 0, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


def complete(server: Server, prompt: str | list[int], tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    """Returns the first choice of a completion."""
    body = {"prompt": prompt, "max_tokens": tokens, "return_token_ids": True, **more}
    return dict(post(server, "/v1/completions", **body)["choices"][0])


def structured(server: Server, prompt: str, tokens: int = 60, *, temperature: float = 0, **kind: Any) -> str:
    """Returns the text of a structured output, which must be complete."""
    choice = complete(server, prompt, tokens, temperature=temperature, seed=5, structured_outputs=kind)
    assert choice["finish_reason"] == "stop", choice
    return str(choice["text"])


def chat(server: Server, **more: Any) -> dict[str, Any]:
    """Returns the message of a chat completion with tools."""
    messages = [{"role": "user", "content": "How will the weather be in Rome?"}]
    answer = post(server, "/v1/chat/completions", messages=messages, tools=TOOLS, max_tokens=80, **more)
    return dict(answer["choices"][0]["message"])


def assert_calls_weather(message: dict[str, Any]) -> None:
    """Fails unless the message is one valid call of the tool."""
    [call] = message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)


@pytest.mark.feature("Serving: async scheduling on", "{device}")
def test_async_scheduling_is_on_and_tokens_are_those_of_transformers(server: Server, case: Case) -> None:
    information = server.http.get("/server_info", params={"config_format": "json"}).json()
    assert information["vllm_config"]["scheduler_config"]["async_scheduling"] is True
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        answers = list(pool.map(lambda ids: complete(server, ids, ignore_eos=True), case.prompts))
    assert [answer["token_ids"] for answer in answers] == [expected.token_ids for expected in case.expected]


@ON_ONE_DEVICE
def test_the_request_of_the_page(server: Server) -> None:
    [body] = re.findall(r"^curl -s \S+/v1/completions .* -d '(.*?)'$", PAGE, re.MULTILINE | re.DOTALL)
    assert re.fullmatch(" [0-9]{4}", post(server, "/v1/completions", **json.loads(body))["choices"][0]["text"])


@pytest.mark.feature("Serving: structured output", "{device}")
def test_structured_output(server: Server) -> None:
    """Tests grammars that contradict what the model would generate, with greedy decoding and with sampling."""
    joke = "A joke about ducks:"
    lines = 'A line of JSON: {"name": "Ann", "age": 7}\nAnother line of JSON: {"name": "Bob", "age": 9}\n'
    lines += "Another line of JSON:"
    for temperature in (0, 1):
        jsonschema.validate(json.loads(structured(server, lines, temperature=temperature, json=WEATHER)), WEATHER)
        date = structured(server, joke, temperature=temperature, regex=r"(Mon|Tues)day, [0-9]{2}\.[0-9]{2}\.")
        assert re.fullmatch(r"(Mon|Tues)day, [0-9]{2}\.[0-9]{2}\.", date)
        assert structured(server, joke, temperature=temperature, choice=["heron", "otter"]) in ("heron", "otter")


def test_the_likeliest_of_the_allowed_tokens_is_taken(server: Server, case: Case) -> None:
    digits = [case.tokenizer.encode(str(digit)) for digit in range(10)]
    assert all(len(ids) == 1 for ids in digits)
    scores = case.scores(case.prompts[:1])[0, [ids[0] for ids in digits]]
    best, second = scores.sort(descending=True).values[:2].tolist()
    assert best - second > 5e-3, "near a tie; change the prompt"
    assert structured(server, TEXTS[0], 2, regex="[0-9]") == str(int(scores.argmax()))


def test_a_grammar_changes_nothing_that_it_allows_nor_its_neighbour(server: Server, case: Case) -> None:
    """Tests a batch of a request whose grammar allows everything and a request without a grammar."""

    def send(place: int) -> dict[str, Any]:
        grammar = {"structured_outputs": {"regex": r"(.|\n)*"}} if place == 0 else {}
        return complete(server, case.prompts[place], ignore_eos=True, **grammar)

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(send, range(2)))
    assert [answer["token_ids"] for answer in answers] == [expected.token_ids for expected in case.expected]


@ON_ONE_DEVICE
def test_a_grammar_that_cannot_be_read_is_refused(server: Server) -> None:
    response = server.http.post(
        "/v1/completions", json={"model": MODEL, "prompt": "a", "structured_outputs": {"regex": "[0-9"}}
    )
    assert response.status_code == 400, response.text
    assert complete(server, "a", 1)["token_ids"]


@pytest.mark.feature("Serving: tool calls", "{device}")
@pytest.mark.parametrize("device", ["cpu"], indirect=True)  # the tiny model would fill a text without end
def test_tool_calls(server: Server) -> None:
    named = chat(server, tool_choice={"type": "function", "function": {"name": "get_weather"}})
    assert_calls_weather(named)
    assert_calls_weather(chat(server, tool_choice="required", parallel_tool_calls=False))


@pytest.mark.feature("Serving: tool calls", "{device}")
@ON_ONE_DEVICE
def test_a_tool_call_is_found_in_what_the_model_writes(server: Server) -> None:
    """Tests the tool parser. The default model does not call tools, so a grammar forces a call within other text."""
    written = r'So: <tool_call>\n\{"name": "get_weather", "arguments": \{"city": "(Rome|Paris)", "days": [1-3], '
    written += r'"wind": (true|false)\}\}\n</tool_call>'
    message = chat(server, tool_choice="auto", structured_outputs={"regex": written})
    assert_calls_weather(message)
    assert message["content"].startswith("So:")
    assert "tool_call" not in message["content"]


@pytest.mark.feature("Serving: log-probabilities of the prompt", "{device}")
def test_prompt_logprobs_are_those_of_transformers(server: Server, case: Case) -> None:
    ids = case.tokenizer.encode(prompts.PASSAGE)[: CHUNK + CHUNK // 2]
    assert len(ids) > CHUNK, "the prompt must need several chunks"
    steps = complete(server, ids, 1, prompt_logprobs=1)["prompt_logprobs"]
    assert steps[0] is None, "the first token has no log-probability"
    ours = [step[str(token)]["logprob"] for step, token in zip(steps[1:], ids[1:], strict=True)]
    assert ours == pytest.approx(reference.prompt_logprobs(case.model, ids), abs=1e-3)


@pytest.mark.feature("Serving: beam search", "{device}")
@ON_ONE_DEVICE
def test_beams_are_those_of_transformers(server: Server, case: Case) -> None:
    width, tokens = 3, 4
    prompt, expected = case.prompt_for_beams(width, tokens)
    body = {"prompt": prompt, "max_tokens": tokens, "n": width, "use_beam_search": True, "ignore_eos": True}
    choices = post(server, "/v1/completions", **body)["choices"]
    assert [choice["text"] for choice in choices] == [case.tokenizer.decode(ids) for _, ids in expected]


@pytest.mark.feature("Serving: priority scheduling", "{device}")
@ON_ONE_DEVICE
def test_urgent_requests_overtake_those_that_came_before(server: Server) -> None:
    """Tests priorities: of four waiting requests, the last two have the highest priority and must end first.

    Two other requests fill the batch until all four wait.
    """
    ended: list[int] = []
    enough = threading.Event()

    def fill(number: int) -> None:
        body = {"model": MODEL, "prompt": f"Number {number}:", "max_tokens": 480, "ignore_eos": True, "stream": True}
        body["priority"] = number
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                assert "[DONE]" not in line, "it must not end before the other requests wait"
                if enough.is_set():
                    return

    def send(priority: int, tokens: int) -> None:
        complete(server, f"Number {priority}:", tokens, priority=priority, ignore_eos=True)
        ended.append(priority)

    def wait_for(metric: str, number: int) -> None:
        end = time.monotonic() + 60
        while server.metric(metric) < number:
            assert time.monotonic() < end, f"{metric} is {server.metric(metric)}"
            time.sleep(0.01)

    with ThreadPoolExecutor(6) as pool:
        work = [pool.submit(fill, number) for number in (0, 1)]
        wait_for("vllm:num_requests_running", 2)
        work += [pool.submit(send, priority, 40) for priority in (30, 20)]
        wait_for("vllm:num_requests_waiting", 2)
        work += [pool.submit(send, priority, 6) for priority in (-2, -1)]
        wait_for("vllm:num_requests_waiting", 4)
        enough.set()
        for each in work:
            each.result()
    assert set(ended[:2]) == {-1, -2}, ended
    assert set(ended[2:]) == {20, 30}, ended


@pytest.mark.feature("KV cache: prefix caching with salt", "{device}")
@ON_ONE_DEVICE
def test_salt_keeps_prefixes_apart(server: Server, case: Case) -> None:
    ids = case.tokenizer.encode(prompts.PASSAGE)[:100]

    def cached(salt: str | None) -> tuple[int, list[int]]:
        """Returns how many tokens of the prompt were cached, and the output tokens."""
        more = {} if salt is None else {"cache_salt": salt}
        answer = post(server, "/v1/completions", prompt=ids, max_tokens=4, return_token_ids=True, **more)
        details = answer["usage"]["prompt_tokens_details"] or {}
        return details.get("cached_tokens", 0), answer["choices"][0]["token_ids"]

    first, again, other, without = (cached(salt) for salt in ("one", "one", "two", None))
    assert again[0] >= 64, "the same salt must hit the prefix cache"
    assert first[0] == other[0] == 0, "another salt must not hit the prefix cache"
    assert cached("two")[0] >= 64
    assert cached("one")[0] >= 64
    assert first[1] == again[1] == other[1] == without[1]
