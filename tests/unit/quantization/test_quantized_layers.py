"""Tests layers that are quantized while they are loaded: results, refusals and reloading."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_processing,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.platforms import current_platform

from vllm_backplane.errors import BackplaneError, CheckpointError
from vllm_backplane.quantization.online.config import Int4Config, Int8Config, OnlineConfig, register
from vllm_backplane.quantization.online.head import OnlineHeadMethod
from vllm_backplane.runtime import runtime

CONFIGS = (Int8Config, Int4Config)
MODEL: Any = SimpleNamespace(dtype=torch.float32, quantization="int8", word_embeddings_untied_by_checkpoint=False)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _alone(one_worker: None) -> None:
    """Initializes a group of one worker: parameters read their rank."""


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * columns**-0.5


def load(layer: torch.nn.Module, weight: torch.Tensor, *shard: Any) -> None:
    layer.weight.weight_loader(layer.weight, weight, *shard)  # type: ignore[union-attr,operator]


def assert_quantized(layer: torch.nn.Module, bits: int) -> None:
    assert layer.weight.dtype == runtime().device.quantized_layout(bits).code_type(bits)
    assert layer.quant_method.format.bits == bits


def assert_product(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bits: int) -> None:
    """Checks the relative error. With normally distributed weights and inputs it is about 0.01 with 8 bits and 0.1 with
    4."""
    exact = x.double() @ weight.double().T
    error = float((got.double() - exact).norm() / exact.norm())
    assert 1e-4 < error < (0.02 if bits == 8 else 0.13), error


@pytest.mark.parametrize("config", CONFIGS)
def test_shards_are_quantized_when_the_last_one_is_there(config: type[OnlineConfig]) -> None:
    bits = 8 if config is Int8Config else 4
    layer = MergedColumnParallelLinear(96, [40, 72], bias=True, quant_config=config(), prefix="up")
    gate, up, bias = matrix(40, 96), matrix(72, 96, 1), matrix(1, 112, 2)[0]
    assert layer.weight.is_meta
    load(layer, up, 1)
    layer.bias.weight_loader(layer.bias, bias[:40], 0)
    load(layer, gate, 0)
    assert layer.weight.is_meta, "half of the bias is missing"
    layer.bias.weight_loader(layer.bias, bias[40:], 1)
    assert_quantized(layer, bits)
    assert torch.equal(layer.bias, bias)
    x = matrix(5, 96, 3) * 10
    assert_product(layer(x)[0] - bias, x, torch.cat((gate, up)), bits)


def test_query_key_and_value_lie_in_their_places() -> None:
    layer = QKVParallelLinear(64, 8, 4, 2, bias=False, quant_config=Int8Config(), prefix="qkv")
    parts = {"v": matrix(16, 64, 2), "q": matrix(32, 64), "k": matrix(16, 64, 1)}
    for name, part in parts.items():
        load(layer, part, name)
    x = matrix(3, 64, 3) * 8
    assert_product(layer(x)[0], x, torch.cat((parts["q"], parts["k"], parts["v"])), 8)


def test_codes_are_not_loaded_into() -> None:
    layer = RowParallelLinear(64, 32, bias=False, quant_config=Int4Config(), prefix="down")
    load(layer, matrix(32, 64))
    with pytest.raises(BackplaneError, match="reload_weights"):
        load(layer, matrix(32, 64))


def test_a_layer_that_is_not_in_the_checkpoint_is_named() -> None:
    layer = RowParallelLinear(64, 32, bias=False, quant_config=Int4Config(), prefix="model.layers.3.down_proj")
    with pytest.raises(BackplaneError, match=r"no weights for model\.layers\.3\.down_proj"):
        finalize_layerwise_processing(layer, MODEL)


def test_a_part_of_a_fused_layer_that_is_not_in_the_checkpoint_is_named() -> None:
    config = Int8Config()
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # as the model's class declares it
    layer = QKVParallelLinear(64, 8, 4, 2, bias=True, quant_config=config, prefix="layers.3.qkv_proj")
    for name, rows in (("q", 32), ("v", 16)):
        layer.bias.weight_loader(layer.bias, torch.zeros(rows), name)
        load(layer, matrix(rows, 64), name)
    missing = r"layers\.3\.k_proj\.weight, layers\.3\.k_proj\.bias"
    with pytest.raises(CheckpointError, match=rf"^the checkpoint has no {missing}; choose a complete one$"):
        finalize_layerwise_processing(layer, MODEL)


def test_parts_may_come_in_one_tensor() -> None:
    layer = MergedColumnParallelLinear(64, [24, 40], bias=False, quant_config=Int8Config(), prefix="up")
    weight, x = matrix(64, 64), matrix(3, 64, 1) * 8
    load(layer, weight)
    assert_product(layer(x)[0], x, weight, 8)


def test_a_heads_bias_that_is_not_in_the_checkpoint_is_named() -> None:
    head = ParallelLMHead(100, 64, bias=True, quant_config=Int4Config(), prefix="lm_head")
    load(head, matrix(100, 64))
    finalize_layerwise_processing(head, MODEL)
    with pytest.raises(CheckpointError, match=r"the checkpoint has no lm_head\.bias; choose"):
        process_weights_after_loading(head, MODEL, CPU)


def test_a_head_is_quantized_from_the_checkpoint_and_padded() -> None:
    head = ParallelLMHead(100, 64, bias=True, quant_config=Int4Config(), prefix="lm_head")
    table = matrix(100, 64)
    load(head, table)
    head.bias.weight_loader(head.bias, torch.ones(100))
    assert_quantized(head, 8)
    finalize_layerwise_processing(head, MODEL)
    process_weights_after_loading(head, MODEL, CPU)
    x = matrix(3, 64, 1) * 8
    logits = head.quant_method.apply(head, x)
    assert logits.shape == (3, 128)
    assert not logits[:, 100:].any()
    assert_product(logits[:, :100], x, table, 8)


def test_a_head_that_does_not_fit_is_refused() -> None:
    head = ParallelLMHead(100, 64, quant_config=Int8Config(), prefix="lm_head")
    with pytest.raises(BackplaneError, match=r"lm_head has \(99, 64\)"):
        load(head, matrix(99, 64))


@pytest.mark.parametrize(("group", "groups"), [(None, 4), (16, 8), (64, 2), (0, 1)])
def test_the_option_sets_how_many_weights_share_a_scale(group: int | None, groups: int) -> None:
    """The input size is 128. The default group is 32 for int4, and 64 for the head, which has 8 bits."""
    additional = {} if group is None else {"backplane": {"quantization_group": group}}
    with set_current_vllm_config(VllmConfig(additional_config=additional)):
        layer = RowParallelLinear(128, 32, bias=False, quant_config=Int4Config(), prefix="down")
        head = ParallelLMHead(64, 128, quant_config=Int4Config(), prefix="lm_head")
    weight, table = matrix(32, 128), matrix(64, 128, 1)
    load(layer, weight)
    load(head, table)
    assert layer.weight_scale.shape[1] == groups
    assert head.weight_scale.shape[1] == (2 if group is None else groups)
    x = matrix(3, 128, 2) * 8
    assert_product(layer(x)[0], x, weight, 4)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(128, 64, quant_config=Int4Config(), prefix="embed_tokens")
        self.lm_head = ParallelLMHead(128, 64, quant_config=Int4Config(), prefix="lm_head")
        self.lm_head = self.lm_head.tie_weights(self.embed_tokens)


def test_a_tied_head_is_a_quantized_copy_of_the_table() -> None:
    model, table, x = Tied(), matrix(128, 64), matrix(3, 64, 1) * 8
    assert isinstance(model.lm_head.quant_method, OnlineHeadMethod)
    record_metadata_for_reloading(model)
    load(model.embed_tokens, table)
    finalize_layerwise_processing(model, MODEL)
    process_weights_after_loading(model, MODEL, CPU)
    assert_quantized(model.lm_head, 8)
    assert torch.equal(model.embed_tokens(torch.tensor([5, 7])), table[[5, 7]]), "the embedding itself is not rounded"
    assert_product(model.lm_head.quant_method.apply(model.lm_head, x), x, table, 8)
    # A reload, as by the worker's reload_weights: new values at the same addresses.
    addresses = [model.lm_head.weight.data_ptr(), model.lm_head.weight_scale.data_ptr()]
    initialize_layerwise_reload(model)
    load(model.embed_tokens, -2 * table)
    finalize_layerwise_processing(model, MODEL)
    assert [model.lm_head.weight.data_ptr(), model.lm_head.weight_scale.data_ptr()] == addresses
    assert_product(model.lm_head.quant_method.apply(model.lm_head, x), x, -2 * table, 8)


class Untied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = RowParallelLinear(64, 32, bias=False, quant_config=Int4Config(), prefix="up")
        self.lm_head = ParallelLMHead(100, 64, quant_config=Int4Config(), prefix="lm_head")


def test_quantized_layers_are_loaded_again() -> None:
    model, x = Untied(), matrix(3, 64, 1) * 8
    record_metadata_for_reloading(model)
    load(model.up, matrix(32, 64))
    load(model.lm_head, matrix(100, 64))
    finalize_layerwise_processing(model, MODEL)
    process_weights_after_loading(model, MODEL, CPU)
    addresses = [each.data_ptr() for each in model.parameters()]
    initialize_layerwise_reload(model)
    load(model.lm_head, matrix(100, 64, 8))
    load(model.up, matrix(32, 64, 9))
    finalize_layerwise_processing(model, MODEL)
    assert [each.data_ptr() for each in model.parameters()] == addresses
    assert_product(model.up(x)[0], x, matrix(32, 64, 9), 4)
    assert_product(model.lm_head.quant_method.apply(model.lm_head, x)[:, :100], x, matrix(100, 64, 8), 8)


def test_the_names_are_vllms() -> None:
    register()
    for config in CONFIGS:
        assert get_quantization_config(config.name) is config
        assert type(pickle.loads(pickle.dumps(config()))) is config  # it is sent to the workers
        current_platform.verify_quantization(config.name)
    with pytest.raises(BackplaneError, match=r"quantization fp8 .* --quantization int8 or int4"):
        current_platform.verify_quantization("fp8")


@pytest.mark.parametrize("config", CONFIGS)
def test_what_is_quantized_already_is_refused(config: type[OnlineConfig]) -> None:
    with pytest.raises(BackplaneError, match=r"quantized already \(gptq\); choose the full-precision"):
        config.override_quantization_method({"quant_method": "gptq"}, config.name)
    assert config.override_quantization_method({"quant_method": "gptq"}, None) is None
    with pytest.raises(BackplaneError, match="full-precision"):
        config.from_config({"quant_method": config.name})


def test_vllms_own_online_quantization_is_not_mixed_in() -> None:
    config = Int8Config()
    config.maybe_update_config("model")
    config.online_quantization_config = object()  # type: ignore[assignment]
    with pytest.raises(BackplaneError, match="remove one"):
        config.maybe_update_config("model")
