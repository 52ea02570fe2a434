"""Tests every method of speculative decoding over HTTP on each device, with tiny models of random weights.

Greedy tokens must equal those of plain decoding, and sampled tokens must have the same distribution. draft_heads.py
computes how many draft tokens of a draft model and of the heads must be accepted. The default model is also served with
the example of docs/serve/speculative-decoding.md.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import draft_heads
import pytest
import reference
import torch
from engine import Result, batch, greedy, job, run_engines
from server import Server
from transformers import AutoTokenizer

from tests.statistics_of_draws import UNLIKELY, p_value

pytestmark = [pytest.mark.server, pytest.mark.models]

PAGE = Path(__file__).resolve().parents[2] / "docs/serve/speculative-decoding.md"
TOKENS, LONGER = 40, 4
REPEATS = [5, 6, 7] * 8
PROMPTS = [[7, 30, 21, 9, 44], list(range(3, 43)), [40, 41], REPEATS, list(range(47, 7, -3))]
INTERPRETED = {"NUMBA_DISABLE_JIT": "1"}
"""Environment variables that disable numba. Compiling the n-gram lookup takes seconds, and one engine does it."""
DEVICES: dict[str, dict[str, str | None]] = {
    "cpu": {"BACKPLANE_DEVICE": "cpu"},
    "sim": {
        "BACKPLANE_DEVICE": "sim",
        "BACKPLANE_SIM_FALLBACK": "forbid",
        "BACKPLANE_SIM_MEMORY": "2GiB",
        **INTERPRETED,
    },
}
AT_A_TIME = 2
"""Number of concurrent servers: one starts while another one ends or waits for requests."""
CACHE = 64 << 20
"""Bytes of the KV cache, given explicitly, so that concurrent servers do not claim the same memory."""
METHODS = {"ngram": "ngram", "suffix": "suffix", "draft": "draft model", "eagle3": "EAGLE-3", "mtp": "MTP"}
"""Methods of speculative decoding, with their names in docs/features.toml."""
WHERE_INSTALLED = pytest.mark.skipif(
    find_spec("arctic_inference") is None,
    reason="the package arctic-inference is not installed; see docs/serve/speculative-decoding.md",
)
DRAFTS = 3
DRAWS, KEPT, WARMTH = 1200, 3, 1.3
DRAWN: dict[str, Any] = {"temperature": WARMTH, "top_k": KEPT, "max_tokens": 3}
DRAWN_FROM = {"ngram": "certain drafts", "eagle3": "drawn drafts"}
COUNTED = "vllm:spec_decode_num_"
TEXTS = ["A line that is written once more: the ferry leaves at nine.\n" * 4, "Water boils at 100 degrees because"]


@dataclass(frozen=True)
class Models:
    """Holds the transformers models and heads, with the folder of their checkpoints."""

    llama: Any
    eagle3: draft_heads.Eagle3Head
    mimo: Any
    mtp: draft_heads.MtpHead
    shallow: Any
    folder: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    llama, eagle3 = draft_heads.save_llama_with_eagle3(folder)
    mimo, mtp = draft_heads.save_mimo(folder / "mimo")
    return Models(llama, eagle3, mimo, mtp, draft_heads.save_shallow(llama, folder / "shallow"), folder)


def speculating(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the speculative configurations by method, without methods whose package is not installed."""
    configured: dict[str, dict[str, Any]] = {
        "ngram": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        "suffix": {"method": "suffix"},
        "draft": {"method": "draft_model", "model": str(folder / "shallow")},
        "eagle3": {"method": "eagle3", "model": str(folder / "head"), "draft_sample_method": "probabilistic"},
        "mtp": {"method": "mtp"},
    }
    if find_spec("arctic_inference") is None:
        del configured["suffix"]
    return {method: {"num_speculative_tokens": DRAFTS, **given} for method, given in configured.items()}


def target(folder: Path, method: str) -> Path:
    """Returns the folder of the target model of a method."""
    return folder / ("mimo" if method == "mtp" else "target")


def plain_engines(folder: Path, logs: Path) -> list[Result]:
    """Runs both targets without speculation; returns results with longer outputs than those of the servers."""
    long = batch(PROMPTS, greedy(TOKENS + LONGER))
    limits: dict[str, Any] = {"max_num_seqs": 32, "kv_cache_memory_bytes": CACHE, "skip_tokenizer_init": True}
    jobs = [job(folder / name, long, **limits) for name in ("target", "mimo")]
    return run_engines(logs, jobs, DEVICES["cpu"])


@dataclass(frozen=True)
class Run:
    """Holds the outputs of a server with speculative decoding."""

    together: list[list[int]]
    """Tokens of all prompts, which were sent concurrently first."""
    metrics: dict[str, Any]
    """Metrics after these requests."""
    alone: list[list[int]]
    """Tokens of some prompts, which were sent one by one afterwards."""
    replays: dict[str, int]
    """Counts of captured and replayed graphs after these requests."""
    drawn: list[list[int]]
    """Sampled tokens, which were requested last."""
    metrics_after: dict[str, Any]
    """Metrics after all requests."""
    compiled: tuple[int, int]
    """Number of compiled n-gram lookups at the beginning and at the end."""


@dataclass(frozen=True)
class Runs:
    """Holds the outputs of all servers, and of both targets without speculation."""

    found: dict[tuple[str, str], Run]
    llama: list[list[int]]
    mimo: list[list[int]]

    def plain(self, method: str) -> list[list[int]]:
        """Returns the outputs of the target without speculation, which are longer than those of the servers."""
        return self.mimo if method == "mtp" else self.llama

    def of(self, device: str, method: str) -> Run:
        """Returns the outputs of the server for a device and a method."""
        return self.found[device, method]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Returns the outputs of the servers of the tests that were selected."""
    parameters = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    selected = {(each.params.get("device"), each.params.get("method")) for each in parameters if each is not None}
    selected.add(("cpu", "ngram"))
    wanted = [
        one for method in speculating(models.folder) for device in DEVICES if (one := (device, method)) in selected
    ]
    folders = [tmp_path_factory.mktemp(f"{device}-{method}") for device, method in wanted]
    logs = tmp_path_factory.mktemp("plain")
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        plain = pool.submit(plain_engines, models.folder, logs)
        done = list(pool.map(lambda one, folder: served(models.folder, folder, *one), wanted, folders))
        llama, mimo = (tokens(result["batches"][0]) for result in plain.result())
    return Runs(dict(zip(wanted, done, strict=True)), llama, mimo)


def served(folder: Path, logs: Path, device: str, method: str) -> Run:
    """Starts a server, sends all requests and returns the outputs. Prompts and outputs are tokens, not text."""
    option = ("--speculative-config", json.dumps(speculating(folder)[method]))
    limits = ("--max-model-len", "256", "--max-num-seqs", "32", "--max-num-batched-tokens", "256", "--seed", "1")
    limits += ("--kv-cache-memory-bytes", str(CACHE))
    more = ("--dtype", "float32", "--skip-tokenizer-init", "--worker-extension-cls", "worker_rpc.OverHttp")
    variables = {**DEVICES[device]}
    with Server(logs, str(target(folder, method)), *option, *limits, *more, variables=variables) as server:
        assert f"Operators on device {device}:" in server.text()
        first = int(call_worker(server, "rpc_compiled_ngrams"))
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            together = list(pool.map(lambda prompt: generate(server, prompt), PROMPTS))
        metrics = read_metrics(server)
        alone = [generate(server, prompt) for prompt in PROMPTS[2:4]]
        replayed = call_worker(server, "rpc_replays")
        draws = drawn(server) if method in DRAWN_FROM else []
        last = int(call_worker(server, "rpc_compiled_ngrams"))
        return Run(together, metrics, alone, replayed, draws, read_metrics(server), (first, last))


def call_worker(server: Server, method: str) -> Any:
    """Calls a method of the worker and returns its result, which vLLM converts to text if it is not a dictionary."""
    response = server.http.post("/collective_rpc", json={"method": method})
    assert response.status_code == 200, response.text
    [found] = response.json()["results"]
    return found


def generate(server: Server, prompt: str | list[int]) -> list[int]:
    """Returns the tokens of a greedy completion."""
    return complete(server, prompt, max_tokens=TOKENS, temperature=0)[0]


def drawn(server: Server) -> list[list[int]]:
    """Returns the tokens of many sampled completions of one prompt."""
    return complete(server, REPEATS, n=DRAWS, **DRAWN)


def complete(server: Server, prompt: str | list[int], **more: Any) -> list[list[int]]:
    """Returns the tokens of every choice of a completion."""
    [model] = server.http.get("/v1/models").json()["data"]
    request = {"model": model["id"], "prompt": prompt, "ignore_eos": True, "return_token_ids": True, **more}
    response = server.http.post("/v1/completions", json=request)
    assert response.status_code == 200, response.text
    return [choice["token_ids"] for choice in response.json()["choices"]]


def read_metrics(server: Server) -> dict[str, Any]:
    """Returns the counts of draft tokens from /metrics, under the names of `LLM.get_metrics`."""
    found: dict[str, Any] = {
        f"{COUNTED}{what}": int(server.metric(f"{COUNTED}{what}_total"))
        for what in ("drafts", "draft_tokens", "accepted_tokens")
    }
    by_place = f"{COUNTED}accepted_tokens_per_pos"
    return found | {by_place: [int(server.metric(f"{by_place}_total", position=str(place))) for place in range(DRAFTS)]}


def plain(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Returns the output tokens of transformers, none of which may be near a tie."""
    found = [reference.continue_together(model, [prompt], TOKENS)[0] for prompt in prompts]
    assert min(one.smallest_margin for one in found) > 1e-3, "near a tie; change the prompts"
    return [one.token_ids for one in found]


def tokens(done: list[dict[str, Any]]) -> list[list[int]]:
    """Returns the output tokens of a batch."""
    return [output["token_ids"] for output in done]


def counted(metrics: dict[str, Any], what: str) -> int:
    """Returns a counter of speculative decoding."""
    return int(metrics[COUNTED + what])


ELSEWHERE_ON_SIM = {
    "suffix": "drafts on the host, as n-grams do",
    "draft": "a second model and its KV cache, as the heads have",
    "mtp": "a head that drafts greedily; EAGLE-3 draws as well",
}
"""Methods that run on sim in `make test-all` only, and why another method tests the same code there in `make test`."""


def on_each(methods: Iterable[str]) -> pytest.MarkDecorator:
    """Returns the parameters `device`, `method` and `named` for all of these methods on all devices."""
    return pytest.mark.parametrize(
        ("device", "method", "named"),
        [
            pytest.param(
                *(device, method, METHODS[method]),
                marks=[
                    *([WHERE_INSTALLED] if method == "suffix" else []),
                    *([pytest.mark.exhaustive] if device == "sim" and method in ELSEWHERE_ON_SIM else []),
                ],
                id=f"{device}-{method}",
            )
            for device in DEVICES
            for method in methods
        ],
    )


EVERY = on_each(METHODS)


@pytest.mark.feature("Speculative decoding: {named}, over HTTP", "{device}")
@EVERY
def test_a_server_gives_the_tokens_of_plain_decoding(runs: Runs, device: str, method: str, named: str) -> None:
    run, plain = runs.of(device, method), [answer[:TOKENS] for answer in runs.plain(method)]
    assert run.together == plain
    assert run.alone == plain[2:4]
    assert 0 < counted(run.metrics, "accepted_tokens") <= counted(run.metrics, "draft_tokens")


def test_plain_answers_are_those_of_transformers(runs: Runs, models: Models) -> None:
    assert [answer[:TOKENS] for answer in runs.plain("draft")] == plain(models.llama, PROMPTS)


def test_answers_depend_on_the_prompt(runs: Runs) -> None:
    """Tests that the outputs differ, so that a request with the tokens of another one would be noticed."""
    for method in ("draft", "mtp"):
        answers = runs.plain(method)
        assert len({tuple(answer) for answer in answers}) == len(PROMPTS)


@pytest.fixture(scope="module")
def accepted_drafts(runs: Runs, models: Models) -> dict[str, list[int]]:
    """Returns the expected number of accepted draft tokens of every step, by method."""
    drafters = {
        "draft": (models.llama, models.shallow),
        "eagle3": (models.llama, models.eagle3),
        "mtp": (models.mimo, models.mtp),
    }
    return {
        method: [
            accepted
            for prompt, output in zip(PROMPTS, runs.plain(method), strict=True)
            for accepted in draft_heads.accepted_per_step(*modules, prompt, output, max_tokens=TOKENS, drafts=DRAFTS)
        ]
        for method, modules in drafters.items()
    }


@on_each(["draft", "eagle3", "mtp"])
def test_models_and_heads_draft_what_they_should(
    runs: Runs, accepted_drafts: dict[str, list[int]], device: str, method: str, named: str
) -> None:
    """Tests acceptance by position against layers of transformers without a KV cache.

    A drafter that reads KV cache entries of rejected draft tokens would give other draft tokens.
    """
    steps, metrics = accepted_drafts[method], runs.of(device, method).metrics
    by_place = [sum(accepted > place for accepted in steps) for place in range(DRAFTS)]
    assert metrics[f"{COUNTED}accepted_tokens_per_pos"] == by_place
    assert counted(metrics, "drafts") == len(steps)
    assert 0 < counted(metrics, "accepted_tokens") < counted(metrics, "draft_tokens")
    assert by_place[0] > by_place[1] > 0, "enough draft tokens must be accepted for a comparison"


@pytest.mark.feature("Serving: graphs of decode steps", "{device}")
@EVERY
def test_steps_that_verify_were_replayed(runs: Runs, device: str, method: str, named: str) -> None:
    found = runs.of(device, method).replays
    assert found["captured"] > 0
    assert found["given_up"] == 0
    # The prompts that were sent one by one. N-grams and suffixes often draft fewer tokens than a graph expects.
    assert found["replays"] > (4 if method in ("ngram", "suffix") else TOKENS // 2)


def test_ngrams_are_compiled_before_the_first_request_and_once(runs: Runs) -> None:
    assert runs.of("cpu", "ngram").compiled == (1, 1)


@torch.inference_mode()
def shares(model: Any, prompt: list[int], warmth: float) -> dict[tuple[int, ...], float]:
    """Returns the probability of every output of three tokens by transformers; `warmth` is the temperature."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(DRAWN["max_tokens"]):
        logits = model(input_ids=torch.tensor([[*prompt, *answer] for answer in found])).logits[:, -1].double()
        best, ids = logits.topk(KEPT)
        odds = (best / warmth).softmax(-1).tolist()
        found = {
            (*answer, token): share * chance
            for (answer, share), row, chances in zip(found.items(), ids.tolist(), odds, strict=True)
            for token, chance in zip(row, chances, strict=True)
        }
    return found


@pytest.mark.feature("Speculative decoding: sampled output follows the same distribution", "{device}")
@pytest.mark.parametrize("method", DRAWN_FROM, ids=DRAWN_FROM.values())
@pytest.mark.parametrize("device", DEVICES)
def test_drawn_tokens_follow_the_distribution_of_the_model(
    runs: Runs, models: Models, device: str, method: str
) -> None:
    run = runs.of(device, method)
    drafted, accepted = (
        counted(run.metrics_after, what) - counted(run.metrics, what) for what in ("draft_tokens", "accepted_tokens")
    )
    assert 0.02 * drafted < accepted < 0.98 * drafted, "acceptance and rejection must both happen often"
    seen = Counter(map(tuple, run.drawn))
    assert seen.total() == DRAWS
    right, colder = (shares(models.llama, REPEATS, warmth) for warmth in (WARMTH, WARMTH / 3))
    assert set(seen) <= set(right)
    counts = [seen[answer] for answer in right]
    assert p_value(counts, list(right.values())) > UNLIKELY
    assert p_value(counts, [colder[answer] for answer in right]) < UNLIKELY, "there must be enough draws"


[_line] = re.findall(r"^vllm-backplane serve (.*--speculative-config .*)$", PAGE.read_text(), flags=re.MULTILINE)
*SERVED, CONFIGURED = shlex.split(_line)
LIMITS = ("--max-model-len", "512", "--max-num-seqs", "4")
FIRST_LAYERS = 28
"""Number of the default model's thirty layers in the draft model. With fewer, almost no draft token is accepted."""
OF_DEFAULT_MODEL = {
    "ngram": (CONFIGURED, 0.5),
    "suffix": (json.dumps({"method": "suffix", "num_speculative_tokens": 4}), 0.5),
    "draft": (json.dumps({"method": "draft_model", "model": "shallow", "num_speculative_tokens": 2}), 0.4),
}
"""Speculative configurations by method (ngram: that of the page), with the smallest expected acceptance rate."""


@dataclass(frozen=True)
class DefaultModel:
    """Holds the outputs of transformers for the default model, and the folder of its draft model."""

    answers: list[list[int]]
    shallow: Path


@pytest.fixture(scope="module")
def default_model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> DefaultModel:
    tokenizer, model = AutoTokenizer.from_pretrained(smollm2), reference.load(smollm2)
    shallow = tmp_path_factory.mktemp("default") / "shallow"
    draft_heads.save_shallow(model, shallow, layers=FIRST_LAYERS)
    return DefaultModel(plain(model, [tokenizer.encode(text) for text in TEXTS]), shallow)


@pytest.mark.feature("Speculative decoding: {named}, over HTTP", "{device}")
@pytest.mark.parametrize(
    ("device", "method", "named"),
    [
        pytest.param(
            *(device, method, METHODS[method]),
            marks=[
                *([WHERE_INSTALLED] if method == "suffix" else []),
                pytest.mark.exhaustive,  # tiny models are tested with every method
            ],
            id=f"{device}-{method}",
        )
        for device in DEVICES
        for method in OF_DEFAULT_MODEL
        if (device, method) != ("sim", "draft")  # the draft model takes too long there
    ],
)
def test_the_default_model(default_model: DefaultModel, tmp_path: Path, device: str, method: str, named: str) -> None:
    """Tests the command of the documentation: tokens of plain decoding, and the expected acceptance rate."""
    configured, share = OF_DEFAULT_MODEL[method]
    option = configured.replace('"shallow"', json.dumps(str(default_model.shallow)))
    variables = {**INTERPRETED, **DEVICES[device]}
    with Server(tmp_path, *SERVED, option, *LIMITS, variables=variables) as server:
        assert f"Operators on device {device}:" in server.text()
        assert [generate(server, text) for text in TEXTS] == default_model.answers
        drafted, accepted = (int(server.metric(f"{COUNTED}{what}_tokens_total")) for what in ("draft", "accepted"))
    assert share * drafted < accepted, f"of {drafted} draft tokens {accepted} were accepted"
