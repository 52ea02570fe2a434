"""Layers of GPTQ, AWQ and compressed-tensors checkpoints: vLLM's own loading, our products, the definitions' weights.

Inputs are whole numbers, and every second one is 127 or -127: rounding to 8 bits changes none, whatever the groups are.
What is left is the rounding of float32.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import scheme_checkpoints as made
import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import awq_pack
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_processing,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.platforms import current_platform

from vllm_backplane.device import CodeLayout
from vllm_backplane.errors import BackplaneError, CheckpointError
from vllm_backplane.layers.quantization import linear as quantized_linear_layers
from vllm_backplane.layers.schemes import loading
from vllm_backplane.layers.schemes.awq import ORDER as AWQ_ORDER
from vllm_backplane.layers.schemes.repacking import Words, Zeros, adjacent, repacked, split_group
from vllm_backplane.ops.quantized_linear import Packed

FAN_IN = 256
MODEL: Any = SimpleNamespace(dtype=torch.float32, quantization="gptq", word_embeddings_untied_by_checkpoint=False)


@pytest.fixture(autouse=True)
def _alone(one_worker: None) -> None:
    """Parameters ask for their rank."""


def configured(config: Mapping[str, Any], **changed: Any) -> Any:
    """What vLLM makes of a checkpoint's quantization_config; it travels to the workers."""
    described = {**config, **changed}
    name = {"gptq": "auto_gptq", "awq": "auto_awq"}.get(described["quant_method"], described["quant_method"])
    return pickle.loads(pickle.dumps(get_quantization_config(name).from_config(described)))


def whole_numbers(rows: int, columns: int) -> torch.Tensor:
    x = torch.randint(-127, 128, (rows, columns), generator=torch.Generator().manual_seed(rows)).float()
    x[:, ::2] = torch.where(x[:, ::2] < 0, -127, 127)
    return x


def load(layer: Any, stored: made.Stored, *shard: Any) -> None:
    """Parameters are looked up before, as vLLM's models do: a layer is packed as soon as it is complete."""
    parameters = {name: getattr(layer, name) for name in stored.tensors}
    for name, tensor in stored.tensors.items():
        parameters[name].weight_loader(parameters[name], tensor, *shard)


def process(layer: Any) -> None:
    """As vLLM does when all layers are loaded."""
    finalize_layerwise_processing(layer, MODEL)
    layer.quant_method.process_weights_after_loading(layer)


def in_memory(layer: Any) -> set[str]:
    return {name for name, parameter in layer.named_parameters() if not parameter.is_meta}


def finish(layer: Any) -> None:
    process(layer)
    assert layer.weight.dtype in (torch.uint8, torch.int8)
    assert {name for name, _ in layer.named_parameters()} <= {
        "weight",
        "weight_scale",
        "weight_offset",
        "weight_shape",
        "backplane_order",
    }


def assert_product(layer: Any, weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    for rows in (1, 5):
        x = whole_numbers(rows, weight.shape[1])
        expected = x.double() @ weight.T
        got = layer(x.to(dtype))[0]
        assert got.dtype == dtype
        error = (got.double() - expected).abs().max() / expected.abs().max()
        assert float(error) < (2e-6 if dtype == torch.float32 else 4e-3), float(error)


CASES: dict[str, tuple[Mapping[str, Any], Any]] = {
    "GPTQ, 4 bits": (made.GPTQ, lambda n, s: made.gptq(FAN_IN, n, 4, 32, seed=s)),
    "GPTQ, 8 bits": ({**made.GPTQ, "bits": 8}, lambda n, s: made.gptq(FAN_IN, n, 8, 32, seed=s)),
    "GPTQ, a scale per output": (
        {**made.GPTQ, "group_size": -1, "desc_act": True},
        lambda n, s: made.gptq(FAN_IN, n, 4, -1, seed=s),
    ),
    "GPTQ, zero points": (
        {**made.GPTQ, "sym": False},
        lambda n, s: made.gptq(FAN_IN, n, 4, 32, seed=s, symmetric=False),
    ),
    "GPTQ, by activation": (
        {**made.GPTQ, "desc_act": True},
        lambda n, s: made.gptq(FAN_IN, n, 4, 32, seed=s, by_activation=9),
    ),
    "GPTQ, 8 bits, zero points, by activation": (
        {**made.GPTQ, "bits": 8, "sym": False, "desc_act": True, "group_size": 64},
        lambda n, s: made.gptq(FAN_IN, n, 8, 64, seed=s, symmetric=False, by_activation=3),
    ),
    "AWQ, 4 bits": (made.AWQ, lambda n, s: made.awq(FAN_IN, n, 4, 32, seed=s)),
    "AWQ, 8 bits": ({**made.AWQ, "bits": 8, "group_size": 64}, lambda n, s: made.awq(FAN_IN, n, 8, 64, seed=s)),
    "AWQ, one group": ({**made.AWQ, "group_size": FAN_IN}, lambda n, s: made.awq(FAN_IN, n, 4, FAN_IN, seed=s)),
    "W4A16": (made.compressed(4, 128), lambda n, s: made.pack_quantized(FAN_IN, n, 4, 128, seed=s)),
    "W4A16, zero points": (
        made.compressed(4, 32, symmetric=False),
        lambda n, s: made.pack_quantized(FAN_IN, n, 4, 32, seed=s, symmetric=False),
    ),
    "W8A16": (made.compressed(8, 64), lambda n, s: made.pack_quantized(FAN_IN, n, 8, 64, seed=s)),
    "W8A16, a scale per output": (made.compressed(8, -1), lambda n, s: made.pack_quantized(FAN_IN, n, 8, -1, seed=s)),
    "W8A8": (made.compressed_int8(), lambda n, s: made.int_quantized(FAN_IN, n, seed=s)),
    "W8A8, a scale in all": (
        made.compressed_int8(by_output=False),
        lambda n, s: made.int_quantized(FAN_IN, n, seed=s, by_output=False),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_layer_multiplies_by_what_the_checkpoint_says(case: str) -> None:
    config, make = CASES[case]
    layer = RowParallelLinear(FAN_IN, 72, bias=False, quant_config=configured(config), prefix="down")
    stored = make(72, 1)
    load(layer, stored)
    finish(layer)
    assert_product(layer, stored.weight)
    assert_product(layer, stored.weight, torch.bfloat16)


@pytest.mark.parametrize("case", CASES)
def test_a_layer_that_is_not_in_the_checkpoint_is_named(case: str) -> None:
    config, _ = CASES[case]
    layer = RowParallelLinear(FAN_IN, 72, bias=False, quant_config=configured(config), prefix="layers.3.down")
    with pytest.raises(CheckpointError, match=r"no (weights|g_idx) for layers\.3\.down"):
        process(layer)


@pytest.mark.parametrize("case", CASES)
def test_parts_of_a_fused_layer_lie_in_their_places(case: str) -> None:
    config, make = CASES[case]
    layer = QKVParallelLinear(FAN_IN, 8, 4, 2, bias=False, quant_config=configured(config), prefix="qkv")
    parts = {"v": make(16, 2), "q": make(32, 3), "k": make(16, 4)}
    for name, part in parts.items():
        assert in_memory(layer) <= {"g_idx"}, "what is not complete waits in the file"
        load(layer, part, name)
    assert layer.weight.dtype in (torch.uint8, torch.int8), "packed with the last part"
    finish(layer)
    assert_product(layer, torch.cat([parts[name].weight for name in "qkv"]))


@pytest.mark.parametrize("bits", [4, 8])
def test_columns_of_awq_lie_where_vllm_packs_them(bits: int) -> None:
    """vLLM has the order of 8 bits too, in what its tests of kernels pack with; its configuration takes 4 alone."""
    codes = torch.randint(0, 2**bits, (8, 64), dtype=torch.int32, generator=torch.Generator().manual_seed(bits))
    packed = awq_pack(codes, bits, 8, 64)
    order = made.AWQ_COLUMNS[bits]
    assert torch.equal(packed, made.packed(codes.numpy().astype("uint8"), bits, order))
    assert torch.equal(Words(packed, bits, 1, 1, AWQ_ORDER[bits]).rows(0, 64), codes.t().to(torch.uint8))
    if bits == 8:
        with pytest.raises(ValueError, match=r"Unsupported num_bits = 8\. Supported: 4"):
            AutoAWQConfig(8, 64, True, False)


def test_second_versions_of_gptq_store_zero_points_as_they_are() -> None:
    stored = made.gptq(FAN_IN, 24, 4, 32, symmetric=False)
    stored.tensors["qzeros"] += 0x11111111
    config = configured(made.GPTQ, sym=False, checkpoint_format="gptq_v2")
    layer = RowParallelLinear(FAN_IN, 24, bias=False, quant_config=config, prefix="down")
    load(layer, stored)
    finish(layer)
    assert_product(layer, stored.weight)


def test_layers_may_differ_and_be_left_out() -> None:
    rules = {"+:.*wide": {"bits": 8, "group_size": 64}, "-:.*plain": {}}
    config = configured(made.GPTQ, dynamic=rules)
    wide = RowParallelLinear(FAN_IN, 24, bias=False, quant_config=config, prefix="wide")
    stored = made.gptq(FAN_IN, 24, 8, 64)
    load(wide, stored)
    finish(wide)
    assert_product(wide, stored.weight)
    plain = RowParallelLinear(FAN_IN, 24, bias=False, quant_config=config, prefix="plain")
    assert plain.weight.dtype == torch.float32


def test_a_bias_is_added() -> None:
    layer = MergedColumnParallelLinear(FAN_IN, [24, 40], bias=True, quant_config=configured(made.AWQ), prefix="up")
    parts = [made.awq(FAN_IN, 24, 4, 32, seed=1), made.awq(FAN_IN, 40, 4, 32, seed=2)]
    for number, part in enumerate(parts):
        load(layer, part, number)
    layer.bias.data = torch.arange(64.0)
    process(layer)
    x = whole_numbers(3, FAN_IN)
    expected = x.double() @ torch.cat([part.weight for part in parts]).T + torch.arange(64.0)
    assert torch.allclose(layer(x)[0].double(), expected, rtol=1e-5, atol=1e-3)


def test_a_head_may_be_quantized() -> None:
    head = ParallelLMHead(128, FAN_IN, quant_config=configured(made.GPTQ, lm_head=True), prefix="lm_head")
    stored = made.gptq(FAN_IN, 128, 4, 32)
    load(head, stored)
    finish(head)
    x = whole_numbers(3, FAN_IN)
    logits = head.quant_method.apply(head, x)
    expected = x.double() @ stored.weight.T
    assert torch.allclose(logits.double(), expected, rtol=1e-5, atol=1e-3)


def test_scales_are_kept_exactly_whatever_the_type_of_the_model() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = RowParallelLinear(FAN_IN, 24, bias=False, quant_config=configured(made.GPTQ), prefix="down")
    finally:
        torch.set_default_dtype(torch.float32)
    stored = made.gptq(FAN_IN, 24, 4, 32)
    load(layer, stored)
    finish(layer)
    assert layer.weight_scale.dtype == torch.float16
    blocks, groups, width = layer.weight_scale.shape
    kept = layer.weight_scale.transpose(1, 2).reshape(blocks * width, groups)[:24]
    assert torch.equal(kept, stored.tensors["scales"].t())


def test_no_weight_is_expanded() -> None:
    layer = RowParallelLinear(1024, 512, bias=False, quant_config=configured(made.GPTQ, group_size=128), prefix="down")
    load(layer, made.gptq(1024, 512, 4, 128))
    finish(layer)
    taken = sum(each.numel() * each.element_size() for each in layer.parameters())
    assert taken == 1024 * 512 // 2 + 512 * 8 * 2


# --- experts


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
def test_experts_multiply_by_what_the_checkpoint_says(case: str) -> None:
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
    assert error < 0.02, error  # inputs are rounded to 8 bits, twice


def test_experts_are_not_loaded_again() -> None:
    layer = experts(configured(made.AWQ)).routed_experts
    first = layer.w2_qweight
    for expert in range(4):
        for shard, size in (("w1", (FAN_IN, 128)), ("w3", (FAN_IN, 128)), ("w2", (128, FAN_IN))):
            load_expert(layer, expert, shard, made.awq(*size, 4, 32))
    layer.quant_method.process_weights_after_loading(layer)
    assert not any(name.endswith(("qweight", "qzeros", "scales")) for name, _ in layer.named_parameters())
    with pytest.raises(BackplaneError, match="cannot be loaded again; start anew"):
        first.weight_loader(first, torch.zeros(1), "", "w2", 0)


def test_an_expert_that_is_missing_is_told() -> None:
    layer = experts(configured(made.AWQ)).routed_experts
    for shard in ("w1", "w3"):
        load_expert(layer, 0, shard, made.awq(FAN_IN, 128, 4, 32))
    with pytest.raises(CheckpointError, match=r"not all, for experts \[0, 1, 2, 3\] of model"):
        layer.quant_method.process_weights_after_loading(layer)


def test_an_expert_of_another_size_is_told() -> None:
    layer = experts(configured(made.AWQ)).routed_experts
    with pytest.raises(CheckpointError, match=r"\(256, 12\) for qweight .* asks for \(256, 16\)"):
        load_expert(layer, 0, "w1", made.awq(FAN_IN, 96, 4, 32))


# --- what is refused


def test_parts_in_different_orders_are_refused() -> None:
    layer = QKVParallelLinear(
        FAN_IN, 8, 4, 2, bias=False, quant_config=configured(made.GPTQ, desc_act=True), prefix="layers.7.qkv"
    )
    for seed, (name, size) in enumerate((("q", 32), ("k", 16)), 1):
        load(layer, made.gptq(FAN_IN, size, 4, 32, by_activation=seed), name)
    with pytest.raises(CheckpointError, match=r"layers\.7\.qkv are ordered .* different ways.*desc_act=False"):
        load(layer, made.gptq(FAN_IN, 16, 4, 32, by_activation=3), "v")


def test_an_order_that_is_missing_is_told() -> None:
    config = configured(made.GPTQ, desc_act=True)
    layer = RowParallelLinear(FAN_IN, 24, bias=False, quant_config=config, prefix="down")
    stored = made.gptq(FAN_IN, 24, 4, 32)
    del stored.tensors["g_idx"]
    load(layer, stored)
    with pytest.raises(CheckpointError, match="no g_idx for down"):
        process(layer)


def test_unequal_groups_are_told() -> None:
    config = configured(made.GPTQ, desc_act=True)
    layer = RowParallelLinear(FAN_IN, 24, bias=False, quant_config=config, prefix="down")
    stored = made.gptq(FAN_IN, 24, 4, 32, by_activation=1)
    stored.tensors["g_idx"][:] = torch.arange(FAN_IN) // 40
    with pytest.raises(CheckpointError, match=r"g_idx of down .* unequal size"):
        load(layer, stored)


REFUSED: dict[str, Mapping[str, Any]] = {
    "GPTQ with 3 bits": {**made.GPTQ, "bits": 3},
    "GPTQ in the format 'marlin'": {**made.GPTQ, "checkpoint_format": "marlin"},
    "AWQ with 3 bits": {**made.AWQ, "bits": 3},
    "AWQ without zero points": {**made.AWQ, "zero_point": False},
    "AWQ packed for 'gemv'": {**made.AWQ, "version": "GEMV"},
    "int weights of 6 bits by group": made.compressed(6, 64),
    "int inputs of 8 bits by tensor, static": made.compressed_int8(dynamic=False, strategy="tensor"),
    "symmetric: False": made.compressed_int8(symmetric=False),
    "float inputs of 8 bits by token": made.compressed_int8(type="float"),
}


@pytest.mark.parametrize("told", REFUSED)
def test_what_cannot_run_is_refused_with_what_can(told: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        configured(REFUSED[told])
    assert told in str(refusal.value)
    assert "on device 'cpu'; choose a checkpoint of: GPTQ with 4 or 8 bits" in str(refusal.value)


def test_experts_of_several_schemes_are_refused() -> None:
    config = made.compressed_int8()
    config["ignore"] = ["re:.*down_proj"]
    with pytest.raises(CheckpointError, match=r"experts of model\.layers\.0\.mlp\.experts, of several schemes"):
        experts(configured(config))


def test_groups_that_do_not_divide_a_layer_are_refused() -> None:
    with pytest.raises(ValueError, match=r"96 inputs .* groups of 64; choose another --tensor-parallel-size"):
        RowParallelLinear(96, 24, bias=False, quant_config=configured(made.GPTQ, group_size=64), prefix="down")


def test_an_order_by_activation_is_not_divided_among_workers() -> None:
    method = configured(made.GPTQ, desc_act=True).get_quant_method(
        RowParallelLinear(FAN_IN, 24, bias=False, prefix="down"), "down"
    )
    with pytest.raises(BackplaneError, match=r"desc_act.*--tensor-parallel-size 1"):
        method.create_weights(torch.nn.Module(), FAN_IN // 2, [24], FAN_IN, 24, torch.float32)


def test_the_platform_knows_the_names() -> None:
    for name in ("gptq", "auto_gptq", "awq", "auto_awq", "compressed-tensors"):
        current_platform.verify_quantization(name)
    with pytest.raises(BackplaneError, match=r"quantization modelopt .*W8A8-int8.*GGUF"):
        current_platform.verify_quantization("modelopt")
    assert get_quantization_config("gptq").override_quantization_method(dict(made.GPTQ), None) == "auto_gptq"
    assert get_quantization_config("awq").override_quantization_method(dict(made.AWQ), None) == "auto_awq"


# --- the parts


def test_groups_come_to_lie_side_by_side() -> None:
    order = adjacent(torch.tensor([1, 0, 2, 0, 1, 2]), 3)
    assert order is not None
    assert order.tolist() == [1, 3, 0, 4, 2, 5]
    assert adjacent(torch.tensor([0, 0, 1, 1]), 2) is None


def test_pieces_of_a_weight_fit_together() -> None:
    for stored, packed in ((made.awq(64, 200, 4, 32), 1), (made.gptq(64, 200, 4, 32, symmetric=False), 0)):
        codes = Words(stored.tensors["qweight"], 4, packed, 1)
        zeros = Zeros(Words(stored.tensors["qzeros"], 4, 1, 1))
        scales = stored.tensors["scales"].t()
        whole, pieces = (
            repacked(codes, scales, zeros, fan_in=64, layout=CodeLayout(), piece=piece) for piece in (1 << 20, 1)
        )
        for one, other in zip(whole, pieces, strict=True):
            assert one is not None and torch.equal(one, other)


def test_rows_are_divided_into_groups() -> None:
    assert split_group(576) == 96
    assert split_group(4096) == 128
    assert split_group(100) == 0


@pytest.mark.parametrize("case", ["GPTQ, by activation", "AWQ, 4 bits", "W4A16, zero points", "W8A8"])
def test_layers_are_loaded_again_at_the_same_addresses(case: str) -> None:
    config, make = CASES[case]
    model = torch.nn.Module()
    model.down = RowParallelLinear(FAN_IN, 72, bias=False, quant_config=configured(config), prefix="down")
    record_metadata_for_reloading(model)
    load(model.down, make(72, 1))
    process_weights_after_loading(model, MODEL, torch.device("cpu"))
    addresses = {name: each.data_ptr() for name, each in model.named_parameters()}
    initialize_layerwise_reload(model)
    again = make(72, 5)
    load(model.down, again)
    finalize_layerwise_processing(model, MODEL)
    assert {name: each.data_ptr() for name, each in model.named_parameters()} == addresses
    assert_product(model.down, again.weight)


def test_weights_that_stay_in_small_pages_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(quantized_linear_layers.logger, "info_once", lambda text, reason: told.append(text % reason))
    layer = torch.nn.Module()
    packed = Packed(torch.zeros(1, 2, 8, 4, dtype=torch.uint8), torch.zeros(1, 1, 8), None)
    for reason in ("", "no reason"):
        monkeypatch.setattr(loading.host, "gather_pages", lambda _storage, reason=reason: reason)
        loading.exchange(layer, (), lambda: packed)
    assert told == ["Packed weights stay in small pages, which are slower to read (no reason)."]
