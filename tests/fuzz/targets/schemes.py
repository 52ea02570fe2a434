"""Defines the fuzz targets of quantized checkpoints: a quantization config and the tensors of a layer or an expert.

vLLM makes the layer, loads its tensors and prepares it, as it does for a model. An accepted layer must give finite
outputs, and the same ones when it is loaded a second time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.fuzz.campaign import Target
from tests.fuzz.targets import framed
from tests.fuzz.targets.worker import prepare_worker

INPUTS, OUTPUTS = 64, 16
WIDTH = 32
"""Intermediate features of an expert."""
EXPERTS = 2
FORMATS = ("awq", "compressed_tensors", "gptq")


def load_layer(data: bytes) -> None:
    """Makes, loads and applies a linear layer."""
    _require_finite_and_repeatable(data, _linear)


def load_experts(data: bytes) -> None:
    """Makes, loads and applies experts, which all have the same tensors. A name is that of the weight (w1, w2, w3), a
    dot, and that of the tensor."""
    _require_finite_and_repeatable(data, _experts)


def _require_finite_and_repeatable(
    data: bytes, outputs_of: Callable[[dict[str, Any], dict[str, Any], Any], Any]
) -> None:
    import torch
    from safetensors.torch import load

    from vllm_backplane.errors import CheckpointError

    document, file = framed.split(data)
    try:
        config = json.loads(document)
    except (ValueError, RecursionError) as fault:
        raise CheckpointError("not JSON") from fault  # transformers reads config.json before
    if not isinstance(config, dict):
        raise CheckpointError("not an object")
    tensors = load(file)
    x = torch.linspace(-1, 1, 3 * INPUTS).view(3, INPUTS)
    outputs = outputs_of(config, tensors, x)
    assert bool(torch.isfinite(outputs).all()), "an accepted layer gives NaN or infinite outputs"
    assert torch.equal(outputs, outputs_of(config, tensors, x)), "the same tensors gave other outputs"


def _linear(config: dict[str, Any], tensors: dict[str, Any], x: Any) -> Any:
    from vllm.model_executor.layers.linear import RowParallelLinear

    from vllm_backplane.errors import CheckpointError

    quantization = _quantization(config)
    layer = RowParallelLinear(INPUTS, OUTPUTS, bias=False, quant_config=quantization, prefix="model.layers.0.down")
    parameters = dict(layer.named_parameters())
    for name, tensor in tensors.items():
        if name not in parameters:
            raise CheckpointError("vLLM refuses weights that the model does not have")
        parameters[name].weight_loader(parameters[name], tensor)
    _finish(layer, layer, config)
    return layer(x)[0]


def _experts(config: dict[str, Any], tensors: dict[str, Any], x: Any) -> Any:
    import torch
    from vllm.config import get_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

    from vllm_backplane.errors import CheckpointError

    quantization = _quantization(config)
    vllm_config = get_current_vllm_config()
    vllm_config.compilation_config.static_forward_context.clear()  # vLLM refuses a second layer of the same name
    runner = FusedMoEFactory(
        num_experts=EXPERTS,
        top_k=1,
        hidden_size=INPUTS,
        intermediate_size=WIDTH,
        params_dtype=torch.float32,
        quant_config=quantization,
        prefix="model.layers.0.mlp.experts",
    )
    layer = runner.routed_experts
    parameters = dict(layer.named_parameters())
    for expert in range(EXPERTS):
        for name, tensor in tensors.items():
            weight, _, stored = name.partition(".")
            parameter = parameters.get(f"{'w2' if weight == 'w2' else 'w13'}_{stored}")
            if parameter is None or weight not in ("w1", "w2", "w3"):
                raise CheckpointError("vLLM refuses weights that the model does not have")
            parameter.weight_loader(parameter, tensor, stored, weight, expert)
    _finish(runner, layer, config)
    with set_forward_context(None, vllm_config, num_tokens=len(x)):
        return runner(hidden_states=x, router_logits=torch.ones(len(x), EXPERTS))


def _quantization(config: dict[str, Any]) -> Any:
    """Returns vLLM's quantization config of a checkpoint's."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    from vllm_backplane.errors import CheckpointError

    method = config.get("quant_method")
    names = {"gptq": "auto_gptq", "awq": "auto_awq", "compressed-tensors": "compressed-tensors"}
    if not isinstance(method, str) or method not in names:
        raise CheckpointError("vLLM refuses the method by name")
    return get_quantization_config(names[method]).from_config(json.loads(json.dumps(config)))


def _finish(module: Any, layer: Any, config: dict[str, Any]) -> None:
    """Does what follows the loading of a model's weights."""
    import torch
    from vllm.model_executor.model_loader.reload import finalize_layerwise_processing

    model: Any = SimpleNamespace(
        dtype=torch.float32, quantization=config["quant_method"], word_embeddings_untied_by_checkpoint=False
    )
    finalize_layerwise_processing(module, model)
    layer.quant_method.process_weights_after_loading(layer)


def targets() -> list[Target]:
    """Returns the targets of this file."""
    from safetensors import SafetensorError

    from vllm_backplane.errors import BackplaneError

    covered = ("vllm_backplane/quantization",)
    imports = tuple(f"vllm_backplane.quantization.checkpoint.{name}" for name in FORMATS)
    return [
        Target(
            name,
            run,
            (BackplaneError, SafetensorError),
            covered,
            mutate=framed.mutate,
            imports=imports,
            prepare=prepare_worker,
            memory=64 << 20,
        )
        for name, run in (("quantized-layer", load_layer), ("quantized-experts", load_experts))
    ]
