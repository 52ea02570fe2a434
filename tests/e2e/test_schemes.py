"""Tests checkpoints of GPTQ, AWQ and compressed-tensors against transformers with the decoded weights."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import multimodal_models
import pytest
import reference
import scheme_checkpoints as made
import torch
from engine import Result, batch, greedy, job, require_backplane, run_engines, try_engines
from model_spec import COMMON
from processes import SIM, tail
from server import LIMITS, VLLM, Server
from tiny_models import randomize

pytestmark = pytest.mark.server

PROMPTS = [[3, 77, 401, 12], [(17 * place + place * place) % 500 + 5 for place in range(24)]]
TOKENS = 8
ROUNDED = 0.03
"""Largest allowed mean difference of log-probabilities, where the inputs of matrix products are rounded to 8 bits."""


@dataclass(frozen=True)
class Scheme:
    """Describes a quantization scheme of checkpoints, and the model that is stored in it."""

    config: Mapping[str, Any]
    """The quantization config of the checkpoint."""
    make: Callable[..., made.Stored]
    """Function of the inputs, the outputs and a seed, which makes a layer."""
    engine: Mapping[str, Any]
    """Arguments of the engine."""
    mixture: bool = False
    """Whether the model has experts."""
    by_token: bool = False
    """Whether the scheme itself rounds inputs to 8 bits, with one scale per token."""


def _by_activation(inputs: int, outputs: int, seed: int) -> made.Stored:
    return made.gptq(inputs, outputs, 4, 32, seed=seed, by_activation=inputs)  # fused layers need the same order


def _plain(inputs: int, outputs: int, seed: int) -> made.Stored:
    return made.gptq(inputs, outputs, 4, 32, seed=seed)


SCHEMES = {
    "GPTQ, 4 bits": Scheme(made.GPTQ, _plain, {}),
    # Columns were quantized in activation order, but in groups that were fixed before, so g_idx is in plain order.
    "GPTQ, 4 bits, static groups": Scheme({**made.GPTQ, "desc_act": True, "static_groups": True}, _plain, {}),
    "GPTQ, 4 bits, activation order": Scheme({**made.GPTQ, "desc_act": True}, _by_activation, {}),
    "GPTQ, 8 bits, zero points, experts": Scheme(
        {**made.GPTQ, "bits": 8, "sym": False, "group_size": 64, "dynamic": {"-:.*mlp.gate$": {}}},
        lambda i, o, s: made.gptq(i, o, 8, 64, seed=s, symmetric=False),
        {},
        mixture=True,
    ),
    "AWQ, 8 bits": Scheme({**made.AWQ, "bits": 8}, lambda i, o, s: made.awq(i, o, 8, 32, seed=s), {}),
    "W4A16, two workers": Scheme(
        made.compressed(4, 32, symmetric=False),
        lambda i, o, s: made.pack_quantized(i, o, 4, 32, seed=s, symmetric=False),
        {"tensor_parallel_size": 2},
    ),
    "W8A16, experts": Scheme(
        made.compressed(8, -1), lambda i, o, s: made.pack_quantized(i, o, 8, -1, seed=s), {}, mixture=True
    ),
    "W8A8, experts": Scheme(
        made.compressed_int8(), lambda i, o, s: made.int_quantized(i, o, seed=s), {}, mixture=True, by_token=True
    ),
    "AWQ, experts, two workers": Scheme(
        made.AWQ,
        lambda i, o, s: made.awq(i, o, 4, 32, seed=s),
        {"tensor_parallel_size": 2},
        mixture=True,
    ),
    "W4A16, experts": Scheme(
        made.compressed(4, 32), lambda i, o, s: made.pack_quantized(i, o, 4, 32, seed=s), {}, mixture=True
    ),
}
"""The schemes by name. In models with experts, the attention layers are quantized too."""
ROWS = {
    "GPTQ, 8 bits, zero points, experts": ("GPTQ, 8 bits, zero points", "GPTQ, experts"),
    "AWQ, experts, two workers": ("AWQ", "AWQ, experts, two workers"),
    "W4A16, two workers": ("compressed-tensors W4A16, two workers",),
    "W4A16, experts": ("compressed-tensors W4A16, experts",),
    "W8A16, experts": ("compressed-tensors W8A16", "compressed-tensors W8A16, experts"),
    "W8A8, experts": ("compressed-tensors W8A8", "compressed-tensors W8A8, experts"),
}
"""Names in docs/features.toml of the schemes that have another name there."""
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
BY_ACTIVATION = "GPTQ, 4 bits, activation order"
PAGE = Path(__file__).resolve().parents[2] / "docs/serve/checkpoints.md"
[EXAMPLE] = re.findall(r"^vllm serve (.*gptq.*)$", PAGE.read_text(), re.MULTILINE)


def named(*devices: str, names: Iterable[str] = SCHEMES, always: Container[str] = SCHEMES) -> list[Any]:
    """Returns the schemes as parameters of a test that demonstrates them on these devices. `make test` runs those in
    `always`."""
    return [
        pytest.param(
            name,
            marks=[
                *(pytest.mark.feature(f"Format: {row}", *devices) for row in ROWS.get(name, (name,))),
                *([] if name in always else [pytest.mark.exhaustive]),
            ],
        )
        for name in names
    ]


class ByToken(torch.nn.Module):
    """Computes a linear layer, and rounds its inputs to 8 bits, with one scale per token."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return torch.nn.functional.linear((x / scale).round() * scale, self.weight)


def quantized_parts(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the name in the checkpoint, without its last part, and the weight of each quantized layer.

    The weights are views of the model's parameters, so the caller can write into them.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            yield name, module.weight.data
        elif name.endswith(".experts"):
            for expert in range(len(module.gate_up_proj)):
                gate, up = module.gate_up_proj.data[expert].chunk(2)
                down = module.down_proj.data[expert]
                for part, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
                    yield f"{name}.{expert}.{part}", weight


def write(folder: Path, scheme: Scheme) -> Any:
    """Writes a checkpoint, and returns the transformers model with the decoded weights."""
    import transformers
    from safetensors.torch import save_file

    kind = "Qwen3Moe" if scheme.mixture else "Llama"
    config = getattr(transformers, f"{kind}Config")(**(MIXTURE if scheme.mixture else COMMON))
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    randomize(model)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items() if ".experts." not in name}
    for seed, (name, weight) in enumerate(list(quantized_parts(model))):
        outputs, inputs = weight.shape
        stored = scheme.make(inputs, outputs, seed)
        tensors.pop(f"{name}.weight", None)
        tensors |= {f"{name}.{last}": tensor for last, tensor in stored.tensors.items()}
        weight.copy_(stored.weight)
        if scheme.by_token and ".experts." not in name:  # transformers has experts in one tensor
            model.set_submodule(name, ByToken(weight))
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    described = {**config.to_dict(), "architectures": [f"{kind}ForCausalLM"], "quantization_config": scheme.config}
    (folder / "config.json").write_text(json.dumps(described))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("schemes")


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Any]:
    return {name: write(folder / name, scheme) for name, scheme in SCHEMES.items()}


def jobs_for(folder: Path, *names: str) -> list[dict[str, Any]]:
    """Returns the jobs that serve the named schemes."""
    work = batch(PROMPTS, greedy(TOKENS, logprobs=0))
    limits: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return [job(folder / name, work, **limits, **SCHEMES[name].engine) for name in names]


@pytest.fixture(scope="module")
def outcomes(
    folder: Path, models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Result], Result]:
    """Returns the results by name, and the result of an engine that must be refused. One process runs all engines."""
    jobs = jobs_for(folder, *SCHEMES)
    jobs.append(job(folder / "AWQ, 8 bits", hf_overrides={"quantization_config": {**made.GPTQ, "bits": 3}}))
    results, log = try_engines(tmp_path_factory.mktemp("engines"), jobs)
    for result in results[:-1]:
        assert "error" not in result, f"{result['error']}\n{tail(log)}"
        require_backplane(result)
    return dict(zip(SCHEMES, results[:-1], strict=True)), results[-1]


def distance(result: Result, model: Any) -> float:
    """Returns the mean absolute difference of log-probabilities between an engine and a transformers model."""
    differences = []
    for ids, output in zip(PROMPTS, result["batches"][0], strict=True):
        answer = output["token_ids"]
        # transformers scores the engine's own tokens, so that a near tie does not affect the tokens after it.
        expected = reference.prompt_logprobs(model, [*ids, *answer])[len(ids) - 1 :]
        differences += [abs(one - other) for one, other in zip(output["logprobs"], expected, strict=True)]
    print(f"log-probabilities differ by {sum(differences) / len(differences):.4f}, at most {max(differences):.4f}")
    return sum(differences) / len(differences)


@pytest.mark.parametrize("name", named("cpu"))
def test_answers_are_those_of_the_decoded_weights(
    outcomes: tuple[dict[str, Result], Result], models: dict[str, Any], name: str
) -> None:
    assert distance(outcomes[0][name], models[name]) < ROUNDED


def test_the_order_by_activation_is_seen(outcomes: tuple[dict[str, Result], Result], models: dict[str, Any]) -> None:
    """Tests that the activation order matters: the same codes and scales in plain order give other outputs."""
    assert distance(outcomes[0][BY_ACTIVATION], models["GPTQ, 4 bits"]) > 4 * ROUNDED


def test_what_cannot_run_is_refused_before_a_worker_starts(outcomes: tuple[dict[str, Result], Result]) -> None:
    assert "GPTQ with 3 bits does not run on device 'cpu'; choose a checkpoint of: GPTQ with 4" in outcomes[1]["error"]


ALWAYS_ON_SIM = {BY_ACTIVATION, "GPTQ, 8 bits, zero points, experts", "W4A16, two workers", "W8A8, experts"}
"""The schemes of `make test` on sim, one for each way of repacking. `make test-all` serves the others too."""


@pytest.fixture(scope="module")
def on_sim(
    request: pytest.FixtureRequest,
    folder: Path,
    models: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Result]:
    selected = {item.name for item in request.session.items if item.path == request.path}
    names = [name for name in SCHEMES if f"{test_another_device_serves_them.__name__}[{name}]" in selected]
    results = run_engines(tmp_path_factory.mktemp("sim"), jobs_for(folder, *names), SIM, device="sim")
    return dict(zip(names, results, strict=True))


@pytest.mark.parametrize("name", named("sim", always=ALWAYS_ON_SIM))
def test_another_device_serves_them(on_sim: dict[str, Result], models: dict[str, Any], name: str) -> None:
    assert on_sim[name]["device"] == "bpnpu"
    assert distance(on_sim[name], models[name]) < ROUNDED


@pytest.mark.feature("Format: GPTQ, 4 bits, over HTTP", "{device}")
@pytest.mark.parametrize(
    ("device", "variables"),
    [pytest.param("cpu", {}, id="cpu"), pytest.param("sim", SIM, id="sim", marks=pytest.mark.exhaustive)],
)
def test_the_command_of_the_page(
    device: str, variables: dict[str, str], folder: Path, models: dict[str, Any], tmp_path: Path
) -> None:
    [documented, *options] = shlex.split(EXAMPLE)
    name = "GPTQ, 4 bits"
    (tmp_path / documented).symlink_to(folder / name)
    # The response has log-probabilities by word, so the server needs a tokenizer.
    multimodal_models.tokenizer(COMMON["vocab_size"]).save_pretrained(folder / name)
    given = (str(tmp_path / documented), *options, *LIMITS)
    with Server(tmp_path, *given, command=VLLM, variables=variables) as server:
        assert f"Operators on device {device}:" in server.text()
        answers = [server.complete(ids, TOKENS, model=given[0], logprobs=0) for ids in PROMPTS]
    outputs = [{"token_ids": one["token_ids"], "logprobs": one["logprobs"]["token_logprobs"]} for one in answers]
    assert distance({"batches": [outputs]}, models[name]) < ROUNDED
