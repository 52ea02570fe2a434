"""Tests `--quantization int8` and `int4`: outputs are near those of transformers with the decoded weights."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import prompts
import pytest
import quantized_reference
import reference
import torch
from engine import Result, batch, greedy, job, require_backplane, run_engines, try_engines
from model_spec import COMMON
from processes import SIM, tail
from server import Server
from tiny_models import randomize

from vllm_backplane.quantization.online.formats import HEAD, ONLINE

pytestmark = [pytest.mark.server, pytest.mark.models]

QUESTIONS = ("The capital of France is", "The opposite of hot is")
ANSWERS = ("Paris", "cold")
"""Expected words after QUESTIONS. These are beginnings of sentences and not chats, because even in float32 the first
word of the chat output has a margin of only 0.08."""
TOLERANCES = {"four layers": (0.03, 0.12), "thirty layers": (0.15, 0.8)}
"""Limits of the mean and the largest absolute difference of log-probabilities: two to four times what was measured.
Another order of summation sometimes rounds an input the other way. The effect grows from layer to layer, and after
thirty layers most roundings differ."""
IDS = ([7, 300, 21, 9000, 44], list(range(1000, 1100)))
FORMATS = tuple(ONLINE)
TOKENS = 8
TEXTS = ("Paris is the capital of France.", "A cat sleeps on the warm stove.", prompts.PASSAGE[:700])
MIXTURE = {
    **COMMON,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
"""A mixture in which each token goes to all experts. Otherwise rounding could choose another expert where two have
nearly equal probabilities."""
MIXTURE_IDS = ([3, 77, 401, 12], [(17 * place + place * place) % 500 + 5 for place in range(40)])
CHECKPOINT = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
LIMITS = {"max_model_len": 512, "max_num_batched_tokens": 512}
PAGE = Path(__file__).resolve().parents[2] / "docs/serve/quantization.md"
[EXAMPLE] = re.findall(r"^vllm-backplane serve (.*--quantization (\w+).*)$", PAGE.read_text(), re.MULTILINE)
"""The arguments and the format of the command on the page."""


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def text(tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer.encode(prompts.PASSAGE)[:384]
    return ids


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("mixture")
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MIXTURE))
    randomize(model)
    model.save_pretrained(folder)
    return folder


def mixture_jobs(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns jobs that serve the mixture in each format."""
    work = batch(MIXTURE_IDS, greedy(1, prompt_logprobs=0))
    limits: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return {f"experts, {name}": job(folder, work, quantization=name, **limits) for name in FORMATS}


@pytest.fixture(scope="module")
def results(
    smollm2: Path,
    tiny_llama: Path,
    minilm: Path,
    mixture: Path,
    tokenizer: Any,
    text: list[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Result]:
    """Returns the results by name. The last engine must be refused, and the others must run."""
    small = batch(IDS, greedy(TOKENS, logprobs=0, prompt_logprobs=0))
    batches = (
        batch([tokenizer.encode(text) for text in QUESTIONS], greedy(2)),
        batch([text], greedy(1, prompt_logprobs=0)),
    )
    jobs = {name: job(smollm2, *batches, quantization=name, **LIMITS) for name in FORMATS}
    jobs["one worker"] = job(tiny_llama, small, quantization="int4")
    jobs["two workers"] = job(tiny_llama, small, quantization="int4", tensor_parallel_size=2)
    jobs |= mixture_jobs(mixture)
    jobs["experts, int4"]["engine"]["tensor_parallel_size"] = 2
    jobs["embeddings"] = job(minilm, embed=TEXTS, runner="pooling")
    jobs["quantized embeddings"] = job(minilm, embed=TEXTS, runner="pooling", quantization="int8")
    jobs["quantized already"] = job(tiny_llama, quantization="int8", hf_overrides=CHECKPOINT)
    done, log = try_engines(tmp_path_factory.mktemp("quantization"), list(jobs.values()))
    for result in done[:-1]:
        assert "error" not in result, f"{result['error']}\n{tail(log)}"
        require_backplane(result)
    return dict(zip(jobs, done, strict=True))


@pytest.fixture(scope="module")
def on_sim(tiny_llama: Path, mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    work = batch(IDS, greedy(TOKENS, logprobs=0, prompt_logprobs=0))
    jobs = {name: job(tiny_llama, work, quantization=name) for name in FORMATS} | mixture_jobs(mixture)
    results = run_engines(tmp_path_factory.mktemp("sim"), list(jobs.values()), SIM, device="sim")
    return dict(zip(jobs, results, strict=True))


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_models_complete_facts(results: dict[str, Result], tokenizer: Any, name: str) -> None:
    done = [tokenizer.decode(output["token_ids"]) for output in results[name]["batches"][0]]
    assert all(answer in text for text, answer in zip(done, ANSWERS, strict=True)), done


@cache
def of_decoded_weights(folder: Path, name: str, text: tuple[int, ...]) -> list[float]:
    """Returns the log-probabilities of `text` by transformers with weights that were quantized and decoded."""
    return reference.prompt_logprobs(quantized_reference.load(folder, ONLINE[name], HEAD), text)


@pytest.mark.feature("Format: online quantization: {name}", "cpu")
@pytest.mark.parametrize("name", FORMATS)
def test_the_default_model_is_near_its_decoded_weights(
    results: dict[str, Result], smollm2: Path, text: list[int], name: str
) -> None:
    ours = results[name]["batches"][1][0]["prompt_logprobs"]
    assert_near(ours, of_decoded_weights(smollm2, name, tuple(text)), "thirty layers")


@pytest.mark.feature("Format: online quantization: int4, over HTTP", "{device}")
@pytest.mark.parametrize(
    ("device", "variables"),
    [("cpu", {}), pytest.param("sim", SIM, marks=pytest.mark.exhaustive)],
    ids=["cpu", "sim"],
)
def test_the_command_of_the_page(device: str, variables: dict[str, str], tiny_llama: Path, tmp_path: Path) -> None:
    """Tests the command with a small model in place of the default one, which takes long to quantize."""
    arguments, name = EXAMPLE
    assert name == "int4", "the feature mark of this test names int4"
    limits = [word for option, value in LIMITS.items() for word in (f"--{option.replace('_', '-')}", str(value))]
    _, *options = shlex.split(arguments)
    given = (str(tiny_llama), *options, *limits, "--max-num-seqs", "4", "--dtype", "float32")
    extension = ("--worker-extension-cls", "worker_rpc.OverHttp")
    with Server(tmp_path, *given, *extension, variables=variables) as server:
        assert f"Operators on device {device}:" in server.text()
        request = {"prompt": IDS[1], "prompt_logprobs": 0, "max_tokens": 1, "temperature": 0}
        response = server.http.post("/v1/completions", json=request)
        assert response.status_code == 200, response.text
        [weights] = server.http.post("/collective_rpc", json={"method": "rpc_weight_types"}).json()["results"]
    assert weights["codes"] > weights["others"], weights
    [choice] = response.json()["choices"]
    logprobs = [
        one and one[str(token)]["logprob"] for one, token in zip(choice["prompt_logprobs"], IDS[1], strict=True)
    ]
    decoded = quantized_reference.load(tiny_llama, ONLINE[name], HEAD)
    assert_near(logprobs, reference.prompt_logprobs(decoded, IDS[1]), "four layers")


def test_a_small_model_is_nearer(results: dict[str, Result], tiny_llama: Path) -> None:
    """Tests a small model with an untied head; unquantized weights would exceed its tolerance."""
    decoded, full = quantized_reference.load(tiny_llama, ONLINE["int4"], HEAD), reference.load(tiny_llama)
    for ids, output in zip(IDS, results["one worker"]["batches"][0], strict=True):
        assert_near(output["prompt_logprobs"], reference.prompt_logprobs(decoded, ids), "four layers")
        differences = compared(output["prompt_logprobs"], reference.prompt_logprobs(full, ids))
        assert sum(differences) / len(differences) > 2 * TOLERANCES["four layers"][0]


@pytest.mark.feature("Format: online quantization: {name}", "sim")
@pytest.mark.parametrize("name", FORMATS)
def test_another_device_quantizes(on_sim: dict[str, Result], tiny_llama: Path, name: str) -> None:
    assert on_sim[name]["device"] == "bpnpu"
    decoded = quantized_reference.load(tiny_llama, ONLINE[name], HEAD)
    for ids, output in zip(IDS, on_sim[name]["batches"][0], strict=True):
        assert_near(output["prompt_logprobs"], reference.prompt_logprobs(decoded, ids), "four layers")


@pytest.mark.feature("Format: online quantization: {name}, experts", "cpu")
@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_near_their_decoded_weights(results: dict[str, Result], mixture: Path, name: str) -> None:
    """Tests experts; with 4 bits on two workers, each of which has a part of every expert."""
    assert_mixture_near(results[f"experts, {name}"], mixture, name)


@pytest.mark.feature("Format: online quantization: {name}, experts", "sim")
@pytest.mark.parametrize("name", FORMATS)
def test_another_device_quantizes_experts(on_sim: dict[str, Result], mixture: Path, name: str) -> None:
    assert_mixture_near(on_sim[f"experts, {name}"], mixture, name)


def assert_mixture_near(result: Result, mixture: Path, name: str) -> None:
    """Fails unless the result is near decoded experts, and clearly further from unquantized experts."""
    decoded = quantized_reference.load(mixture, ONLINE[name], HEAD)
    full = quantized_reference.load(mixture, ONLINE[name], HEAD, experts=False)
    near, far = [], []
    for ids, output in zip(MIXTURE_IDS, result["batches"][0], strict=True):
        assert_near(output["prompt_logprobs"], reference.prompt_logprobs(decoded, ids), "four layers")
        near += compared(output["prompt_logprobs"], reference.prompt_logprobs(decoded, ids))
        far += compared(output["prompt_logprobs"], reference.prompt_logprobs(full, ids))
    assert sum(far) > 3 * sum(near), f"{sum(near) / len(near):.4f} and {sum(far) / len(far):.4f}"


def assert_near(ours: list[float | None], expected: list[float], kind: str) -> None:
    """Fails unless the log-probabilities are within the tolerances of `kind`."""
    differences = compared(ours, expected)
    mean, largest = sum(differences) / len(differences), max(differences)
    print(f"mean {mean:.4f}, largest {largest:.4f}")
    assert mean < TOLERANCES[kind][0], f"mean {mean:.4f}, largest {largest:.4f}"
    assert largest < TOLERANCES[kind][1], f"mean {mean:.4f}, largest {largest:.4f}"


def compared(ours: list[float | None], expected: list[float]) -> list[float]:
    """Returns the absolute differences of log-probabilities; the first token has none."""
    assert ours[0] is None
    return [abs(one - other) for one, other in zip(ours[1:], expected, strict=True) if one is not None]


def test_two_workers_compute_what_one_does(results: dict[str, Result]) -> None:
    """Tests two workers against one: their codes are the same, and another order of summation changes some roundings.

    The codes are the same because the parts of a row are whole groups.
    """
    same = 0
    for one, two in zip(*(results[name]["batches"][0] for name in ("one worker", "two workers")), strict=True):
        pairs = enumerate(zip(one["token_ids"], two["token_ids"], strict=True))
        parted = next((place for place, (ours, theirs) in pairs if ours != theirs), len(one["token_ids"]))
        same += parted
        # Where the tokens first differ, two of them were near a tie; later tokens continue different texts.
        assert two["logprobs"][: parted + 1] == pytest.approx(one["logprobs"][: parted + 1], abs=0.1)
        assert two["prompt_logprobs"][1:] == pytest.approx(one["prompt_logprobs"][1:], abs=0.1)
    assert same >= TOKENS, "at least half of all tokens must be equal"


def test_embeddings_stay_near(results: dict[str, Result]) -> None:
    full, quantized = (torch.tensor(results[name]["embeddings"]) for name in ("embeddings", "quantized embeddings"))
    assert torch.nn.functional.cosine_similarity(full, quantized).min() > 0.999
    assert not torch.equal(full, quantized)


def test_a_quantized_checkpoint_is_refused(results: dict[str, Result]) -> None:
    assert "quantized already (gptq)" in results["quantized already"]["error"]
