"""Tests that quantizing weights at loading, or repacking quantized ones, needs little more memory than the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import scheme_checkpoints as made
import torch

pytestmark = [pytest.mark.server]

LIMIT = 1.2
"""Largest allowed memory peak while loading, as a multiple of the size of the loaded weights."""
GROUP = 128
WIDTHS = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 4,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
"""Sizes of Qwen2.5-0.5B, with a sixth of its layers."""
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}

Tensors = dict[str, torch.Tensor]


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def _gptq(inputs: int, outputs: int, by_activation: bool) -> Tensors:
    groups_of = torch.arange(inputs, dtype=torch.int32) // GROUP
    if by_activation:
        groups_of = groups_of[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    return {
        "qweight": zeros(inputs // 8, outputs),
        "qzeros": zeros(inputs // GROUP, outputs // 8),
        "scales": zeros(inputs // GROUP, outputs, dtype=torch.float16),
        "g_idx": groups_of,
    }


def _awq(inputs: int, outputs: int) -> Tensors:
    return {
        "qweight": zeros(inputs, outputs // 8),
        "qzeros": zeros(inputs // GROUP, outputs // 8),
        "scales": zeros(inputs // GROUP, outputs, dtype=torch.float16),
    }


def _packed(inputs: int, outputs: int, bits: int) -> Tensors:
    return {
        "weight_packed": zeros(outputs, inputs * bits // 32),
        "weight_scale": zeros(outputs, inputs // GROUP, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([outputs, inputs]),
    }


def _int8(inputs: int, outputs: int) -> Tensors:
    return {"weight": zeros(outputs, inputs, dtype=torch.int8), "weight_scale": zeros(outputs, 1, dtype=torch.float32)}


SCHEMES: dict[str, tuple[dict[str, Any], Callable[[int, int], Tensors]]] = {
    "GPTQ": ({**made.GPTQ, "group_size": GROUP}, lambda i, o: _gptq(i, o, False)),
    "GPTQ, by activation": (
        {**made.GPTQ, "group_size": GROUP, "desc_act": True},
        lambda i, o: _gptq(i, o, True),
    ),
    "AWQ": ({**made.AWQ, "group_size": GROUP}, _awq),
    "W4A16": (made.compressed(4, GROUP), lambda i, o: _packed(i, o, 4)),
    "W8A16": (made.compressed(8, GROUP), lambda i, o: _packed(i, o, 8)),
    "W8A8": (made.compressed_int8(), _int8),
}
"""The quantization config and a function that makes the tensors of a layer, by scheme."""
ONLINE = {"int8": (True, False), "int4": (False, False), "int4, experts": (False, True)}
"""Cases of online quantization: whether the head is tied to the embedding, and whether the model has experts."""
MIXTURES = ("AWQ", "W8A8")
"""Schemes that are also loaded with experts: one packs several codes into a word, and the other does not."""
SHARED = {"GPTQ, by activation, shared": ("GPTQ, by activation", False), "AWQ experts, shared": ("AWQ", True)}
"""Cases of the load format `backplane_shared`: the scheme, and whether the model has experts."""
ALWAYS = {"int8", "int4, experts", "GPTQ, by activation", "AWQ experts", "GPTQ, by activation, shared"}
"""The cases of `make test`, one for each way of loading. `make test-all` loads the others too."""
EXPERTS = {"num_experts": 24, "moe_intermediate_size": 512, "num_experts_per_tok": 2}
"""Configuration of the experts, which are much larger than the attention of a layer."""


def save(folder: Path, tied: bool, mixture: bool, widths: dict[str, int] = WIDTHS) -> Path:
    """Saves an unquantized model, and returns the folder.

    The vocabulary is much larger than a layer. With experts, the model has few layers, and each of them takes nearly as
    much memory before its quantization as all of them take after it.
    """
    import transformers

    kind, changes = "Qwen2", {"vocab_size": 40000 if widths is WIDTHS else 512}
    if mixture:
        kind, changes = "Qwen3Moe", {"vocab_size": 512, "num_experts": 8, "num_experts_per_tok": 2}
        changes |= {"num_hidden_layers": 4, "moe_intermediate_size": widths["intermediate_size"] // 4, "head_dim": 64}
    config = getattr(transformers, f"{kind}Config")(
        **{**widths, **changes}, tie_word_embeddings=tied, dtype=torch.bfloat16
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -0.05, 0.05)
    model.save_pretrained(folder)
    return folder


def save_scheme(
    folder: Path, name: str, widths: dict[str, int] = WIDTHS, *, mixture: bool = False, distinct: bool = False
) -> Path:
    """Saves a quantized model, and returns the folder.

    The unquantized vocabulary is small. With `distinct`, no two tensors are equal, because a model with shared weights
    would store equal ones once.
    """
    import transformers
    from safetensors.torch import save_file

    config, make = SCHEMES[name]
    kind = "Qwen3Moe" if mixture else "Llama"
    more = {**EXPERTS, "head_dim": 64} if mixture else {}
    settings = {**widths, **more, "vocab_size": 2048, "tie_word_embeddings": False, "dtype": torch.bfloat16}
    described = getattr(transformers, f"{kind}Config")(**settings).to_dict()
    hidden, width, keys = widths["hidden_size"], widths["intermediate_size"], 128
    tensors = {
        name: zeros(2048, hidden, dtype=torch.bfloat16) for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    tensors["model.norm.weight"] = zeros(hidden, dtype=torch.bfloat16)
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
    }
    sizes["self_attn.o_proj"] = (hidden, hidden)
    unquantized: dict[str, tuple[int, ...]] = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    if mixture:
        width = EXPERTS["moe_intermediate_size"]
        unquantized |= {
            "self_attn.q_norm": (64,),
            "self_attn.k_norm": (64,),
            "mlp.gate": (EXPERTS["num_experts"], hidden),
        }
    for part in (f"mlp.experts.{one}" for one in range(EXPERTS["num_experts"])) if mixture else ("mlp",):
        sizes |= {f"{part}.gate_proj": (hidden, width), f"{part}.up_proj": (hidden, width)}
        sizes[f"{part}.down_proj"] = (width, hidden)
    for layer in range(widths["num_hidden_layers"]):
        for part, shape in unquantized.items():
            tensors[f"model.layers.{layer}.{part}.weight"] = zeros(*shape, dtype=torch.bfloat16)
        for part, (inputs, outputs) in sizes.items():
            tensors |= {f"model.layers.{layer}.{part}.{last}": one for last, one in make(inputs, outputs).items()}
    for name, tensor in tensors.items() if distinct else ():
        if tensor.is_floating_point():
            tensor.uniform_(0.01, 0.02)
        elif not name.endswith("g_idx"):
            tensor.random_()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    described |= {"architectures": [f"{kind}ForCausalLM"], "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def checkpoints(folder: Path, name: str) -> tuple[Path, Path, str]:
    """Saves the models of a case, and returns their folders and the quantization."""
    scheme = name.removesuffix(" experts")
    if name in ONLINE:
        quantization = name.partition(",")[0]
        return save(folder / f"small {name}", *ONLINE[name], SMALL), save(folder / name, *ONLINE[name]), quantization
    if name in SHARED:
        scheme, mixture = SHARED[name]
        twice = save_scheme(folder / name, scheme, {**WIDTHS, "num_hidden_layers": 2}, mixture=mixture, distinct=True)
        return twice, twice, "shared"
    mixture = name != scheme
    widths = {**WIDTHS, "num_hidden_layers": 3} if mixture else WIDTHS
    small = save_scheme(folder / f"small {name}", scheme, SMALL, mixture=mixture)
    return small, save_scheme(folder / name, scheme, widths, mixture=mixture), "none"


def cases(names: Iterable[str]) -> list[Any]:
    """Returns the cases as parameters of a test."""
    return [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.exhaustive) for name in names]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Returns the measured memory by case. One process loads all models of the tests that were selected."""
    folder = tmp_path_factory.mktemp("checkpoints")
    selected = [
        item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)
    ]
    folders = {name: checkpoints(folder, name) for item in selected for name in [item.callspec.params["name"]]}
    given = [str(word) for pair in folders.values() for word in pair]
    script = Path(__file__).with_name("loading_memory.py")
    variables = {**os.environ, "TMPDIR": str(folder)}
    command = [sys.executable, str(script), *given]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900, env=variables)
    assert run.returncode == 0, run.stderr[-3000:]
    measured = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"model"')]
    result = dict(zip(folders, measured, strict=True))
    for name, (_small, checkpoint, _quantization) in folders.items():
        result[name]["full"] = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
        for file in checkpoint.glob("*.safetensors"):
            file.unlink()
    return result


@pytest.mark.parametrize("name", cases([*ONLINE, *SCHEMES, *(f"{name} experts" for name in MIXTURES)]))
def test_the_peak_is_near_the_end(found: dict[str, dict[str, Any]], name: str) -> None:
    memory = found[name]
    print(f"{name}: {memory}, {memory['peak'] / memory['weights']:.3f}")
    if name in ONLINE:
        assert memory["weights"] < memory["full"], "weights must be quantized"
    else:
        assert memory["weights"] == pytest.approx(memory["full"], rel=0.1), "weights must stay quantized"
    assert memory["after"] > 0.9 * memory["weights"], "the weights must be in the memory that is measured"
    assert memory["peak"] < LIMIT * memory["weights"], memory


@pytest.mark.parametrize("name", cases(SHARED))
def test_a_second_model_shares_the_weights_of_a_checkpoint(found: dict[str, dict[str, Any]], name: str) -> None:
    """Tests `--load-format backplane_shared`: a second model of the checkpoint needs almost no memory of its own."""
    memory = found[name]
    print(f"{name}: {memory}")
    assert memory["weights"] > 0.9 * memory["full"], "the tensors of the model must differ from each other"
    assert memory["after"] < 0.25 * memory["weights"] < memory["peak"], memory
