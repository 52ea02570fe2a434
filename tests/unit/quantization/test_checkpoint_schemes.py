"""Tests layers of GPTQ, AWQ and compressed-tensors checkpoints, loaded by vLLM, against the formats' definitions.

The inputs are chosen so that only float32 rounding remains (`scheme_layers.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import BoundArguments
from types import SimpleNamespace
from typing import Any, cast

import pytest
import scheme_checkpoints as made
import torch
from scheme_layers import (
    CASES,
    FAN_IN,
    MODEL,
    assert_product,
    configured,
    finish,
    in_memory,
    load,
    process,
    whole_numbers,
)
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.utils import gptq_utils
from vllm.model_executor.layers.quantization.utils.quant_utils import awq_pack
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_processing,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.reload import utils as reload_utils
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.platforms import current_platform

from vllm_backplane.device import CodeLayout
from vllm_backplane.errors import BackplaneError, CheckpointError
from vllm_backplane.layers import layerwise_loading
from vllm_backplane.ops.quantized_linear import Packed
from vllm_backplane.quantization import packed_parameters
from vllm_backplane.quantization.checkpoint import gptq, linear_method
from vllm_backplane.quantization.checkpoint.awq import WORD_ORDER as AWQ_WORD_ORDER
from vllm_backplane.quantization.checkpoint.repacking import (
    PackedWords,
    ZeroPoints,
    grouping_order,
    repack,
    split_group,
)


@pytest.fixture(autouse=True)
def _alone(one_worker: None) -> None:
    """Initializes a group of one worker: parameters read their rank."""


@pytest.mark.parametrize("case", CASES)
def test_a_layer_multiplies_by_the_weights_of_the_checkpoint(case: str) -> None:
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


def test_layers_of_a_checkpoint_without_metadata_are_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes the names of quantized layers from the metadata, and 0.30 and 0.31 know no other quantized layers."""

    def as_before(prefix: str, quantized_layers: list[str], fused_mapping: object = None) -> bool:
        return any(name in prefix for name in quantized_layers)

    monkeypatch.setattr(gptq_utils, "is_layer_gptq_quantized", as_before)
    config = configured(made.GPTQ)
    assert config.modules_in_block_to_quantize == []
    assert hasattr(RowParallelLinear(FAN_IN, 72, bias=False, quant_config=config, prefix="down"), "qweight")
    assert config.modules_in_block_to_quantize == [], "vLLM fills it in if it is empty"
    config.modules_in_block_to_quantize = ["layers.1.down"]
    for prefix, is_quantized in (("layers.0.down", False), ("layers.1.down", True)):
        layer = RowParallelLinear(FAN_IN, 72, bias=False, quant_config=config, prefix=prefix)
        assert hasattr(layer, "qweight") is is_quantized


@pytest.mark.parametrize("case", CASES)
def test_parts_of_a_fused_layer_lie_in_their_places(case: str) -> None:
    config, make = CASES[case]
    layer = QKVParallelLinear(FAN_IN, 8, 4, 2, bias=False, quant_config=configured(config), prefix="qkv")
    parts = {"v": make(16, 2), "q": make(32, 3), "k": make(16, 4)}
    for name, part in parts.items():
        assert in_memory(layer) <= {"g_idx"}, "tensors of an incomplete layer stay in the file"
        load(layer, part, name)
    assert layer.weight.dtype in (torch.uint8, torch.int8), "packed with the last part"
    finish(layer)
    assert_product(layer, torch.cat([parts[name].weight for name in "qkv"]))


TENSORS = {
    "GPTQ, zero points": ("qweight", "qzeros", "scales"),
    "AWQ, 4 bits": ("qweight", "qzeros", "scales"),
    "W4A16, zero points": ("weight_packed", "weight_scale", "weight_zero_point"),
    "W8A8": ("weight", "weight_scale"),
}


@pytest.mark.parametrize(("case", "tensor"), [(case, one) for case, tensors in TENSORS.items() for one in tensors])
def test_a_tensor_that_is_not_in_the_checkpoint_is_named(case: str, tensor: str) -> None:
    config, make = CASES[case]
    chosen = configured(config)
    chosen.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # as the model's class declares it
    layer = QKVParallelLinear(FAN_IN, 8, 4, 2, bias=False, quant_config=chosen, prefix="layers.3.qkv_proj")
    for name, part in {"q": make(32, 3), "k": make(16, 4), "v": make(16, 2)}.items():
        if name == "k":
            del part.tensors[tensor]
        load(layer, part, name)
    with pytest.raises(CheckpointError, match=rf"the checkpoint has no layers\.3\.k_proj\.{tensor}; choose"):
        process(layer)


@pytest.mark.parametrize("first", [True, False])
def test_a_bias_that_is_not_in_the_checkpoint_is_named(first: bool) -> None:
    """A file has the bias before the other tensors of its layer. vLLM alone would buffer it only after one of them."""
    chosen = configured(made.AWQ)
    chosen.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    layer = MergedColumnParallelLinear(FAN_IN, [24, 40], bias=True, quant_config=chosen, prefix="mlp.gate_up_proj")
    if first:
        layer.bias.weight_loader(layer.bias, torch.zeros(24), 0)
    for number, width in enumerate((24, 40)):
        load(layer, made.awq(FAN_IN, width, 4, 32, seed=number), number)
    missing = "mlp.up_proj.bias" if first else "mlp.gate_proj.bias, mlp.up_proj.bias"
    remedy = "choose a complete one, or, if this architecture has no such bias, one in which"
    with pytest.raises(CheckpointError, match=rf"^the checkpoint has no {missing}; {remedy}"):
        process(layer)


def test_zero_points_that_nothing_uses_may_be_missing() -> None:
    layer = RowParallelLinear(FAN_IN, 24, bias=False, quant_config=configured(made.GPTQ), prefix="down")
    stored = made.gptq(FAN_IN, 24, 4, 32)
    del stored.tensors["qzeros"]
    load(layer, stored)
    finish(layer)
    assert_product(layer, stored.weight)


@pytest.mark.skipif(
    not hasattr(reload_utils, "get_tensor_load_numel"), reason="vLLM 0.30 counts shapes; the layer is then refused"
)
def test_shapes_are_not_counted_as_weights() -> None:
    """The checkpoint has three shapes of two elements, the layer has one. The last scales have four elements."""
    config = configured(made.compressed(8, -1))
    layer = QKVParallelLinear(FAN_IN, 4, 4, 1, bias=False, quant_config=config, prefix="qkv")
    sizes = {"q": 16, "k": 4, "v": 4}
    parts = {name: made.pack_quantized(FAN_IN, size, 8, -1, seed=size) for name, size in sizes.items()}
    parts["v"].tensors["weight_scale"] = parts["v"].tensors.pop("weight_scale")  # the last
    for name, part in parts.items():
        load(layer, part, name)
    finish(layer)
    assert_product(layer, torch.cat([part.weight for part in parts.values()]))


@pytest.mark.parametrize("bits", [4, 8])
def test_columns_of_awq_lie_where_vllm_packs_them(bits: int) -> None:
    """vLLM's helper for kernel tests packs 8 bits too; its configuration supports 4 bits only."""
    codes = torch.randint(0, 2**bits, (8, 64), dtype=torch.int32, generator=torch.Generator().manual_seed(bits))
    packed = awq_pack(codes, bits, 8, 64)
    order = made.AWQ_COLUMNS[bits]
    assert torch.equal(packed, made.packed(codes.numpy().astype("uint8"), bits, order))
    assert torch.equal(
        PackedWords(packed, bits, 1, 1, AWQ_WORD_ORDER[bits]).unpack_rows(0, 64), codes.t().to(torch.uint8)
    )
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
    bias = torch.arange(64.0).split([24, 40])
    for number, part in enumerate(parts):
        part.tensors["bias"] = bias[number]
        load(layer, part, number)
    assert layer.weight.dtype in (torch.uint8, torch.int8), "packed with the last part"
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


# --- what is refused


def test_parts_in_different_orders_are_refused() -> None:
    layer = QKVParallelLinear(
        FAN_IN, 8, 4, 2, bias=False, quant_config=configured(made.GPTQ, desc_act=True), prefix="layers.7.qkv"
    )
    for seed, (name, size) in enumerate((("q", 32), ("k", 16)), 1):
        load(layer, made.gptq(FAN_IN, size, 4, 32, by_activation=seed), name)
    with pytest.raises(CheckpointError, match=r"layers\.7\.qkv have different activation orders .*desc_act=False"):
        load(layer, made.gptq(FAN_IN, 16, 4, 32, by_activation=3), "v")


def test_a_missing_order_is_rejected() -> None:
    config = configured(made.GPTQ, desc_act=True)
    layer = RowParallelLinear(FAN_IN, 24, bias=False, quant_config=config, prefix="down")
    stored = made.gptq(FAN_IN, 24, 4, 32)
    del stored.tensors["g_idx"]
    load(layer, stored)
    with pytest.raises(CheckpointError, match="no g_idx for down"):
        process(layer)


def test_unequal_groups_are_rejected() -> None:
    config = configured(made.GPTQ, desc_act=True)
    layer = RowParallelLinear(FAN_IN, 24, bias=False, quant_config=config, prefix="down")
    stored = made.gptq(FAN_IN, 24, 4, 32, by_activation=1)
    stored.tensors["g_idx"][:] = torch.arange(FAN_IN) // 40
    with pytest.raises(CheckpointError, match=r"g_idx of down .* unequal size"):
        load(layer, stored)


@pytest.mark.parametrize("group", [-2, 3, (1 << 31) - 1])
def test_a_group_that_does_not_exist_is_rejected(group: int) -> None:
    """Tests groups that a table of counts by group would need gigabytes for."""
    layer = RowParallelLinear(
        FAN_IN, 24, bias=False, quant_config=configured(made.GPTQ, desc_act=True, group_size=32), prefix="down"
    )
    stored = made.gptq(FAN_IN, 24, 4, 32, by_activation=1)
    stored.tensors["g_idx"][5] = group if group != 3 else FAN_IN // 32
    with pytest.raises(CheckpointError, match=r"no g_idx for down|g_idx of down .*its groups are 0 to \d+, and .* has"):
        load(layer, stored)


@pytest.mark.parametrize("size", [1, FAN_IN + 1])
def test_an_order_of_another_length_is_rejected(size: int) -> None:
    layer = RowParallelLinear(FAN_IN, 24, bias=False, quant_config=configured(made.GPTQ, desc_act=True), prefix="down")
    stored = made.gptq(FAN_IN, 24, 4, 32, by_activation=1)
    stored.tensors["g_idx"] = stored.tensors["g_idx"].repeat(2)[:size]
    with pytest.raises(CheckpointError, match=rf"g_idx .* has the shape \({size},\)"):
        load(layer, stored)


@pytest.mark.parametrize("size", [1, 2 * FAN_IN])
def test_an_order_that_is_not_used_may_be_longer(size: int) -> None:
    """Tests a checkpoint without activation order, of which some have more values than inputs."""
    layer = RowParallelLinear(FAN_IN, 24, bias=False, quant_config=configured(made.GPTQ), prefix="down")
    stored = made.gptq(FAN_IN, 24, 4, 32)
    stored.tensors["g_idx"] = stored.tensors["g_idx"].repeat(2)[:size]
    if size < FAN_IN:
        with pytest.raises(CheckpointError, match=rf"g_idx .* has the shape \({size},\)"):
            load(layer, stored)
    else:
        load(layer, stored)
        finish(layer)
        assert_product(layer, stored.weight)


def test_one_order_is_loaded_into_several_fused_weights() -> None:
    """Tests what vLLM's loader of fused weights passes for parts that the checkpoint has in one tensor."""
    param = torch.nn.Parameter(torch.full((4, 6), -1), requires_grad=False)
    order = torch.tensor([1, 0, 2, 0, 1, 2])
    gptq._load_group_index(6, param, order, (0, 1, 2))
    assert param.tolist() == [order.tolist()] * 3 + [[-1] * 6]


def test_an_order_of_long_integers_is_used_as_it_is() -> None:
    layer = RowParallelLinear(FAN_IN, 24, bias=False, quant_config=configured(made.GPTQ, desc_act=True), prefix="down")
    stored = made.gptq(FAN_IN, 24, 4, 32, by_activation=1)
    stored.tensors["g_idx"] = stored.tensors["g_idx"].long()
    load(layer, stored)
    finish(layer)
    assert_product(layer, stored.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda order: order.long() + (1 << 32), r"its groups are 4294967296 to 4294967303, and the layer has 8"),
        (lambda order: order.float(), r"down\.g_idx has the type torch\.float32, and torch\.int32 or torch\.int64 is"),
    ],
    ids=["beyond int32", "float"],
)
def test_an_order_that_would_be_converted_is_rejected(change: Any, message: str) -> None:
    layer = RowParallelLinear(FAN_IN, 24, bias=False, quant_config=configured(made.GPTQ, desc_act=True), prefix="down")
    stored = made.gptq(FAN_IN, 24, 4, 32, by_activation=1)
    stored.tensors["g_idx"] = change(stored.tensors["g_idx"])
    with pytest.raises(CheckpointError, match=message):
        load(layer, stored)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("case", CASES)
def test_scales_that_are_no_numbers_are_rejected(case: str, value: float) -> None:
    config, make = CASES[case]
    layer = RowParallelLinear(FAN_IN, 72, bias=False, quant_config=configured(config), prefix="layers.3.down")
    stored = make(72, 1)
    [scales] = [tensor for name, tensor in stored.tensors.items() if name.endswith(("scales", "weight_scale"))]
    scales.view(-1)[-1] = value  # 1e30 is infinite in float16

    def use() -> None:
        load(layer, stored)
        finish(layer)

    with pytest.raises(CheckpointError, match=r"scales of layers\.3\.down have NaN, infinite or very large values"):
        use()


@pytest.mark.parametrize("value", [None, "32", 32.5, [32], True, 0])
@pytest.mark.parametrize("name", ["bits", "group_size"])
@pytest.mark.parametrize("config", [made.GPTQ, made.AWQ], ids=["GPTQ", "AWQ"])
def test_a_config_without_numbers_is_rejected(config: Mapping[str, Any], name: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"for {name}, not an integer other than 0; download"):
        configured(config, **{name: value})


@pytest.mark.parametrize("rule", [{"bits": 0}, {"bits": "4"}, {"group_size": None}])
def test_a_rule_without_numbers_is_rejected(rule: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="not an integer other than 0; download"):
        configured(made.GPTQ, dynamic={"+:.*down.*": rule})


@pytest.mark.parametrize(
    "changes",
    [{"dynamic": []}, {"dynamic": {"+:.*down.*": [1]}}, {"dynamic": 5}],
    ids=str,
)
def test_a_config_of_other_types_is_rejected(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="quantization config of this checkpoint cannot be used"):
        RowParallelLinear(FAN_IN, 24, bias=False, quant_config=configured(made.GPTQ, **changes), prefix="layers.down")


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (made.GPTQ, {"dynamic": {"+:(.*)*x": {"bits": 8}}}),
        (made.GPTQ, {"dynamic": {"+:(": {"bits": 8}}}),
        (made.compressed(4, 32), {"ignore": ["re:" + ".?" * 40 + "Z"]}),
        (made.compressed(4, 32), {"ignore": ["re:" + ".*" * 20 + "x"]}),
    ],
)
def test_patterns_that_take_very_long_are_rejected(config: Mapping[str, Any], changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"may take very long to match|has no bound"):
        configured(config, **changes)


def test_published_patterns_are_accepted() -> None:
    configured(made.GPTQ, dynamic={r"-:.*\.(?:q|k)_proj.*": {}, r"+:model\.layers\.(?:1|2|30)\..*": {"bits": 8}})
    configured(made.compressed(4, 32), ignore=["lm_head", "re:.*mlp.gate$", "re:.*self_attn.*", "re:^(?!.*mlp).*$"])


@pytest.mark.parametrize("case", CASES)
def test_a_tensor_of_another_shape_is_named(case: str) -> None:
    config, make = CASES[case]
    layer = RowParallelLinear(FAN_IN, 72, bias=False, quant_config=configured(config), prefix="layers.3.down")
    with pytest.raises(CheckpointError, match=r"layers\.3\.down\.\w+ has the shape .* which does not fit"):
        load(layer, make(80, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("case", CASES)
def test_codes_of_another_type_are_rejected(case: str, dtype: torch.dtype) -> None:
    """Tests codes of the right shape, which vLLM's loaders would convert: 1.5e9 to another int32, 2^32 + 1 to 1."""
    config, make = CASES[case]
    layer = RowParallelLinear(FAN_IN, 72, bias=False, quant_config=configured(config), prefix="layers.3.down")
    stored = make(72, 1)
    [name] = stored.tensors.keys() & {"qweight", "weight_packed", "weight"}
    required = stored.tensors[name].dtype
    stored.tensors[name] = stored.tensors[name].to(dtype)
    with pytest.raises(CheckpointError, match=rf"layers\.3\.down\.{name} has the type {dtype}, and {required} is"):
        load(layer, stored)


def test_scales_of_an_integer_type_are_rejected() -> None:
    layer = RowParallelLinear(FAN_IN, 24, bias=False, quant_config=configured(made.GPTQ), prefix="down")
    stored = made.gptq(FAN_IN, 24, 4, 32)
    stored.tensors["scales"] = stored.tensors["scales"].view(torch.int16)
    with pytest.raises(CheckpointError, match=r"down\.scales has the type torch\.int16, and a floating type is"):
        load(layer, stored)


def test_shapes_may_be_of_either_integer_type() -> None:
    layer = RowParallelLinear(FAN_IN, 24, bias=False, quant_config=configured(made.compressed(4, 32)), prefix="down")
    stored = made.pack_quantized(FAN_IN, 24, 4, 32)
    stored.tensors["weight_shape"] = stored.tensors["weight_shape"].int()
    load(layer, stored)
    finish(layer)
    assert_product(layer, stored.weight)


@pytest.mark.parametrize("value", ["false", None, 1])
def test_symmetry_that_is_neither_true_nor_false_is_rejected(value: Any) -> None:
    with pytest.raises(CheckpointError, match="for sym, not true or false"):
        configured(made.GPTQ, sym=value)


SPARSE = {"format": "sparse-24-bitmask", "targets": ["Linear"], "sparsity_structure": "2:4"}
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
    "(actorder=": made.compressed(4, 64, actorder="group"),
    "Sparsity support": {**made.compressed(4, 64), "sparsity_config": SPARSE},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_run_is_refused_with_what_can(message: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        configured(REFUSED[message])
    assert message in str(refusal.value)
    assert "on device 'cpu'; choose a checkpoint of: GPTQ with 4 or 8 bits" in str(refusal.value)


def test_groups_that_do_not_divide_a_layer_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"96 inputs .* groups of 64; choose another --tensor-parallel-size"):
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
    order = grouping_order(torch.tensor([1, 0, 2, 0, 1, 2]), 3)
    assert order is not None
    assert order.tolist() == [1, 3, 0, 4, 2, 5]
    assert grouping_order(torch.tensor([0, 0, 1, 1]), 2) is None


def test_pieces_of_a_weight_fit_together() -> None:
    for stored, packed in ((made.awq(64, 200, 4, 32), 1), (made.gptq(64, 200, 4, 32, symmetric=False), 0)):
        codes = PackedWords(stored.tensors["qweight"], 4, packed, 1)
        zero_points = ZeroPoints(PackedWords(stored.tensors["qzeros"], 4, 1, 1))
        scales = stored.tensors["scales"].t()
        whole, chunks = (
            repack(codes, scales, zero_points, fan_in=64, layout=CodeLayout(), chunk=chunk) for chunk in (1 << 20, 1)
        )
        for one, other in zip(whole, chunks, strict=True):
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


def test_weights_that_stay_in_small_pages_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(packed_parameters.logger, "info_once", lambda text, reason: logged.append(text % reason))
    layer = torch.nn.Module()
    packed = Packed(torch.zeros(1, 2, 8, 4, dtype=torch.uint8), torch.zeros(1, 1, 8), None)
    for reason in ("", "no reason"):
        moved = "collapse_to_huge_pages"
        monkeypatch.setattr(packed_parameters.host_memory, moved, lambda _storage, reason=reason: reason)
        linear_method.replace_with_packed(layer, (), lambda: packed)
    assert logged == ["Packed weights stay in small pages, which are slower to read (no reason)."]


@pytest.mark.parametrize(
    ("shard", "parts"), [(None, [0, 1, 2]), ("v", [2]), (("q", "k"), [0, 1]), (1, [1]), ("of another model", [0, 1, 2])]
)
def test_parts_of_a_layer_by_the_names_that_loaders_give(shard: object, parts: list[int]) -> None:
    call = cast(BoundArguments, SimpleNamespace(arguments={"loaded_shard_id": shard}))
    assert list(layerwise_loading._loaded_shards(call, 3)) == parts
