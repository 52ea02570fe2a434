"""Tests experts of GPTQ, AWQ and compressed-tensors checkpoints, loaded by vLLM, against the formats' definitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import scheme_checkpoints as made
import torch
from scheme_layers import FAN_IN, configured
from vllm.config import VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

from vllm_backplane.errors import BackplaneError, CheckpointError


@pytest.fixture(autouse=True)
def _alone(one_worker: None) -> None:
    """Initializes a group of one worker: parameters read their rank."""


def experts(config: Any, **changed: Any) -> Any:
    settings: dict[str, Any] = {"num_experts": 4, "top_k": 2, "hidden_size": FAN_IN, "intermediate_size": 128}
    settings |= {"params_dtype": torch.float32, "quant_config": config, "prefix": "model.layers.0.mlp.experts"}
    return FusedMoEFactory(**(settings | changed))


def load_expert(layer: Any, expert: int, shard: str, stored: made.Stored) -> None:
    for name, tensor in stored.tensors.items():
        parameter = getattr(layer, f"{'w2' if shard == 'w2' else 'w13'}_{name}")
        place = {"weight_name": name, "shard_id": shard, "expert_id": expert}
        assert parameter.weight_loader(param=parameter, loaded_weight=tensor, **place, return_success=True)


EXPERTS: dict[str, tuple[Mapping[str, Any], Any]] = {
    "GPTQ": (made.GPTQ, lambda i, o, s: made.gptq(i, o, 4, 32, seed=s)),
    "GPTQ, 8 bits, a scale per output": (
        {**made.GPTQ, "bits": 8, "group_size": -1},
        lambda i, o, s: made.gptq(i, o, 8, -1, seed=s),
    ),
    "GPTQ, zero points, by activation": (
        {**made.GPTQ, "sym": False, "desc_act": True},
        lambda i, o, s: made.gptq(i, o, 4, 32, seed=s, symmetric=False, by_activation=s % 4 + i),
    ),
    "AWQ": (made.AWQ, lambda i, o, s: made.awq(i, o, 4, 32, seed=s)),
    "W4A16": (made.compressed(4, 32), lambda i, o, s: made.pack_quantized(i, o, 4, 32, seed=s)),
    "W8A16, zero points": (
        made.compressed(8, 64, symmetric=False),
        lambda i, o, s: made.pack_quantized(i, o, 8, 64, seed=s, symmetric=False),
    ),
    "AWQ, 8 bits": ({**made.AWQ, "bits": 8}, lambda i, o, s: made.awq(i, o, 8, 32, seed=s)),
    "W8A8": (made.compressed_int8(), lambda i, o, s: made.int_quantized(i, o, seed=s)),
    "W8A8, a scale in all": (
        made.compressed_int8(by_output=False),
        lambda i, o, s: made.int_quantized(i, o, seed=s, by_output=False),
    ),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_multiply_by_the_weights_of_the_checkpoint(case: str) -> None:
    config, make = EXPERTS[case]
    runner = experts(configured(config))
    layer, weights = runner.routed_experts, {}
    for number, (expert, shard) in enumerate((e, w) for w in ("w3", "w2", "w1") for e in range(4)):
        size = (128, FAN_IN) if shard == "w2" else (FAN_IN, 128)
        stored = make(*size, number)
        load_expert(layer, expert, shard, stored)
        weights[expert, shard] = stored.weight
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(7, FAN_IN, generator=torch.Generator().manual_seed(1))
    logits = torch.randn(7, 4, generator=torch.Generator().manual_seed(2))
    with set_forward_context(None, get_current_vllm_config(), num_tokens=7):
        got = runner(hidden_states=x, router_logits=logits).double()
    expected = torch.zeros(7, FAN_IN, dtype=torch.float64)
    for token in range(7):
        best = logits[token].double().softmax(0).topk(2)
        for share, expert in zip(best.values / best.values.sum(), best.indices.tolist(), strict=True):
            gate, up = (weights[expert, shard] @ x[token].double() for shard in ("w1", "w3"))
            expected[token] += share * (weights[expert, "w2"] @ (gate / (1 + (-gate).exp()) * up))
    error = float((got - expected).norm() / expected.norm())
    assert error < 0.02, error  # inputs are quantized to 8 bits, twice


def test_experts_are_not_loaded_again() -> None:
    layer = experts(configured(made.AWQ)).routed_experts
    first = layer.w2_qweight
    for expert in range(4):
        for shard, size in (("w1", (FAN_IN, 128)), ("w3", (FAN_IN, 128)), ("w2", (128, FAN_IN))):
            load_expert(layer, expert, shard, made.awq(*size, 4, 32))
    layer.quant_method.process_weights_after_loading(layer)
    assert not any(name.endswith(("qweight", "qzeros", "scales")) for name, _ in layer.named_parameters())
    with pytest.raises(BackplaneError, match="cannot be reloaded; restart the server"):
        first.weight_loader(first, torch.zeros(1), "", "w2", 0)


def test_a_missing_expert_is_rejected() -> None:
    layer = experts(configured(made.AWQ)).routed_experts
    for shard in ("w1", "w3"):
        stored = made.awq(FAN_IN, 128, 4, 32)
        if shard == "w3":
            del stored.tensors["scales"]
        load_expert(layer, 0, shard, stored)
    with pytest.raises(CheckpointError, match=r"not all, for experts \[0, 1, 2, 3\] of .*experts\.0\.up_proj\.scales;"):
        layer.quant_method.process_weights_after_loading(layer)


def test_an_expert_of_another_size_is_rejected() -> None:
    layer = experts(configured(made.AWQ)).routed_experts
    with pytest.raises(CheckpointError, match=r"\(256, 12\) for qweight .* requires \(256, 16\)"):
        load_expert(layer, 0, "w1", made.awq(FAN_IN, 96, 4, 32))


def test_experts_of_several_schemes_are_refused() -> None:
    config = made.compressed_int8()
    config["ignore"] = ["re:.*down_proj"]
    with pytest.raises(CheckpointError, match=r"several schemes for the experts of model\.layers\.0\.mlp\.experts"):
        experts(configured(config))


@pytest.mark.parametrize("case", ["GPTQ", "AWQ", "W4A16"])
def test_experts_are_not_made_without_a_checkpoint(case: str) -> None:
    config, _ = EXPERTS[case]
    dummy = VllmConfig(load_config=LoadConfig(load_format="dummy"))
    message = (
        r"--load-format dummy makes no weights for the quantized experts of model\.layers\.0\.mlp\.experts; load a"
    )
    with set_current_vllm_config(dummy), pytest.raises(BackplaneError, match=message):
        experts(configured(config))


@pytest.mark.parametrize(
    "group_index",
    [torch.zeros(FAN_IN - 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), torch.zeros(FAN_IN)],
    ids=["too short", "empty", "not integers"],
)
def test_a_damaged_group_index_of_an_expert_is_rejected(group_index: torch.Tensor) -> None:
    layer = experts(configured({**made.GPTQ, "desc_act": True})).routed_experts
    stored = made.gptq(FAN_IN, 128, 4, 32)
    stored.tensors["g_idx"] = group_index
    with pytest.raises(CheckpointError, match=rf"g_idx of shape .* and {FAN_IN} integers are required"):
        load_expert(layer, 0, "w1", stored)


def test_codes_of_an_expert_that_are_no_words_are_rejected() -> None:
    stored = made.awq(FAN_IN, 128, 4, 32)
    stored.tensors["qweight"] = stored.tensors["qweight"].float()
    with pytest.raises(CheckpointError, match=r"qweight of type torch\.float32 .* int32 is required"):
        load_expert(experts(configured(made.AWQ)).routed_experts, 0, "w1", stored)
