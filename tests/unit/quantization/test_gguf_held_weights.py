"""Tests how much memory a layer takes for each GGUF type: codes of 4 or 8 bits, scales and offsets.

The numbers are those of docs/serve/checkpoints.md. They are repeated here so that a larger layout is a decision.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.linear import MergedColumnParallelLinear

from vllm_backplane.errors import CheckpointError
from vllm_backplane.gguf.decoding import FLOATS, QUANTIZED_TYPES
from vllm_backplane.gguf.lazy_tensor import LazyTensor
from vllm_backplane.quantization.gguf.config import GgufConfig
from vllm_backplane.quantization.gguf.embedding import GgufEmbeddingMethod

HIDDEN, WIDTH, EXPERTS = 512, 256, 2


class Held(NamedTuple):
    codes: int
    """Bits of a code; 0 for values in the model's dtype."""
    scales_and_offsets: float
    """Bits per weight of scales and offsets."""


HELD = {
    Type.Q4_0: Held(4, 16 / 32),
    Type.Q4_1: Held(4, 32 / 32),
    Type.Q5_0: Held(8, 16 / 32),
    Type.Q5_1: Held(8, 32 / 32),
    Type.Q8_0: Held(8, 16 / 32),
    Type.Q2_K: Held(4, 64 / 16),
    Type.Q3_K: Held(4, 32 / 16),
    Type.Q4_K: Held(4, 64 / 32),
    Type.Q5_K: Held(8, 64 / 32),
    Type.Q6_K: Held(8, 32 / 16),
    Type.IQ4_NL: Held(8, 16 / 32),
    Type.F32: Held(0, 0),
    Type.F16: Held(0, 0),
    Type.BF16: Held(0, 0),
}


@pytest.fixture(autouse=True)
def _alone(one_worker: None) -> None:
    """Initializes a group of one worker: layers read their rank."""


def stored(kind: Type, rows: int, columns: int) -> LazyTensor:
    """Returns a tensor of random bytes, whose numbers are finite: its memory does not depend on the content."""
    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = torch.randint(0, 60, (rows, columns // per_block * block_bytes), dtype=torch.uint8)
    return LazyTensor(blocks, kind, (rows, columns))


def assert_held(layer: torch.nn.Module, kind: Type, weights: int) -> None:
    parameters = [each for each in layer.parameters() if each.numel()]
    assert not any(each.is_meta for each in parameters), "something was not loaded"
    expected = HELD[kind]
    if expected.codes == 0:
        assert {each.dtype for each in parameters} == {torch.bfloat16}
        assert sum(each.numel() for each in parameters) == weights
        return
    codes = [each for each in parameters if each.dtype in (torch.uint8, torch.int8)]
    assert sum(each.nbytes for each in codes) == weights * expected.codes / 8
    others = [each for each in parameters if each.dtype not in (torch.uint8, torch.int8)]
    assert {each.dtype for each in others} <= {torch.float16, torch.float32}
    assert sum(each.nbytes for each in others) == weights * expected.scales_and_offsets / 8


def test_every_type_that_is_served_is_looked_at() -> None:
    assert set(HELD) == {*QUANTIZED_TYPES, *FLOATS}


@pytest.mark.parametrize("kind", HELD, ids=lambda kind: kind.name)
def test_a_layer_holds_codes(kind: Type) -> None:
    """The layer fuses two weights."""
    layer: Any = MergedColumnParallelLinear(
        HIDDEN, [WIDTH, WIDTH], bias=False, params_dtype=torch.bfloat16, quant_config=GgufConfig(), prefix="up"
    )
    parameter = layer.weight
    assert parameter.is_meta, "memory was allocated before anything was loaded"
    for part in range(2):
        parameter.weight_loader(parameter, stored(kind, WIDTH, HIDDEN), part)
    assert_held(layer, kind, 2 * WIDTH * HIDDEN)


@pytest.mark.parametrize("kind", HELD, ids=lambda kind: kind.name)
def test_experts_hold_codes(kind: Type) -> None:
    layer: Any = FusedMoEFactory(
        num_experts=EXPERTS,
        top_k=1,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        params_dtype=torch.bfloat16,
        quant_config=GgufConfig(),
        prefix="model.layers.0.mlp.experts",
    ).routed_experts
    up, down = layer.w13_weight, layer.w2_weight
    assert up.is_meta and down.is_meta, "memory was allocated before anything was loaded"
    for expert in range(EXPERTS):
        for shard, parameter, shape in (
            *(("w1", up, (WIDTH, HIDDEN)), ("w3", up, (WIDTH, HIDDEN))),
            ("w2", down, (HIDDEN, WIDTH)),
        ):
            parameter.weight_loader(parameter, stored(kind, *shape), "weight", shard_id=shard, expert_id=expert)
    layer.quant_method.process_weights_after_loading(layer)
    assert_held(layer, kind, EXPERTS * 3 * WIDTH * HIDDEN)


@pytest.mark.parametrize(
    ("kind", "used_as_head", "padding", "mapped"),
    [
        (Type.BF16, False, 0, True),
        (Type.BF16, True, 0, False),
        (Type.BF16, False, 64, False),
        (Type.F16, False, 0, False),
        (Type.F32, False, 0, False),
        (Type.Q8_0, False, 0, True),
        (Type.Q8_0, True, 0, True),
    ],
)
def test_an_embedding_is_looked_up_in_the_file(kind: Type, used_as_head: bool, padding: int, mapped: bool) -> None:
    """The embedding reads the mapped file, unless the table differs from it: another dtype, or padding rows.

    A tied head needs a copy of floating-point values.
    """
    layer: Any = torch.nn.Module()
    layer.org_vocab_size, layer.embedding_dim = WIDTH, HIDDEN
    layer.shard_indices = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=WIDTH)
    method: Any = GgufEmbeddingMethod("model.embed_tokens", used_as_head=used_as_head)
    method.create_weights(layer, HIDDEN, [WIDTH + padding], HIDDEN, WIDTH + padding, torch.bfloat16)
    table = stored(kind, WIDTH, HIDDEN)
    layer.weight.weight_loader(layer.weight, table)
    method = getattr(layer, "quant_method", method)
    held = layer.blocks if used_as_head and kind == Type.Q8_0 else layer.weight
    assert (held.data_ptr() == table.rows.data_ptr()) == mapped
    tokens = torch.tensor([0, 7, WIDTH - 1])
    found = method.embedding(layer, tokens)
    torch.testing.assert_close(found, table.values()[tokens].bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", [Type.BF16, Type.Q8_0])
def test_an_embedding_in_the_file_with_values_that_are_not_finite_is_refused(kind: Type) -> None:
    layer: Any = torch.nn.Module()
    layer.org_vocab_size, layer.embedding_dim = WIDTH, HIDDEN
    layer.shard_indices = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=WIDTH)
    method: Any = GgufEmbeddingMethod("model.embed_tokens", used_as_head=False)
    method.create_weights(layer, HIDDEN, [WIDTH], HIDDEN, WIDTH, torch.bfloat16)
    table = stored(kind, WIDTH, HIDDEN)
    table.rows[WIDTH - 1] = 0xFF
    with pytest.raises(CheckpointError, match=f"of type {kind.name} in the GGUF file has NaN or infinite values"):
        layer.weight.weight_loader(layer.weight, table)
