"""Tests mixture-of-experts layers, built and run by vLLM, against plain loops in numpy float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.models.llama4 import Llama4MoE

from vllm_backplane.errors import BindingError
from vllm_backplane.layers.moe import BackplaneFusedMoEMethod
from vllm_backplane.ops.moe import PLAIN as PLAIN_ACTIVATIONS
from vllm_patchbay.upstream import installed_version

EXPERTS, HIDDEN, INNER = 8, 16, 6


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmConfig]:
    monkeypatch.setitem(op_registry_oot, "UnquantizedFusedMoEMethod", BackplaneFusedMoEMethod)
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


def build(**changes: Any) -> Any:
    settings: dict[str, Any] = {
        "num_experts": EXPERTS,
        "top_k": 2,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "params_dtype": torch.float32,
        "tp_size": 1,
        "dp_size": 1,
        "pcp_size": 1,
        "prefix": "model.layers.0.experts",
    }
    runner = FusedMoEFactory(**(settings | changes))
    generator = torch.Generator().manual_seed(1)
    for parameter in runner.routed_experts.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.6)
    runner.routed_experts.quant_method.process_weights_after_loading(runner.routed_experts)
    return runner


def inputs(tokens: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(tokens, HIDDEN, generator=generator), torch.randn(tokens, EXPERTS, generator=generator)


def forward(runner: Any, config: VllmConfig, tokens: int = 7) -> np.ndarray:
    x, logits = inputs(tokens)
    with set_forward_context(None, config, num_tokens=tokens):
        return runner(hidden_states=x, router_logits=logits).double().numpy()


def wide(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum()


def silu_and_mul(h: np.ndarray) -> np.ndarray:
    gate, up = np.split(h, 2)
    return gate * sigmoid(gate) * up


def expected(runner: Any, choose: Any, activation: Any = silu_and_mul, on_input: bool = False) -> np.ndarray:
    """Returns the outputs in float64. `choose` returns the pairs (expert, weight) for the logits of one token."""
    layer = runner.routed_experts
    x, logits = inputs()
    out = np.zeros((x.shape[0], HIDDEN))
    for token in range(x.shape[0]):
        for expert, weight in choose(wide(logits[token])):
            value = wide(x[token]) * (weight if on_input else 1)
            hidden = wide(layer.w13_weight[expert]) @ value
            if hasattr(layer, "w13_bias"):
                hidden = hidden + wide(layer.w13_bias[expert])
            result = wide(layer.w2_weight[expert]) @ activation(hidden)
            if hasattr(layer, "w2_bias"):
                result = result + wide(layer.w2_bias[expert])
            out[token] += result * (1 if on_input else weight)
    return out


def close(got: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_the_method_is_ours(config: VllmConfig) -> None:
    runner = build()
    assert type(runner.routed_experts.quant_method) is BackplaneFusedMoEMethod
    assert runner.is_monolithic


@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_routing(config: VllmConfig, renormalize: bool) -> None:
    def choose(logits: np.ndarray) -> list[tuple[int, float]]:
        scores = softmax(logits)
        ids = np.argsort(-scores)[:2]
        total = scores[ids].sum() if renormalize else 1
        return [(e, scores[e] / total) for e in ids]

    runner = build(renormalize=renormalize)
    close(forward(runner, config), expected(runner, choose))


def test_grouped_routing_with_bias_and_factor(config: VllmConfig) -> None:
    bias = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(3))

    def choose(logits: np.ndarray) -> list[tuple[int, float]]:
        scores = sigmoid(logits)
        choice = scores + wide(bias)
        quality = [np.sort(choice[g * 2 : g * 2 + 2]).sum() for g in range(4)]
        allowed = [e for g in np.argsort(-np.array(quality))[:2] for e in (2 * g, 2 * g + 1)]
        ids = sorted(allowed, key=lambda e: -choice[e])[:2]
        return [(e, 2.5 * scores[e] / scores[ids].sum()) for e in ids]

    runner = build(
        use_grouped_topk=True,
        num_expert_group=4,
        topk_group=2,
        scoring_func="sigmoid",
        e_score_correction_bias=bias,
        routed_scaling_factor=2.5,
    )
    close(forward(runner, config), expected(runner, choose))


def test_bias_without_groups(config: VllmConfig) -> None:
    bias = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(3))

    def choose(logits: np.ndarray) -> list[tuple[int, float]]:
        scores = sigmoid(logits)
        ids = np.argsort(-(scores + wide(bias)))[:2]
        return [(e, 1.5 * scores[e]) for e in ids]

    runner = build(scoring_func="sigmoid", renormalize=False, e_score_correction_bias=bias, routed_scaling_factor=1.5)
    close(forward(runner, config), expected(runner, choose))


def test_a_models_own_routing_and_weight_on_the_input(config: VllmConfig) -> None:
    def choose(logits: np.ndarray) -> list[tuple[int, float]]:
        best = int(np.argmax(logits))
        return [(best, sigmoid(logits[best]))]

    runner = build(
        top_k=1,
        renormalize=False,
        custom_routing_function=Llama4MoE.custom_routing_function,
        apply_router_weight_on_input=True,
    )
    close(forward(runner, config), expected(runner, choose, on_input=True))


def best_two(logits: np.ndarray) -> list[tuple[int, float]]:
    ids = np.argsort(-logits)[:2]
    return list(zip(ids, softmax(logits[ids]), strict=True))


def test_biases_and_alternating_gate(config: VllmConfig) -> None:
    def swigluoai(h: np.ndarray) -> np.ndarray:
        gate, up = np.minimum(h[0::2], 7), np.clip(h[1::2], -7, 7)
        return gate * sigmoid(1.702 * gate) * (up + 1)

    runner = build(has_bias=True, activation="swigluoai")
    close(forward(runner, config), expected(runner, best_two, swigluoai))


@pytest.mark.parametrize(
    ("activation", "settings", "formula"),
    [
        (
            "silu",
            {"swiglu_limit": 0.5},
            lambda g, u: np.minimum(g, 0.5) * sigmoid(np.minimum(g, 0.5)) * np.clip(u, -0.5, 0.5),
        ),
        (
            "swigluoai_uninterleave",
            {"swiglu_limit": 1.0, "swiglu_alpha": 1.7, "swiglu_beta": 1.0},
            lambda g, u: np.minimum(g, 1) * sigmoid(1.7 * np.minimum(g, 1)) * (np.clip(u, -1, 1) + 1),
        ),
        ("swiglustep", {}, lambda g, u: np.minimum(g * sigmoid(g), 7) * np.clip(u, -7, 7)),
        ("situ", {"activation_situ_beta": 2.0}, lambda g, u: 2 * np.tanh(g / 2) * sigmoid(g) * u),
    ],
    ids=["silu", "swigluoai_uninterleave", "swiglustep", "situ"],
)
def test_other_gates(config: VllmConfig, activation: str, settings: dict[str, float], formula: Any) -> None:
    runner = build(activation=activation, **settings)
    close(forward(runner, config), expected(runner, best_two, lambda h: formula(*np.split(h, 2))))


GATED = [a for a in MoEActivation if a.is_gated and a is not MoEActivation.RELU2]
PLAIN = [a for a in MoEActivation if not a.is_gated]


@pytest.mark.parametrize("activation", GATED)
def test_every_gated_activation_of_vllm_is_bound(config: VllmConfig, activation: MoEActivation) -> None:
    runner = build(activation=activation.value, swiglu_limit=5.0, activation_situ_beta=1.0)
    assert np.isfinite(forward(runner, config)).all()


@pytest.mark.parametrize("activation", PLAIN)
def test_vllm_itself_refuses_experts_without_gate_out_of_tree(config: VllmConfig, activation: MoEActivation) -> None:
    """Fails once vLLM accepts experts without a gate. The operator supports them; the layer then needs a test."""
    assert activation.value in PLAIN_ACTIVATIONS
    with pytest.raises(NotImplementedError, match="is_act_and_mul=False"):
        build(activation=activation.value, ckpt_names=("up_proj", "down_proj", None))


def test_expert_parallel_ranks_add_up(config: VllmConfig) -> None:
    whole = build(has_bias=True)
    wanted = expected(whole, best_two)
    total = np.zeros_like(wanted)
    for rank, local in enumerate(([1, 4, 6], [0, 2, 3, 5, 7])):
        part = build(has_bias=True, prefix=f"model.layers.{rank + 1}.experts")
        layer = part.routed_experts
        for name in ("w13_weight", "w2_weight", "w13_bias", "w2_bias"):
            held = getattr(whole.routed_experts, name).data[local].clone()
            setattr(layer, name, torch.nn.Parameter(held, requires_grad=False))
        layer._expert_map = torch.tensor([local.index(e) if e in local else -1 for e in range(EXPERTS)]).int()
        total += forward(part, config)
    close(total, wanted)


def test_no_token(config: VllmConfig) -> None:
    assert forward(build(), config, tokens=0).shape == (0, HIDDEN)


def test_the_modular_call_takes_given_experts(config: VllmConfig) -> None:
    layer = build().routed_experts
    x, logits = inputs()
    weights, ids = layer.quant_method.route(layer, x, logits)
    got = layer.quant_method.apply(layer, x, weights, ids, None, None)
    assert torch.equal(got, layer.quant_method.apply_monolithic(layer, x, logits))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "relu2"}, "relu2_no_mul"),
        ({"activation": "swigluoai_uninterleave"}, "swiglu_limit"),
        ({"activation": "situ"}, "activation_situ_beta"),
        pytest.param(
            {"hash_indices_table": torch.zeros(10, 2, dtype=torch.int32), "scoring_func": "sqrtsoftplus"},
            "hash routing",
            marks=pytest.mark.skipif(installed_version().release[:2] == (0, 30), reason="vLLM 0.30 does not report it"),
            id="hash routing",
        ),
        ({"e_score_correction_bias": torch.zeros(EXPERTS + 2)}, "zero experts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_done_is_refused_at_construction(
    config: VllmConfig, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BindingError, match=message):
        build(**changes)


def test_simulated_routing_is_refused(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    with pytest.raises(BindingError, match="VLLM_MOE_ROUTING_SIMULATION_STRATEGY"):
        build()
