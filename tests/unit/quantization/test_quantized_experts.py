"""Tests experts that are quantized while they are loaded, against a numpy implementation of the formats' definition."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import signature
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import LoadConfig, VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_processing,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.utils import process_weights_after_loading

from vllm_backplane.errors import BackplaneError
from vllm_backplane.quantization.online.config import Int4Config, Int8Config, OnlineConfig
from vllm_backplane.quantization.online.experts import OnlineMoEMethod
from vllm_backplane.runtime import runtime

CONFIGS = (Int8Config, Int4Config)
GROUPS = {8: 64, 4: 32}
EXPERTS, HIDDEN, INNER, TOP_K, TOKENS = 6, 128, 80, 2, 9
"""Sizes for which the rows and groups of the down projection need padding."""
CPU = torch.device("cpu")
NEAR = 2e-3
"""Largest relative error of results: a value between two codes may be rounded either way."""
MODEL: Any = SimpleNamespace(dtype=torch.float32, quantization="int8", word_embeddings_untied_by_checkpoint=False)


@pytest.fixture(autouse=True)
def _alone(one_worker: None) -> None:
    """Initializes a group of one worker: parameters read their rank."""


def build(config: type[OnlineConfig], **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "params_dtype": torch.float32,
        "tp_size": 1,
        "dp_size": 1,
        "pcp_size": 1,
        "prefix": "model.layers.0.experts",
        "quant_config": config(),
    }
    runner = FusedMoEFactory(**(settings | changes))
    assert isinstance(runner.routed_experts.quant_method, OnlineMoEMethod)
    return runner


class Weights:
    """Holds random gate, up and down weights of each expert."""

    def __init__(self, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.parts: dict[str, np.ndarray] = {
            "w1": random.normal(size=(EXPERTS, INNER, HIDDEN)) * HIDDEN**-0.5,
            "w3": random.normal(size=(EXPERTS, INNER, HIDDEN)) * HIDDEN**-0.5,
            "w2": random.normal(size=(EXPERTS, HIDDEN, INNER)) * INNER**-0.5,
        }
        self.parts = {name: part.astype(np.float32) for name, part in self.parts.items()}

    def of(self, shard: str, expert: int) -> torch.Tensor:
        return torch.from_numpy(self.parts[shard][expert])


def load(runner: Any, weights: Weights, experts: Iterable[int] = range(EXPERTS)) -> None:
    """Loads experts in the order of a file, where w2 comes between the two parts of w13."""
    layer = runner.routed_experts
    for expert in experts:
        for shard in ("w1", "w2", "w3"):
            name = "w2_weight" if shard == "w2" else "w13_weight"
            param = getattr(layer, name)
            assert param.weight_loader(param, weights.of(shard, expert), name, shard, expert, return_success=True)


def finish(runner: Any) -> None:
    finalize_layerwise_processing(runner, MODEL)
    process_weights_after_loading(runner, MODEL, CPU)


def decoded(weight: np.ndarray, bits: int) -> np.ndarray:
    """Returns the dequantized weight (docs/serve/quantization.md): groups along the input, scales in float16."""
    rows, size = weight.shape
    group = GROUPS[bits]
    padded = np.pad(weight.astype(np.float64), ((0, 0), (0, -size % group))).reshape(rows, -1, group)
    if bits == 8:
        scale = (np.abs(padded).max(-1, keepdims=True) / 127).astype(np.float16).astype(np.float64)
        values = np.round(padded / scale) * scale
    else:
        low = padded.min(-1, keepdims=True).astype(np.float16).astype(np.float64)
        scale = ((padded.max(-1, keepdims=True) - low) / 15).astype(np.float16).astype(np.float64)
        values = np.clip(np.round((padded - low) / scale), 0, 15) * scale + low
    return values.reshape(rows, -1)[:, :size]


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """Returns inputs quantized to 8 bits, with one scale per group of the weight."""
    group = GROUPS[bits]
    padded = np.pad(x, (0, -len(x) % group)).reshape(-1, group)
    scale = np.maximum(np.abs(padded).max(-1, keepdims=True), 1e-30) / 127
    return (np.round(padded / scale) * scale).reshape(-1)[: len(x)]


def silu_and_mul(h: np.ndarray) -> np.ndarray:
    gate, up = np.split(h, 2)
    return gate / (1 + np.exp(-gate)) * up


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(TOKENS, HIDDEN, generator=generator), torch.randn(TOKENS, EXPERTS, generator=generator)


def expected(
    weights: Weights,
    bits: int | None,
    activation: Any = silu_and_mul,
    biases: tuple[np.ndarray, np.ndarray] | None = None,
    experts: Iterable[int] = range(EXPERTS),
    on_input: bool = False,
) -> np.ndarray:
    """Returns the outputs in float64, without quantization if `bits` is None."""

    def multiplied(weight: np.ndarray, x: np.ndarray) -> np.ndarray:
        return weight.astype(np.float64) @ x if bits is None else decoded(weight, bits) @ rounded(x, bits)

    x, logits = (tensor.double().numpy() for tensor in inputs())
    out = np.zeros_like(x)
    for token in range(TOKENS):
        chosen = np.argsort(-logits[token])[: 1 if on_input else TOP_K]
        shares = np.exp(logits[token][chosen])
        shares /= 1 + shares if on_input else shares.sum()  # the sigmoid of the best, or a softmax
        for expert, share in zip(chosen, shares, strict=True):
            if expert not in experts:
                continue
            value = x[token] * (share if on_input else 1)
            hidden = multiplied(np.concatenate((weights.parts["w1"][expert], weights.parts["w3"][expert])), value)
            made = multiplied(weights.parts["w2"][expert], activation(hidden + (biases[0][expert] if biases else 0)))
            out[token] += (made + (biases[1][expert] if biases else 0)) * (1 if on_input else share)
    return out


def forward(runner: Any) -> np.ndarray:
    x, logits = inputs()
    with set_forward_context(None, get_current_vllm_config(), num_tokens=TOKENS):
        return runner(hidden_states=x, router_logits=logits).double().numpy()


def distance(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def bits_of(config: type[OnlineConfig]) -> int:
    return 8 if config is Int8Config else 4


@pytest.mark.parametrize("config", CONFIGS)
def test_they_are_quantized_and_multiplied_by_the_definition(config: type[OnlineConfig]) -> None:
    runner, weights, bits = build(config), Weights(), bits_of(config)
    assert runner.routed_experts.w13_weight.is_meta, "memory of the full size was taken"
    load(runner, weights)
    finish(runner)
    layer = runner.routed_experts
    assert layer.w13_weight.dtype == layer.w2_weight.dtype == runtime().device.quantized_layout(bits).code_type(bits)
    got = forward(runner)
    assert distance(got, expected(weights, bits)) < NEAR
    assert distance(got, expected(weights, None)) > 2 * NEAR, "nothing was rounded"


def test_all_experts_may_come_in_one_tensor() -> None:
    runner, weights = build(Int4Config), Weights()
    layer = runner.routed_experts
    for shard, name in (("w1", "w13_weight"), ("w2", "w2_weight"), ("w3", "w13_weight")):
        param = getattr(layer, name)
        param.weight_loader(param, torch.from_numpy(weights.parts[shard]), name, shard, 0)
    finish(runner)
    assert distance(forward(runner), expected(weights, 4)) < NEAR


def test_one_expert_is_in_memory_at_a_time() -> None:
    runner, weights = build(Int8Config), Weights()
    method = runner.routed_experts.quant_method
    load(runner, weights, range(2))
    assert not method._incomplete, "parts that were quantized are kept"
    assert runner.routed_experts.w13_weight.is_meta
    assert set(method._packed) == {"w13", "w2"}


def test_an_expert_that_is_not_in_the_checkpoint_is_named() -> None:
    runner = build(Int8Config)
    load(runner, Weights(), [0, 1, 2, 4, 5])
    with pytest.raises(BackplaneError, match=r"experts \[3\] of model\.layers\.0\.experts"):
        finish(runner)


def test_they_are_loaded_again_at_the_same_addresses() -> None:
    runner, first, second = build(Int4Config), Weights(), Weights(5)
    record_metadata_for_reloading(runner)
    load(runner, first)
    finish(runner)
    before = {name: each.data_ptr() for name, each in runner.named_parameters()}
    with pytest.raises(BackplaneError, match="reload_weights"):
        load(runner, second)
    initialize_layerwise_reload(runner)
    load(runner, second)
    finalize_layerwise_processing(runner, MODEL)
    assert {name: each.data_ptr() for name, each in runner.named_parameters()} == before
    assert distance(forward(runner), expected(second, 4)) < NEAR


def test_a_worker_keeps_its_own_experts() -> None:
    weights, total = Weights(), np.zeros((TOKENS, HIDDEN))
    for rank, local in enumerate(([1, 4], [0, 2, 3, 5])):
        runner = build(Int8Config, prefix=f"model.layers.{rank}.experts")
        layer = runner.routed_experts
        layer._expert_map = torch.tensor([local.index(e) if e in local else -1 for e in range(EXPERTS)]).int()
        layer.quant_method._experts = len(local)
        for absent in set(range(EXPERTS)) - set(local):
            param = layer.w2_weight
            assert not param.weight_loader(param, weights.of("w2", absent), "w2_weight", "w2", absent, True)
        load(runner, weights, local)
        finish(runner)
        assert len(layer.w2_weight) == len(local)
        part = forward(runner)
        assert distance(part, expected(weights, 8, experts=local)) < NEAR
        total += part
    assert distance(total, expected(weights, 8)) < NEAR


def test_biases_and_another_activation() -> None:
    """GPT-OSS has both. Its model copies all experts into the parameters itself."""
    runner, weights = build(Int8Config, has_bias=True, activation="swigluoai"), Weights()
    layer, random = runner.routed_experts, np.random.default_rng(1)
    biases = random.normal(size=(EXPERTS, 2 * INNER)), random.normal(size=(EXPERTS, HIDDEN))
    joined = np.concatenate((weights.parts["w1"], weights.parts["w3"]), axis=1)
    values = {"w13_weight": joined, "w2_weight": weights.parts["w2"], "w13_bias": biases[0], "w2_bias": biases[1]}
    for name, value in values.items():
        getattr(layer, name).data.copy_(torch.from_numpy(value))
    finish(runner)
    assert not layer.w13_weight.is_floating_point()

    def swigluoai(h: np.ndarray) -> np.ndarray:
        gate, up = np.minimum(h[0::2], 7), np.clip(h[1::2], -7, 7)
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)

    assert distance(forward(runner), expected(weights, 8, swigluoai, biases)) < NEAR


def test_weights_on_the_inputs() -> None:
    from vllm.model_executor.models.llama4 import Llama4MoE

    runner, weights = (
        build(
            Int8Config,
            top_k=1,
            renormalize=False,
            custom_routing_function=Llama4MoE.custom_routing_function,
            apply_router_weight_on_input=True,
        ),
        Weights(),
    )
    load(runner, weights)
    finish(runner)
    assert distance(forward(runner), expected(weights, 8, on_input=True)) < NEAR


def test_dummy_weights_are_quantized_too() -> None:
    with set_current_vllm_config(VllmConfig(load_config=LoadConfig(load_format="dummy"))):
        runner = build(Int4Config)
        DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(runner, MODEL)
        finish(runner)
        assert not runner.routed_experts.w2_weight.is_floating_point()
        assert np.isfinite(forward(runner)).all()


TAKES_CONFIG = pytest.mark.skipif(
    "quant_config" not in signature(GateLinear).parameters, reason="vLLM 0.30 quantizes no router of this class"
)


@pytest.mark.parametrize("kind", [pytest.param(GateLinear, marks=TAKES_CONFIG), ReplicatedLinear])
def test_a_router_keeps_its_type(kind: type[ReplicatedLinear]) -> None:
    """Qwen3-MoE, for example, passes its quantization configuration to the router."""
    router = kind(HIDDEN, EXPERTS, bias=False, quant_config=Int4Config(), prefix="model.layers.0.mlp.gate")
    assert router.weight.dtype == torch.float32 and not router.weight.is_meta
    other = ReplicatedLinear(HIDDEN, EXPERTS, bias=False, quant_config=Int4Config(), prefix="model.layers.0.mlp.up")
    assert other.weight.is_meta, "waits for its weight to be quantized"


def test_the_head_of_a_classifier_keeps_its_type() -> None:
    """vLLM adds a bias on the device of its weight when the checkpoint has one."""
    head = ReplicatedLinear(HIDDEN, 3, bias=False, quant_config=Int4Config(), prefix="score")
    assert head.weight.dtype == torch.float32 and not head.weight.is_meta
