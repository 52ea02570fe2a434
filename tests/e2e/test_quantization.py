"""`--quantization int8` and `int4`: the default model still answers, near what its decoded weights give."""

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
from architecture import COMMON
from engine import Result, batch, greedy, insist_on_backplane, job, run_engines, try_engines
from processes import on_path, tail
from server import Server
from tiny_models import randomize

from vllm_backplane.quantization.online.formats import HEAD, ONLINE

pytestmark = [pytest.mark.server, pytest.mark.models]

QUESTIONS = ("The capital of France is", "The opposite of hot is")
ANSWERS = ("Paris", "cold")
"""Begun sentences, because the first word of the chat answer leads by 0.08 alone in float32."""
TOLERANCES = {"four layers": (0.03, 0.12), "thirty layers": (0.15, 0.8)}
"""Mean and largest absolute difference of log-probabilities, two to four times what is measured. Sums in another order
make an input fall on the other side of a rounding now and then. From layer to layer that grows, until after thirty the
roundings have little to do with each other."""
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
"""Each token goes to all experts: where two are nearly equally likely, rounding would choose the other one."""
MIXTURE_IDS = ([3, 77, 401, 12], [(17 * place + place * place) % 500 + 5 for place in range(40)])
CHECKPOINT = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
LIMITS = {"max_model_len": 512, "max_num_batched_tokens": 512}
SIM = {"BACKPLANE_DEVICE": "sim", "BACKPLANE_SIM_FALLBACK": "forbid", "BACKPLANE_SIM_MEMORY": "2GiB"}
PAGE = Path(__file__).resolve().parents[2] / "docs/serve/quantization.md"
[EXAMPLE] = re.findall(r"^vllm-backplane serve (.*--quantization (\w+).*)$", PAGE.read_text(), re.MULTILINE)
"""Arguments, and the format."""


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
    """By name; the last is to be refused."""
    small = batch(IDS, greedy(TOKENS, logprobs=0, prompt_logprobs=0))
    asked = (
        batch([tokenizer.encode(text) for text in QUESTIONS], greedy(2)),
        batch([text], greedy(1, prompt_logprobs=0)),
    )
    jobs = {name: job(smollm2, *asked, quantization=name, **LIMITS) for name in FORMATS}
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
        insist_on_backplane(result)
    return dict(zip(jobs, done, strict=True))


@pytest.fixture(scope="module")
def on_sim(tiny_llama: Path, mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    work = batch(IDS, greedy(TOKENS, logprobs=0, prompt_logprobs=0))
    jobs = {name: job(tiny_llama, work, quantization=name) for name in FORMATS} | mixture_jobs(mixture)
    results = run_engines(tmp_path_factory.mktemp("sim"), list(jobs.values()), SIM, device="sim")
    return dict(zip(jobs, results, strict=True))


@pytest.mark.parametrize("name", FORMATS)
def test_it_knows_what_it_knew(results: dict[str, Result], tokenizer: Any, name: str) -> None:
    done = [tokenizer.decode(output["token_ids"]) for output in results[name]["batches"][0]]
    assert all(answer in text for text, answer in zip(done, ANSWERS, strict=True)), done


@cache
def of_decoded_weights(folder: Path, name: str, text: tuple[int, ...]) -> list[float]:
    return reference.prompt_logprobs(quantized_reference.load(folder, ONLINE[name], HEAD), text)


@pytest.mark.feature("Format: online quantization: {name}", "cpu")
@pytest.mark.parametrize("name", FORMATS)
def test_the_default_model_is_near_its_decoded_weights(
    results: dict[str, Result], smollm2: Path, text: list[int], name: str
) -> None:
    ours = results[name]["batches"][1][0]["prompt_logprobs"]
    assert_near(ours, of_decoded_weights(smollm2, name, tuple(text)), "thirty layers")


@pytest.mark.feature("Format: online quantization: int4, over HTTP", "{device}")
@pytest.mark.parametrize(("device", "variables"), [("cpu", {}), ("sim", SIM)], ids=["cpu", "sim"])
def test_the_command_of_the_page(
    device: str, variables: dict[str, str], smollm2: Path, text: list[int], tmp_path: Path
) -> None:
    arguments, name = EXAMPLE
    assert name == "int4", "which is what the mark says"
    limits = [word for option, value in LIMITS.items() for word in (f"--{option.replace('_', '-')}", str(value))]
    given = (*shlex.split(arguments), *limits, "--max-num-seqs", "4", "--dtype", "float32")
    questions = ("--worker-extension-cls", "worker_questions.OverHttp")
    asking = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": on_path(Path(__file__).parent)}
    asking["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # not spawned: each process would import all of vLLM again
    with Server(tmp_path, *given, *questions, variables=asking | variables) as server:
        assert f"Operators on device {device}:" in server.text()
        request = {"prompt": text, "prompt_logprobs": 0, "max_tokens": 1, "temperature": 0}
        answer = server.http.post("/v1/completions", json=request)
        assert answer.status_code == 200, answer.text
        [weights] = server.http.post("/collective_rpc", json={"method": "asked_for_types"}).json()["results"]
    # What rounding changes in all is less than what tolerances of thirty layers allow.
    assert weights["codes"] > weights["others"], weights
    [choice] = answer.json()["choices"]
    told = [one and one[str(token)]["logprob"] for one, token in zip(choice["prompt_logprobs"], text, strict=True)]
    assert_near(told, of_decoded_weights(smollm2, name, tuple(text)), "thirty layers")


def test_a_small_model_is_nearer(results: dict[str, Result], tiny_llama: Path) -> None:
    """Its head is not tied. Without quantization it is further away than the tolerance."""
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
    """With 4 bits on two workers: each has a part of every expert."""
    assert_mixture_near(results[f"experts, {name}"], mixture, name)


@pytest.mark.feature("Format: online quantization: {name}, experts", "sim")
@pytest.mark.parametrize("name", FORMATS)
def test_another_device_quantizes_experts(on_sim: dict[str, Result], mixture: Path, name: str) -> None:
    assert_mixture_near(on_sim[f"experts, {name}"], mixture, name)


def assert_mixture_near(result: Result, mixture: Path, name: str) -> None:
    """And not as near to what experts without quantization give."""
    decoded = quantized_reference.load(mixture, ONLINE[name], HEAD)
    full = quantized_reference.load(mixture, ONLINE[name], HEAD, experts=False)
    near, far = [], []
    for ids, output in zip(MIXTURE_IDS, result["batches"][0], strict=True):
        assert_near(output["prompt_logprobs"], reference.prompt_logprobs(decoded, ids), "four layers")
        near += compared(output["prompt_logprobs"], reference.prompt_logprobs(decoded, ids))
        far += compared(output["prompt_logprobs"], reference.prompt_logprobs(full, ids))
    assert sum(far) > 3 * sum(near), f"{sum(near) / len(near):.4f} and {sum(far) / len(far):.4f}"


def assert_near(ours: list[float | None], expected: list[float], kind: str) -> None:
    differences = compared(ours, expected)
    mean, largest = sum(differences) / len(differences), max(differences)
    print(f"mean {mean:.4f}, largest {largest:.4f}")
    assert mean < TOLERANCES[kind][0], f"mean {mean:.4f}, largest {largest:.4f}"
    assert largest < TOLERANCES[kind][1], f"mean {mean:.4f}, largest {largest:.4f}"


def compared(ours: list[float | None], expected: list[float]) -> list[float]:
    assert ours[0] is None
    return [abs(one - other) for one, other in zip(ours[1:], expected, strict=True) if one is not None]


def test_two_workers_compute_what_one_does(results: dict[str, Result]) -> None:
    """Parts of a row are whole groups, so codes are the same; sums in another order move some roundings."""
    same = 0
    for one, two in zip(*(results[name]["batches"][0] for name in ("one worker", "two workers")), strict=True):
        pairs = enumerate(zip(one["token_ids"], two["token_ids"], strict=True))
        parted = next((place for place, (ours, theirs) in pairs if ours != theirs), len(one["token_ids"]))
        same += parted
        # Where they part, two tokens were near a tie; what follows is about another text.
        assert two["logprobs"][: parted + 1] == pytest.approx(one["logprobs"][: parted + 1], abs=0.1)
        assert two["prompt_logprobs"][1:] == pytest.approx(one["prompt_logprobs"][1:], abs=0.1)
    assert same >= TOKENS, "of twice as many"


def test_embeddings_stay_near(results: dict[str, Result]) -> None:
    full, quantized = (torch.tensor(results[name]["embeddings"]) for name in ("embeddings", "quantized embeddings"))
    assert torch.nn.functional.cosine_similarity(full, quantized).min() > 0.999
    assert not torch.equal(full, quantized)


def test_a_quantized_checkpoint_is_refused(results: dict[str, Result]) -> None:
    assert "quantized already (gptq)" in results["quantized already"]["error"]
