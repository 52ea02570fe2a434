"""Tests LoRA adapters that are loaded while a model is served: outputs are those of the merged model.

The model is the default one on cpu, and a tiny one on sim.

The commands and requests are those of docs/serve/lora.md.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import lora_adapters
import openai
import prompts
import pytest
import reference
from engine import batch, greedy, job, run_engines
from lora_adapters import BROKEN, Adapter
from processes import SIM
from server import Server
from stateful_architectures import LATENTS_AND_STATES as ARCHITECTURES

pytestmark = [pytest.mark.server, pytest.mark.models]

MODEL = "SmolLM2-135M-Instruct"
TOKENS = 12
TEXTS = (prompts.SHORT[0], prompts.SHORT[4], prompts.SHORT[12])
LOGPROBS = 1e-3
"""Tolerance of log-probabilities. Adapters are applied in another order of summation than merged weights."""
LARGE, SMALL = "large", "small"
LIMITS = {"max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": 64}
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serve" / "lora.md").read_text()
VARIABLES: dict[str, dict[str, str]] = {
    "cpu": {},
    "sim": SIM,
}


class Case:
    """Holds two adapters, prompts, and the outputs of transformers for the model and for each merged adapter."""

    def __init__(self, model_folder: Path, folder: Path) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        self.decode = tokenizer.decode
        self.prompts: list[list[int]] = [tokenizer.encode(text) for text in TEXTS]
        model = reference.load(model_folder)
        self.adapters: dict[str, Adapter] = {
            SMALL: lora_adapters.make(folder / SMALL, model, 8, lora_adapters.ATTENTION, 0.1, seed=2),
            LARGE: lora_adapters.make(folder / LARGE, model, 64, lora_adapters.ALL, 0.2, seed=1),
        }
        self.expected = {MODEL: reference.continue_together(model, self.prompts, TOKENS)}
        plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for name, adapter in self.adapters.items():
            adapter.merge(model)
            self.expected[name] = reference.continue_together(model, self.prompts, TOKENS)
            model.load_state_dict(plain)

    def mixed(self) -> list[tuple[str, int]]:
        """Returns all pairs of a model or adapter and the index of a prompt; neighbours have different adapters."""
        return [(name, place) for place in range(len(TEXTS)) for name in self.expected]


@pytest.fixture(scope="module", params=["cpu", "sim"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(device: str, smollm2: Path, tiny_llama: Path) -> Path:
    """Returns the folder of the model."""
    return {"cpu": smollm2, "sim": tiny_llama}[device]


@pytest.fixture(scope="module")
def case(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(folder, tmp_path_factory.mktemp("adapters"))


ON_ONE_DEVICE = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("sim", marks=pytest.mark.exhaustive)], indirect=True
)
"""Marks tests of what happens to an adapter before its weights reach the device, and of how workers divide it."""


@pytest.fixture(scope="module")
def server(device: str, folder: Path, case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits = ("--max-model-len", "256", "--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--dtype", "float32")
    [documented] = re.findall(r"^VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm-backplane serve (.*)$", PAGE, re.MULTILINE)
    assert all(f"--{name.replace('_', '-')} {value}" in documented for name, value in LIMITS.items())
    model, *options = documented.split()
    served = (model, *options) if device == "cpu" else (str(folder), "--served-model-name", MODEL, *options)
    given = (*served, "--lora-modules", f"{SMALL}={case.adapters[SMALL].folder}")
    variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", **VARIABLES[device]}
    with Server(tmp_path_factory.mktemp(device), *given, *limits, variables=variables) as running:
        assert f"Operators on device {device}:" in running.text()
        load(running, LARGE, case.adapters[LARGE].folder)
        yield running


def load(server: Server, name: str, folder: Path) -> None:
    """Loads an adapter over HTTP."""
    response = server.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)})
    assert response.status_code == 200, response.text


def unload(server: Server, name: str) -> int:
    """Unloads an adapter over HTTP, and returns the status code."""
    return server.http.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code


def served(server: Server) -> dict[str, dict[str, Any]]:
    """Returns the entries of /v1/models by name."""
    return {card["id"]: card for card in server.http.get("/v1/models").json()["data"]}


def call_worker(server: Server, method: str, *arguments: int) -> Any:
    """Calls a method of the worker, and returns its result."""
    response = server.http.post("/collective_rpc", json={"method": method, "args": list(arguments)})
    assert response.status_code == 200, response.text
    return response.json()["results"][0]


def in_worker(server: Server) -> set[int]:
    """Returns the ids of the adapters in the worker."""
    return set(call_worker(server, "list_loras"))


def generate(server: Server, name: str, prompt: Sequence[int], tokens: int = TOKENS) -> tuple[list[int], list[float]]:
    """Returns the tokens and log-probabilities of a greedy completion with a model or an adapter."""
    choice = server.complete(prompt, tokens, model=name, logprobs=0)
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def assert_expected(got: tuple[list[int], list[float]], expected: reference.Continuation) -> None:
    """Fails unless the output equals the expected one, or its beginning if the output is shorter."""
    assert got[0] == expected.token_ids[: len(got[0])]
    assert got[1] == pytest.approx(expected.logprobs[: len(got[1])], abs=LOGPROBS)


def test_the_comparison_would_notice(case: Case) -> None:
    """Tests that each adapter changes every output, and that no output is near a tie or nearly constant."""
    for place in range(len(TEXTS)):
        answers = [tuple(case.expected[name][place].token_ids) for name in case.expected]
        assert len(set(answers)) == len(answers)
        assert all(len(set(tokens)) > 3 for tokens in answers), answers
    margins = {name: [one.smallest_margin for one in answers] for name, answers in case.expected.items()}
    assert min(min(values) for values in margins.values()) > 5e-3, margins


@pytest.mark.feature("LoRA: several adapters and the base model in one batch", "{device}")
@pytest.mark.feature("LoRA: rank 8 equals the merged model", "{device}")
@pytest.mark.feature("LoRA: rank 64 equals the merged model", "{device}")
def test_adapters_and_the_model_in_one_batch(server: Server, case: Case) -> None:
    work = case.mixed()
    steps = server.metric("vllm:iteration_tokens_total_count")
    with ThreadPoolExecutor(len(work)) as pool:
        answers = list(pool.map(lambda one: generate(server, one[0], case.prompts[one[1]]), work))
    for (name, place), got in zip(work, answers, strict=True):
        assert_expected(got, case.expected[name][place])
    taken = server.metric("vllm:iteration_tokens_total_count") - steps
    assert taken < 0.75 * len(work) * TOKENS, "requests must share steps"


@pytest.mark.feature("LoRA: load, list and unload over HTTP", "{device}")
@ON_ONE_DEVICE
def test_load_list_and_unload(server: Server, case: Case) -> None:
    folder = case.adapters[SMALL].folder
    before = set(served(server))
    assert {MODEL, SMALL, LARGE} <= before
    load(server, "another", folder)
    card = served(server)["another"]
    assert (card["root"], card["parent"]) == (str(folder), MODEL)
    assert_expected(generate(server, "another", case.prompts[0], 3), case.expected[SMALL][0])
    twice = server.http.post("/v1/load_lora_adapter", json={"lora_name": "another", "lora_path": str(folder)})
    assert twice.status_code == 400
    assert unload(server, "another") == 200
    assert set(served(server)) == before
    gone = server.http.post("/v1/completions", json={"model": "another", "prompt": "a", "max_tokens": 1})
    assert gone.status_code == 404
    assert unload(server, "another") == 404


@pytest.mark.feature("LoRA: a broken adapter is refused, and serving goes on", "{device}")
@pytest.mark.parametrize("name", BROKEN)
@ON_ONE_DEVICE
def test_a_broken_adapter_is_refused(server: Server, folder: Path, case: Case, tmp_path: Path, name: str) -> None:
    width = json.loads((folder / "config.json").read_text())["hidden_size"]
    make, message = lora_adapters.broken(width)[name]
    make(tmp_path / "broken")
    before = in_worker(server)
    refused = server.http.post(
        "/v1/load_lora_adapter", json={"lora_name": "broken", "lora_path": str(tmp_path / "broken")}
    )
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["code"] == 400
    assert error["message"].startswith("LoRA adapter 'broken' cannot be used: ")
    assert message in error["message"]
    assert set(served(server)) == {MODEL, SMALL, LARGE}
    assert in_worker(server) <= before, "a refused adapter must not occupy a slot"
    assert_expected(generate(server, LARGE, case.prompts[1], 1), case.expected[LARGE][1])


@ON_ONE_DEVICE
def test_the_commands_of_the_page(server: Server, case: Case) -> None:
    commands = re.findall(r"^curl -s http://127\.0\.0\.1:8000(\S+) .*\n  -d '(.*)'$", PAGE, re.MULTILINE)
    responses = {}
    for path, body in commands:
        request = json.loads(body.replace("/path/to/adapter", str(case.adapters[SMALL].folder)))
        responses[path] = server.http.post(path, json=request)
        assert responses[path].status_code == 200, responses[path].text
    assert len(responses) == 3
    text = responses["/v1/completions"].json()["choices"][0]["text"]
    assert text == case.decode(case.expected[SMALL][0].token_ids)


@ON_ONE_DEVICE
def test_a_path_or_a_name_that_cannot_be_used(server: Server, case: Case) -> None:
    folder = str(case.adapters[SMALL].folder)
    for name, path, message in (
        ("broken", "/" + "p" * 300, "cannot be opened: File name too long"),
        ("broken", "/a" * 3000, "cannot be opened: File name too long"),
        ("broken", "/tmp/\x00", "cannot be opened: embedded null byte"),
        ("\ud800", folder, "is not text that can be encoded as UTF-8"),
        ("broken", "\udcff", "is not text that can be encoded as UTF-8"),
    ):
        body = json.dumps({"lora_name": name, "lora_path": path})  # with escapes: httpx would refuse lone surrogates
        headers = {"content-type": "application/json"}
        refused = server.http.post("/v1/load_lora_adapter", content=body, headers=headers)
        assert refused.status_code == 400, refused.text
        assert message in refused.json()["error"]["message"]
    assert set(served(server)) == {MODEL, SMALL, LARGE}


@ON_ONE_DEVICE
def test_a_folder_that_is_not_there(server: Server, tmp_path: Path) -> None:
    request = {"lora_name": "broken", "lora_path": str(tmp_path / "nothing")}
    assert server.http.post("/v1/load_lora_adapter", json=request).status_code == 404


@pytest.mark.feature("LoRA: pin", "{device}")
def test_a_pinned_adapter_stays(server: Server, case: Case) -> None:
    """Tests that a pinned adapter is not evicted; must be the last test but one, because it evicts adapters.

    More adapters are loaded than fit. The least recently used one would be evicted, but it is pinned, so another one is
    evicted and is loaded again when a request uses it.
    """
    generate(server, SMALL, case.prompts[0], 1)
    generate(server, LARGE, case.prompts[0], 1)
    small, large = sorted(in_worker(server))[:2]  # in the order of loading
    assert call_worker(server, "pin_lora", small) == "True"
    for place in range(LIMITS["max_cpu_loras"] - 1):
        load(server, f"more-{place}", case.adapters[SMALL].folder)
    there = in_worker(server)
    assert len(there) == LIMITS["max_cpu_loras"]
    assert small in there and large not in there
    assert_expected(generate(server, LARGE, case.prompts[2], 3), case.expected[LARGE][2])
    assert_expected(generate(server, SMALL, case.prompts[2], 3), case.expected[SMALL][2])


@pytest.mark.feature("LoRA: a broken adapter is refused, and serving goes on", "{device}")
@ON_ONE_DEVICE
def test_an_adapter_that_was_damaged_after_its_eviction(
    server: Server, case: Case, tmp_path: Path, device: str
) -> None:
    """Tests that only requests of a damaged adapter fail, and that it works again after its files are repaired.

    The prompt takes more than one KV block, so a block that was computed without the adapter would be found by the
    prefix cache after the repair.
    """
    folder = Path(shutil.copytree(case.adapters[SMALL].folder, tmp_path / "fragile"))
    load(server, "fragile", folder)
    fragile = max(in_worker(server))
    for place in range(LIMITS["max_cpu_loras"]):
        load(server, f"evicting-{place}", case.adapters[SMALL].folder)
    assert fragile not in in_worker(server)
    prompt = [*case.prompts[1], *case.prompts[2]]
    assert len(prompt) > 16
    whole = (folder / lora_adapters.TENSORS).read_bytes()

    def post(name: str) -> httpx.Response:
        request = {"model": name, "prompt": prompt, "max_tokens": 3, "temperature": 0, "return_token_ids": True}
        return server.http.post("/v1/completions", json=request)

    def require_error(status: int, message: str) -> None:
        with ThreadPoolExecutor(3) as pool:
            failed, *others = pool.map(post, ("fragile", LARGE, MODEL))
        assert failed.status_code == status, failed.text
        assert message in failed.json()["error"]["message"]
        assert [other.status_code for other in others] == [200, 200]

    (folder / lora_adapters.TENSORS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(openai.APIError, match="LoRA adapter 'fragile' cannot be used: Error while deserializing"):
        list(server.client().completions.create(model="fragile", prompt=prompt, max_tokens=3, stream=True))
    require_error(400, "LoRA adapter 'fragile' cannot be used: Error while deserializing header")
    folder.rename(tmp_path / "elsewhere")
    time.sleep(1.1)  # the adapter is not read again for one second after a failure
    require_error(404, f"No adapter found for {folder}")
    (tmp_path / "elsewhere").rename(folder)
    (folder / lora_adapters.TENSORS).write_bytes(whole)
    time.sleep(1.1)
    repaired, same = post("fragile"), post("evicting-0")
    assert repaired.status_code == 200, repaired.text
    assert repaired.json()["choices"][0]["token_ids"] == same.json()["choices"][0]["token_ids"]
    assert same.json()["choices"][0]["token_ids"] != post(MODEL).json()["choices"][0]["token_ids"]
    assert server.text().count("was needed and could not be loaded") == 3


class Tiny:
    """Holds adapters of a model for two workers and transformers' outputs, by rank; rank 0 is the model itself."""

    PROMPT = (77, 78, 79)
    RANKS = (16, 32)

    def __init__(self, model_folder: Path, folder: Path, modules: tuple[str, ...] = lora_adapters.ALL) -> None:
        model = reference.load(model_folder)
        plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.expected = {0: reference.continue_without_cache(model, self.PROMPT, TOKENS)}
        self.folders = {}
        for rank in self.RANKS:
            adapter = lora_adapters.make(folder / str(rank), model, rank, modules, 1.0, seed=rank)
            adapter.merge(model)
            self.expected[rank] = reference.continue_without_cache(model, self.PROMPT, TOKENS)
            self.folders[rank] = adapter.folder
            model.load_state_dict(plain)


@pytest.fixture(scope="module")
def tiny(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tiny_llama, tmp_path_factory.mktemp("tiny"))


UNFIT = {name: lora_adapters.broken(128)[name] for name in ("made for a smaller model", "made for a deeper model")}
"""Broken adapters that do not fit the tiny model."""
DIVIDED: dict[str, tuple[dict[str, int], dict[str, str]]] = {
    "cpu": ({"tensor_parallel_size": 2}, {}),
    "sim": ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {"BACKPLANE_SIM_CARDS": "4"}),
}
"""Parallel sizes and environment variables by device: two tensor parallel workers, and two pipeline stages of two."""


@pytest.fixture(scope="module")
def divided(device: str, tiny: Tiny, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Returns the steps of an engine with several workers: loading, use and removal of adapters."""
    folder = tmp_path_factory.mktemp(device)
    for name in UNFIT:
        UNFIT[name][0](folder / name)
    good = [[f"of rank {rank}", rank, str(place)] for rank, place in tiny.folders.items()]
    work = {**batch([tiny.PROMPT] * 3, greedy(TOKENS, logprobs=0)), "adapters": [None, *good]}
    steps = [
        *({"load adapter": ["broken", 1, str(folder / name)]} for name in UNFIT),
        *({"load adapter": one} for one in good),
        {"list adapters": None},
        {"batch": work},
        *({"remove adapter": rank} for rank in tiny.RANKS),
        {"list adapters": None},
    ]
    sizes, variables = DIVIDED[device]
    engine = job(tiny_llama, steps=steps, enable_lora=True, **sizes, **LIMITS)
    [result] = run_engines(folder, [engine], VARIABLES[device] | variables, device=device)
    assert (folder / "engine.log").read_text().count(f"Operators on device {device}:") == math.prod(sizes.values())
    return list(result["steps"])


@ON_ONE_DEVICE
@pytest.mark.feature("LoRA: several workers", "{device}")
@pytest.mark.feature("LoRA: rank 16 equals the merged model", "{device}")
@pytest.mark.feature("LoRA: rank 32 equals the merged model", "{device}")
def test_workers_refuse_and_load_together(divided: list[Any], device: str, tiny: Tiny) -> None:
    """Tests loading on several workers.

    Without Backplane, vLLM would take the error of the second worker as its response to the next call.
    """
    *refused, one, other, there, outputs, first, second, left = divided
    for name, error in zip(UNFIT, refused, strict=True):
        assert UNFIT[name][1] in error
    assert (one, other, sorted(there)) == ("", "", list(tiny.RANKS))
    assert (first, second, left) == (True, True, [])
    assert_divided(outputs, tiny)


@pytest.mark.feature("Parallel: pipeline", "sim")
@pytest.mark.parametrize("device", ["sim"], indirect=True)
def test_stages_give_the_answers_of_one_process(divided: list[Any], device: str, tiny: Tiny) -> None:
    """Tests pipeline parallelism with and without adapters."""
    assert_divided(divided[-4], tiny)


def assert_divided(outputs: list[dict[str, Any]], tiny: Tiny) -> None:
    """Fails unless the outputs are those of transformers, which must differ from each other and not be near a tie."""
    answers = list(tiny.expected.values())
    assert len({tuple(one.token_ids) for one in answers}) == len(answers)
    assert min(one.smallest_margin for one in answers) > 5e-3, "near a tie; change the prompt"
    for output, expected in zip(outputs, answers, strict=True):
        assert_expected((output["token_ids"], output["logprobs"]), expected)


DERIVED = ("q_a_proj", "kv_a_proj_with_mqa", "gate")
"""Modules that vLLM computes in classes derived from a replaced one: DeepSeek's fused projections, a router."""


def test_layers_of_derived_classes(tmp_path: Path) -> None:
    """Tests adapters of a model with MLA and experts, in layers whose classes are derived from replaced ones."""
    ARCHITECTURES["MLA (DeepSeek)"].save(tmp_path / "model")
    case = Tiny(tmp_path / "model", tmp_path, modules=(*DERIVED, "q_b_proj", "o_proj"))
    adapters = [None, *([f"of rank {rank}", rank, str(place)] for rank, place in case.folders.items())]
    work = {**batch([case.PROMPT] * 3, greedy(TOKENS, logprobs=0)), "adapters": adapters}
    targets = ["fused_qkv_a_proj", "q_b_proj", "o_proj", "gate"]
    engine = job(tmp_path / "model", work, enable_lora=True, lora_target_modules=targets, **LIMITS)
    [result] = run_engines(tmp_path, [engine], device="cpu")
    assert_divided(result["batches"][0], case)
