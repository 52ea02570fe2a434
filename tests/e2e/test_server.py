"""Tests the OpenAI-compatible server with the OpenAI client: its responses, and its behaviour on invalid requests."""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import openai
import pytest
from compilers import Compilers
from processes import environment
from server import COMMAND, VLLM, Server

from tests.hub_stand_in import Repository, running_hub

pytestmark = [pytest.mark.server, pytest.mark.models]

MODEL = "SmolLM2-135M-Instruct"
CONTEXT = 2048
SEQUENCES = 16
"""Largest number of running sequences. The tests send more requests at once, so some have to wait."""

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Germany": "Berlin", "Greece": "Athens", "Cuba": "Havana"}
"""Countries and capitals that the model completes with a large margin, which rounding does not change."""


@pytest.fixture(scope="module")
def compilers(tmp_path_factory: pytest.TempPathFactory) -> Compilers:
    return Compilers(tmp_path_factory.mktemp("compilers"))


def planned(*arguments: str, **variables: str) -> list[str]:
    """Returns the model and the options that `vllm-backplane serve` would give to vLLM."""
    command = [COMMAND, "serve", *arguments, "--dry-run", "--json"]
    done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout)["command"][2:])


@pytest.fixture(scope="module")
def server(compilers: Compilers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Starts `vllm serve` with the path of a GGUF file, in a new interpreter, like a user in a shell.

    The file was downloaded by its name on a hub, in this case a stand-in. The options are those that `vllm-backplane
    serve` without a model would add.
    """
    limits = ("--max-model-len", str(CONTEXT), "--max-num-seqs", str(SEQUENCES))
    model, *options = planned()
    (file,) = [Path(model)] if model.endswith(".gguf") else Path(model).glob("*.gguf")
    assert options[:4] == ["--served-model-name", MODEL, "--dtype", "float32"]
    with running_hub() as hub:
        hub.repositories["org/SmolLM2-GGUF"] = Repository({"SmolLM2.Q4_1.gguf": file.read_bytes()})
        cache = str(tmp_path_factory.mktemp("cache"))
        variables = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "BACKPLANE_CACHE": cache, "NO_PROXY": "127.0.0.1"}
        downloaded, *named = planned("org/SmolLM2-GGUF:q4_1", **variables)
    assert downloaded == f"{cache}/added/SmolLM2.Q4_1/files/SmolLM2.Q4_1.gguf"
    assert named[:2] == ["--served-model-name", "org/SmolLM2-GGUF:q4_1"]
    with Server(
        tmp_path_factory.mktemp("server"),
        *(downloaded, *options[:4], "--host", "127.0.0.1", *limits),
        command=VLLM,
        variables=compilers.variables,
        warm=False,
    ) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    """Returns a client, and checks after the test that the server still responds."""
    with server.client() as client:
        yield client
        assert server.process.poll() is None, "the server must still run"
        assert count_on(client, 1, 6).startswith(" 5, 6")


def chat(client: openai.OpenAI, question: str, tokens: int = 24) -> str:
    """Returns the text of a greedy chat completion."""
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=tokens
    )
    return answer.choices[0].message.content or ""


def count_on(client: openai.OpenAI, start: int, tokens: int) -> str:
    """Returns how the model continues a count from `start`, which it does with a large margin."""
    prompt = ", ".join(str(number) for number in range(start, start + 4)) + ","
    answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=tokens)
    return answer.choices[0].text


def test_it_runs_on_backplane(server: Server) -> None:
    assert "Backplane runs on device cpu" in server.text()
    assert "Operators on device cpu" in server.text()


def test_there_is_no_page_and_no_word_of_it(server: Server) -> None:
    """Tests `vllm serve` as who has only installed Backplane runs it: nobody asked for a page."""
    for path in ("/", "/backplane/page.js", "/backplane/status"):
        assert server.http.get(path).status_code == 404
    assert "endpoint plugin" not in server.text().lower()
    assert "backplane_page" not in server.text()


def test_nothing_is_compiled(server: Server, compilers: Compilers, client: openai.OpenAI) -> None:
    """Tests that neither the start nor the first responses compile anything."""
    assert "Tokyo" in chat(client, "What is the capital of Japan?")
    assert compilers.traces() == []
    subprocess.run(["g++", "one.cpp"], env=compilers.variables, check=False)
    assert [call.partition("tools/")[2] for call in compilers.traces()] == ["g++ one.cpp"], "calls must be detected"


def test_it_serves_the_file_itself(server: Server) -> None:
    (logged,) = [line for line in server.text().splitlines() if "quantization=" in line and "load_format=" in line]
    assert "quantization=gguf," in logged and "load_format=gguf," in logged
    assert re.search(r"Loading \S+\.gguf: 100%", server.text())


def test_the_capital_of_japan(client: openai.OpenAI) -> None:
    assert "Tokyo" in chat(client, "What is the capital of Japan?")


@pytest.mark.feature("KV cache: prefix caching", "cpu")
def test_a_repeated_prompt_hits_the_prefix_cache(server: Server, client: openai.OpenAI) -> None:
    """Tests that the same prompt hits the prefix cache, and that the output is the same."""
    chat(client, "What is the capital of Japan?", 1)
    hits = server.metric("vllm:prefix_cache_hits_total")
    assert "Tokyo" in chat(client, "What is the capital of Japan?")
    assert server.metric("vllm:prefix_cache_hits_total") > hits


def test_model_list(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert model.model_dump()["max_model_len"] == CONTEXT


def test_chat_counts_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "You answer briefly."},
            {"role": "user", "content": "Name a colour."},
        ],
        temperature=0,
        max_tokens=5,
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of Japan is", temperature=0, max_tokens=2, echo=True
    )
    assert answer.choices[0].text.startswith("The capital of Japan is")
    assert "Tokyo" in answer.choices[0].text


def test_several_prompts_in_one_request(client: openai.OpenAI) -> None:
    prompts = [f"The capital of {country} is the city of" for country in CAPITALS]
    answer = client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=2)
    assert [choice.index for choice in answer.choices] == list(range(len(CAPITALS)))
    for choice, capital in zip(answer.choices, CAPITALS.values(), strict=True):
        assert choice.text.startswith(" " + capital)


def test_chat_stream_gives_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    question = "Name three colours of the rainbow."
    chat(client, question, 1)  # so that both requests below find the prompt in the prefix cache
    pieces, finish, usage = [], None, None
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            finish = choice.finish_reason or finish
    assert "".join(pieces) == chat(client, question, 64)
    assert finish in ("stop", "length")
    assert usage is not None
    # There may be fewer pieces than tokens, because the server sends tokens together if it is busy.
    assert len([piece for piece in pieces if piece]) > 4, "the text must arrive in several pieces"
    assert usage.completion_tokens > 16


def test_completions_stream(client: openai.OpenAI) -> None:
    arguments = {"model": MODEL, "prompt": "1, 2, 3, 4,", "temperature": 0, "max_tokens": 64}
    whole = client.completions.create(**arguments).choices[0].text
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**arguments, stream=True) if chunk.choices]
    assert "".join(pieces) == whole
    assert len(pieces) > 4


@pytest.mark.feature("Serving: log-probabilities of the output", "cpu")
def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Name three colours of the rainbow."}],
        temperature=0,
        max_tokens=12,
        logprobs=True,
        top_logprobs=5,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    text = "".join(step.token for step in logprobs.content if not step.token.startswith("<|"))
    assert text == answer.choices[0].message.content
    for step in logprobs.content:
        likely = [other.logprob for other in step.top_logprobs]
        assert len(likely) == 5
        assert likely == sorted(likely, reverse=True)
        assert step.logprob == likely[0], "greedy takes the most likely token"
        assert 0 < sum(map(math.exp, likely)) <= 1 + 1e-4


@pytest.mark.feature("Serving: log-probabilities of the prompt", "cpu")
def test_logprobs_are_those_of_the_text(client: openai.OpenAI) -> None:
    """Tests the log-probabilities of echoed prompts: a likely continuation has a higher one than an unlikely one."""

    def last(prompt: str) -> float:
        answer = client.completions.create(
            model=MODEL, prompt=prompt, temperature=0, max_tokens=1, echo=True, logprobs=1
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.tokens is not None
        assert logprobs.token_logprobs[0] is None, "the first token has no log-probability"
        assert "".join(logprobs.tokens[:-1]) == prompt
        value = logprobs.token_logprobs[-2]
        assert value is not None
        return value

    assert last("The capital of France is Paris") > last("The capital of France is Berlin") + 2


def test_n_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Invent a name for a cat."}],
        n=4,
        temperature=1.0,
        max_tokens=24,
        seed=7,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in answer.choices}) > 1, "samples must differ from each other"


def test_seeds(client: openai.OpenAI) -> None:
    def sample(seed: int) -> str:
        answer = client.completions.create(
            model=MODEL, prompt="Once upon a time", temperature=1.0, max_tokens=16, seed=seed
        )
        return answer.choices[0].text

    one, two, three = (sample(seed) for seed in (1, 2, 3))
    assert sample(1) == one
    assert len({one, two, three}) == 3


def test_stop_strings(client: openai.OpenAI) -> None:
    arguments = {"model": MODEL, "prompt": "1, 2, 3, 4,", "temperature": 0, "max_tokens": 32}
    free = client.completions.create(**arguments).choices[0]
    assert " 7" in free.text and free.finish_reason == "length"
    stopped = client.completions.create(**arguments, stop=[" 7", "never"]).choices[0]
    assert stopped.text == free.text.partition(" 7")[0]
    assert stopped.finish_reason == "stop"
    kept = client.completions.create(**arguments, stop=" 7", extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == stopped.text + " 7"


@pytest.mark.feature("Serving: structured output", "cpu")
def test_json_schema_output(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Paris", "Rome", "Tokyo"]},
            "country": {"type": "string", "pattern": "^[A-Z][a-z]{2,12}$"},
            "founded": {"type": "integer", "minimum": 0, "maximum": 2000},
            "capital": {"type": "boolean"},
        },
        "required": ["city", "country", "founded", "capital"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Tell me a joke about ducks."}],
        temperature=0.8,
        seed=3,
        max_tokens=120,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": schema, "strict": True},
        },
    )
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), schema)


def test_constrained_choice(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Is Paris in France?"}],
        temperature=0,
        max_tokens=16,
        extra_body={"structured_outputs": {"choice": ["heron", "otter"]}},
    )
    assert answer.choices[0].message.content in ("heron", "otter")


def test_32_concurrent_requests(server: Server, client: openai.OpenAI) -> None:
    """Tests that each request gets its own output while other sequences wait, start and end."""
    starts = range(20, 20 + 32)
    assert len(starts) > SEQUENCES
    with ThreadPoolExecutor(len(starts)) as pool:
        answers = list(pool.map(lambda start: count_on(client, start, 9 + start % 24), starts))
    right = [f" {start + 4}, {start + 5}" for start in starts]
    assert [answer[: len(start)] for answer, start in zip(answers, right, strict=True)] == right
    assert server.metric("vllm:num_requests_running") == 0


def test_a_client_that_leaves_mid_stream(server: Server, client: openai.OpenAI) -> None:
    """Tests that the request of a client that disconnects is aborted."""
    tokens = 1900
    computed = server.metric("vllm:generation_tokens_total")
    finished = server.metric("vllm:request_success_total", finished_reason="length")
    stream = client.completions.create(
        model=MODEL,
        prompt="Count: 1, 2, 3,",
        temperature=0,
        max_tokens=tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for _, _chunk in zip(range(5), stream, strict=False):
        pass
    assert server.metric("vllm:num_requests_running") == 1
    stream.close()
    end = time.monotonic() + 300
    while server.metric("vllm:num_requests_running") > 0 and time.monotonic() < end:
        time.sleep(0.1)
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:generation_tokens_total") < computed + tokens / 2
    assert server.metric("vllm:request_success_total", finished_reason="length") == finished


def test_a_prompt_that_is_too_long(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="word " * (CONTEXT + 100), max_tokens=4)
    assert refused.value.status_code == 400
    assert str(CONTEXT) in refused.value.message


def test_max_tokens_beyond_the_context_length(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="word", max_tokens=CONTEXT + 1)
    assert str(CONTEXT) in refused.value.message


@pytest.mark.parametrize("body", ['{"model": "SmolLM2-135M-Instruct", "prompt": "a', "[1, 2", "hello", ""])
def test_malformed_json(server: Server, client: openai.OpenAI, body: str) -> None:
    answer = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500
    message = answer.json()["error"]["message"]
    assert "json" in message.lower() or "required" in message.lower(), message


def test_a_field_of_the_wrong_type(server: Server, client: openai.OpenAI) -> None:
    answer = server.http.post("/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": "many"})
    assert answer.status_code in (400, 422)
    assert "max_tokens" in answer.text


def test_a_wrong_model_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="no-such-model", prompt="a", max_tokens=1)
    assert "no-such-model" in refused.value.message


def test_sampling_values_out_of_range(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="a", max_tokens=1, temperature=-1)
    assert "temperature" in refused.value.message
