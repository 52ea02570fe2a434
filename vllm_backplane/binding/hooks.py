"""Declares the extension points of vLLM, other than layer classes, through which vLLM calls Backplane's operators.

`registry.py` lists the layer classes. The other extension points are the attention backends, IR operators, the model
runner's Triton kernels, the sampler, the LoRA wrapper and the quantization methods. They are listed here so that
`vllm-backplane ops` can name the callers of each operator, and so that they are checked like the layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_backplane.binding.registry import BINDINGS, load
from vllm_backplane.errors import BindingError
from vllm_backplane.settings.releases import INSTALL_SUPPORTED

IR_OPERATOR = "IR operator"
RUNNER_KERNEL = "runner kernel"


@dataclass(frozen=True, slots=True)
class Hook:
    """Declares an extension point of vLLM, the object of Backplane that uses it, and the operators that it calls."""

    kind: str
    upstream: str
    """module:name in vLLM: a class, a kernel or an IR operator."""
    replacement: str
    """module:name in Backplane."""
    operators: tuple[str, ...]

    @property
    def layer(self) -> str:
        return self.upstream.partition(":")[2].removesuffix(".kernel")


_QUANTIZATION = "vllm_backplane.quantization"


def _ir(name: str) -> Hook:
    return Hook(IR_OPERATOR, f"vllm.ir.ops:{name}", f"vllm_backplane.binding.ir:{name}", (name,))


def _kernel(upstream: str, adapter: str, *operators: str) -> Hook:
    return Hook(RUNNER_KERNEL, f"vllm.v1.{upstream}", f"vllm_backplane.runner.kernel_adapters:{adapter}", operators)


def _speculation(name: str, adapter: str) -> Hook:
    return _kernel(f"spec_decode.utils:{name}_kernel", adapter, name)


def _rejection(name: str, adapter: str, operator: str) -> Hook:
    return _kernel(f"sample.rejection_sampler:{name}_kernel", adapter, operator)


HOOKS: tuple[Hook, ...] = (
    Hook(
        "attention backend",
        "vllm.v1.attention.backend:AttentionImpl",
        "vllm_backplane.attention.implementation:BackplaneAttentionImpl",
        ("kv_cache_write", "paged_attention", "varlen_attention"),
    ),
    _ir("rms_norm"),
    _ir("fused_add_rms_norm"),
    Hook(
        "attention backend",
        "vllm.v1.attention.backend:MLAAttentionImpl",
        "vllm_backplane.attention.mla:BackplaneMLAImpl",
        ("kv_cache_write", "paged_attention"),
    ),
    Hook(
        "sampler",
        "vllm.v1.sample.sampler:Sampler",
        "vllm_backplane.runner.sampler:BackplaneSampler",
        ("greedy_argmax", "apply_penalties"),
    ),
    Hook(
        "sampler",
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler",
        "vllm_backplane.runner.sampler:BackplaneTopKTopPSampler",
        ("top_k_top_p_mask", "sample_by_race"),
    ),
    Hook(
        "logits processor",
        "vllm.v1.sample.logits_processor.builtin:MinPLogitsProcessor",
        "vllm_backplane.runner.sampler:BackplaneMinPLogitsProcessor",
        ("min_p_mask",),
    ),
    Hook(
        "LoRA wrapper",
        "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase",
        "vllm_backplane.lora.punica:BackplanePunicaWrapper",
        ("lora_shrink", "lora_expand"),
    ),
    Hook(
        "model runner",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        "vllm_backplane.runner.v1:BackplaneModelRunnerV1",
        ("kv_cache_zero_blocks", "allowed_tokens_mask"),
    ),
    Hook(
        "quantization method",
        "vllm.model_executor.layers.linear:LinearMethodBase",
        f"{_QUANTIZATION}.online.linear:OnlineLinearMethod",
        ("quantized_linear", "linear"),
    ),
    Hook(
        "quantization method",
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        f"{_QUANTIZATION}.online.experts:OnlineMoEMethod",
        ("quantized_linear", "silu_and_mul"),
    ),
    Hook(
        "quantization method",
        "vllm.model_executor.layers.linear:LinearMethodBase",
        f"{_QUANTIZATION}.gguf.linear:GgufLinearMethod",
        ("quantized_linear", "linear"),
    ),
    Hook(
        "quantization method",
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        f"{_QUANTIZATION}.gguf.experts:GgufMoEMethod",
        ("silu_and_mul",),
    ),
    Hook(
        "quantization method",
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        f"{_QUANTIZATION}.checkpoint.experts:CheckpointMoEMethod",
        ("quantized_linear", "silu_and_mul"),
    ),
    Hook(
        "linear kernel",
        "vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel:MPLinearKernel",
        f"{_QUANTIZATION}.checkpoint.mixed_precision:BackplaneMixedPrecisionKernel",
        ("quantized_linear",),
    ),
    Hook(
        "linear kernel",
        "vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel:Int8ScaledMMLinearKernel",
        f"{_QUANTIZATION}.checkpoint.w8a8_int8:BackplaneInt8Kernel",
        ("quantized_linear",),
    ),
    _kernel("worker.block_table:ComputeSlotMappingKernel.kernel", "_slot_mapping", "compute_slot_mapping"),
    _speculation("eagle_step_slot_mapping_metadata", "_eagle_step"),
    _speculation("eagle_prepare_inputs_padded", "_eagle_prepare_inputs"),
    _speculation("eagle_prepare_next_token_padded", "_eagle_prepare_next_token"),
    _speculation("copy_and_expand_eagle_inputs", "_copy_and_expand_eagle_inputs"),
    _speculation("copy_and_expand_dflash_inputs", "_copy_and_expand_dflash_inputs"),
    _rejection("rejection_greedy_sample", "_rejection_greedy_sample", "rejection_greedy_sample"),
    _rejection("rejection_random_sample", "_rejection_random_sample", "rejection_random_sample"),
    _rejection("expand", "_expand", "expand_to_tokens"),
    _rejection("sample_recovered_tokens", "_sample_recovered_tokens", "sample_recovered_tokens"),
    _kernel("worker.mamba_utils:batch_memcpy_kernel", "_batch_memcpy"),  # copies bytes and needs no operator
)


def check(hook: Hook) -> None:
    """Raises BindingError if vLLM no longer has the extension point, or the replacement does not fit it."""
    if hook.kind == RUNNER_KERNEL:
        from vllm_backplane.runner import kernel_adapters

        kernel_adapters.launcher(hook.upstream.replace(":", "."), load(hook.replacement))
        return
    upstream, replacement = load(hook.upstream), load(hook.replacement)
    if hook.kind == IR_OPERATOR:
        from vllm_backplane.binding import ir

        ir.register()
        if ir.PROVIDER not in upstream.impls:
            raise BindingError(f"{hook.upstream} has no implementation by {hook.replacement}. {INSTALL_SUPPORTED}")
    elif not issubclass(replacement, upstream):
        raise BindingError(f"{hook.replacement} is not a subclass of {hook.upstream}. {INSTALL_SUPPORTED}")


def callers() -> dict[str, tuple[tuple[str, str], ...]]:
    """Returns the callers of each operator as pairs (kind, layer): layers first, then hooks."""
    found: dict[str, tuple[tuple[str, str], ...]] = {}
    for kind, layer, operators in [
        *(("layer", binding.layer, binding.operators) for binding in BINDINGS),
        *((hook.kind, hook.layer, hook.operators) for hook in HOOKS),
        ("worker", "NumericGuard", ("tally_values",)),  # called by the worker itself; replaces nothing in vLLM
    ]:
        for operator in operators:
            found[operator] = (*found.get(operator, ()), (kind, layer))
    return found
