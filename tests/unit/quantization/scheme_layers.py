"""Loads layers of quantized checkpoints as vLLM does, and provides test cases for each scheme.

Inputs are integers, and every second input is 127 or -127. Quantizing them to 8 bits changes none of them for any group
size, so only float32 rounding remains.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import scheme_checkpoints as made
import torch
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_processing

FAN_IN = 256
MODEL: Any = SimpleNamespace(dtype=torch.float32, quantization="gptq", word_embeddings_untied_by_checkpoint=False)


def configured(config: Mapping[str, Any], **changed: Any) -> Any:
    """Returns the configuration that vLLM makes from a quantization_config, pickled as for the workers."""
    described = {**config, **changed}
    name = {"gptq": "auto_gptq", "awq": "auto_awq"}.get(described["quant_method"], described["quant_method"])
    return pickle.loads(pickle.dumps(get_quantization_config(name).from_config(described)))


def whole_numbers(rows: int, columns: int) -> torch.Tensor:
    x = torch.randint(-127, 128, (rows, columns), generator=torch.Generator().manual_seed(rows)).float()
    x[:, ::2] = torch.where(x[:, ::2] < 0, -127, 127)
    return x


def load(layer: Any, stored: made.Stored, *shard: Any) -> None:
    """Loads the tensors of a layer. Parameters are looked up first, as vLLM's models do: a complete layer is packed."""
    parameters = {name: getattr(layer, name) for name in stored.tensors}
    for name, tensor in stored.tensors.items():
        parameters[name].weight_loader(parameters[name], tensor, *shard)


def process(layer: Any) -> None:
    """Processes a layer as vLLM does when all layers are loaded."""
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
