"""Declares the layer classes of vLLM that Backplane replaces, checks each declaration and registers the replacements.

vLLM looks replacements up by class name and ignores a name that matches no class. A class renamed upstream would
therefore disable a kernel silently. Each binding names the class it replaces by module and name. It is refused if that
class does not exist, cannot be replaced, or is not the base of the replacement.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from vllm_backplane.errors import BindingError
from vllm_backplane.settings.releases import INSTALL_SUPPORTED


@dataclass(frozen=True, slots=True)
class Binding:
    """Declares the replacement of a layer class of vLLM, the operators that the replacement calls, and the reason."""

    upstream: str
    """module:Class in vLLM."""
    replacement: str
    """module:Class in Backplane."""
    operators: tuple[str, ...]
    reason: str

    @property
    def layer(self) -> str:
        return self.upstream.partition(":")[2]


_ACTIVATION = "vllm.model_executor.layers.activation"
_OURS = "vllm_backplane.layers"


def _activation(name: str, *operators: str) -> Binding:
    gated = "AndMul" in name or "MulAnd" in name
    return Binding(
        f"{_ACTIVATION}:{name}",
        f"{_OURS}.activation:Backplane{name}",
        operators,
        "one pass over the gate and up halves" if gated else "one pass instead of several",
    )


def _rotary(module: str, name: str) -> Binding:
    return Binding(
        f"vllm.model_executor.layers.rotary_embedding.{module}:{name}",
        f"{_OURS}.rotary:Backplane{name}",
        ("rotary_embedding",),
        "in place on the fused qkv tensor, without a copy",
    )


_LINEAR = "vllm.model_executor.layers.linear"


def _linear(name: str) -> Binding:
    return Binding(
        f"{_LINEAR}:{name}",
        f"{_OURS}.linear:Backplane{name}",
        ("linear", "blocked_linear"),
        "the device computes the GEMM and chooses the order of the weights",
    )


BINDINGS: tuple[Binding, ...] = (
    Binding(
        "vllm.model_executor.layers.layernorm:GemmaRMSNorm",
        f"{_OURS}.norm:BackplaneGemmaRMSNorm",
        ("gemma_rms_norm", "fused_add_gemma_rms_norm"),
        "upstream adds 1 to the weight in float32 at every call",
    ),
    _rotary("base", "RotaryEmbedding"),
    _rotary("dynamic_ntk_alpha_rope", "DynamicNTKAlphaRotaryEmbedding"),
    _rotary("dynamic_ntk_scaling_rope", "DynamicNTKScalingRotaryEmbedding"),
    _rotary("linear_scaling_rope", "LinearScalingRotaryEmbedding"),
    _rotary("llama3_rope", "Llama3RotaryEmbedding"),
    _rotary("ntk_scaling_rope", "NTKScalingRotaryEmbedding"),
    _rotary("yarn_scaling_rope", "YaRNScalingRotaryEmbedding"),
    _activation("SiluAndMul", "silu_and_mul"),
    _activation("MulAndSilu", "mul_and_silu"),
    _activation("GeluAndMul", "gelu_and_mul"),
    _activation("FatreluAndMul", "fatrelu_and_mul"),
    _activation("SiluAndMulWithClamp", "silu_and_mul_with_clamp"),
    _activation("SwigluOAIAndMul", "swigluoai_and_mul"),
    _activation("GELU", "gelu"),
    _activation("GELUTanh", "gelu"),
    _activation("NewGELU", "gelu_new"),
    _activation("FastGELU", "gelu_fast"),
    _activation("QuickGELU", "quick_gelu"),
    _activation("ReLUSquaredActivation", "relu2"),
    _linear("ReplicatedLinear"),
    _linear("ColumnParallelLinear"),
    _linear("MergedColumnParallelLinear"),
    _linear("QKVParallelLinear"),
    _linear("RowParallelLinear"),
    Binding(
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding",
        f"{_OURS}.embedding:BackplaneVocabParallelEmbedding",
        ("embedding", "logits"),
        "embedding reads single rows of the table, logits read all of it",
    ),
    Binding(
        "vllm.model_executor.layers.vocab_parallel_embedding:ParallelLMHead",
        f"{_OURS}.embedding:BackplaneParallelLMHead",
        ("logits",),
        "the largest GEMM of a small model",
    ),
    Binding(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        f"{_OURS}.moe:BackplaneFusedMoEMethod",
        ("moe_route", "moe_experts"),
        "upstream has no expert kernels for out-of-tree platforms",
    ),
    Binding(
        "vllm.model_executor.layers.mamba.mamba_mixer:MambaMixer",
        f"{_OURS}.mamba:BackplaneMambaMixer",
        ("causal_convolution", "selective_scan"),
        "upstream needs Triton",
    ),
    Binding(
        "vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2",
        f"{_OURS}.mamba:BackplaneMambaMixer2",
        ("causal_convolution", "selective_scan"),
        "upstream needs Triton",
    ),
    Binding(
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention",
        f"{_OURS}.delta_net:BackplaneQwenGatedDeltaNetAttention",
        ("causal_convolution", "gated_delta_rule"),
        "upstream needs Triton",
    ),
)


def load(path: str) -> Any:
    """Returns the object at ``module:name``. Raises BindingError if there is none."""
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError as fault:
        raise BindingError(f"{path} cannot be bound: {fault}. {INSTALL_SUPPORTED}") from fault
    try:
        return getattr(found, name)
    except AttributeError:
        raise BindingError(
            f"{path} does not exist: the layer was renamed or removed in the installed vLLM, and a replacement under "
            f"the old name would never run. {INSTALL_SUPPORTED}"
        ) from None


def check(binding: Binding) -> tuple[Any, Any]:
    """Returns (vLLM's class, replacement). Raises BindingError if the replacement would not take effect."""
    from vllm.model_executor.custom_op import CustomOp, PluggableLayer

    upstream, replacement = load(binding.upstream), load(binding.replacement)
    if not issubclass(upstream, (CustomOp, PluggableLayer)):
        raise BindingError(
            f"{binding.upstream} can no longer be replaced: it is not a CustomOp or PluggableLayer. {INSTALL_SUPPORTED}"
        )
    if not issubclass(replacement, upstream):
        raise BindingError(f"{binding.replacement} is not a subclass of {binding.upstream}. {INSTALL_SUPPORTED}")
    if upstream.__name__ != binding.layer:
        raise BindingError(
            f"{binding.upstream} is named {upstream.__name__!r}, and vLLM looks replacements up by that name. "
            f"{INSTALL_SUPPORTED}"
        )
    return upstream, replacement


def bind() -> None:
    """Registers every replacement with vLLM, once per process: layers, attention backends, quantization methods, model
    loaders and the KV connector."""
    from vllm.model_executor.custom_op import op_registry_oot

    from vllm_backplane.attention import selection
    from vllm_backplane.kv_offload import registration as kv_offload
    from vllm_backplane.quantization.checkpoint import registration as checkpoint_config
    from vllm_backplane.quantization.gguf import registration as gguf
    from vllm_backplane.quantization.online import config as online_config
    from vllm_backplane.weights import peer_loader, shared_loader

    selection.register()
    online_config.register()
    gguf.register()
    checkpoint_config.register()
    shared_loader.register()
    peer_loader.register()
    kv_offload.register()
    for binding in BINDINGS:
        upstream, replacement = check(binding)
        present = op_registry_oot.get(upstream.__name__)
        if present is replacement:
            continue
        if present is not None:
            raise BindingError(
                f"{binding.upstream} is already replaced by {present.__module__}:{present.__name__}; uninstall one of "
                "the two plugins"
            )
        op_name = getattr(upstream, "name", None)
        upstream.register_oot(replacement)
        if op_name is not None:
            # register_oot overwrites the name by which users enable or disable an operator (custom_ops).
            replacement.name = op_name
