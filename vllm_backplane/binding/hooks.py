"""Where vLLM reaches operators without one of its layers being replaced.

`binding.py` lists the layers. The rest of the device's work comes in through other extension points: the attention
backend, IR operators, the model runner's kernels, the sampler, the LoRA wrapper. They are listed here, so that each
operator can be followed to what calls it (`vllm-backplane ops`), and checked like the layers are.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_backplane.binding.registry import BINDINGS, load
from vllm_backplane.errors import BindingError

IR_OPERATOR = "IR operator"
RUNNER_KERNEL = "runner kernel"


@dataclass(frozen=True, slots=True)
class Hook:
    """An extension point of vLLM, what of ours stands there, and the operators that it calls."""

    kind: str
    upstream: str
    """module:name of vLLM: a class, a kernel or an IR operator."""
    replacement: str
    """module:name of ours."""
    operators: tuple[str, ...]

    @property
    def layer(self) -> str:
        return self.upstream.partition(":")[2].removesuffix(".kernel")


_OURS = "vllm_backplane.layers"


def _ir(name: str) -> Hook:
    return Hook(IR_OPERATOR, f"vllm.ir.ops:{name}", f"{_OURS}.ir:{name}", (name,))


def _kernel(upstream: str, adapter: str, *operators: str) -> Hook:
    return Hook(RUNNER_KERNEL, f"vllm.v1.{upstream}", f"{_OURS}.runner_kernels:{adapter}", operators)


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
        "vllm_backplane.attention.mla:BackplaneLatentImpl",
        ("kv_cache_write", "paged_attention"),
    ),
    Hook(
        "sampler",
        "vllm.v1.sample.sampler:Sampler",
        f"{_OURS}.sampler:BackplaneSampler",
        ("greedy_argmax", "apply_penalties"),
    ),
    Hook(
        "sampler",
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler",
        f"{_OURS}.sampler:BackplaneTopKTopPSampler",
        ("top_k_top_p_mask", "sample_by_race"),
    ),
    Hook(
        "logits processor",
        "vllm.v1.sample.logits_processor.builtin:MinPLogitsProcessor",
        f"{_OURS}.sampler:BackplaneMinPLogitsProcessor",
        ("min_p_mask",),
    ),
    Hook(
        "LoRA wrapper",
        "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase",
        f"{_OURS}.lora:BackplanePunicaWrapper",
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
        f"{_OURS}.quantization.linear:QuantizedLinearMethod",
        ("quantized_linear", "linear"),
    ),
    Hook(
        "quantization method",
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        f"{_OURS}.quantization.experts:QuantizedMoEMethod",
        ("quantized_linear", "silu_and_mul"),
    ),
    Hook(
        "quantization method",
        "vllm.model_executor.layers.linear:LinearMethodBase",
        f"{_OURS}.gguf.linear:GgufLinearMethod",
        ("quantized_linear", "linear"),
    ),
    Hook(
        "quantization method",
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        f"{_OURS}.gguf.experts:GgufMoEMethod",
        ("silu_and_mul",),
    ),
    Hook(
        "quantization method",
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        f"{_OURS}.schemes.experts:SchemeMoEMethod",
        ("quantized_linear", "silu_and_mul"),
    ),
    Hook(
        "linear kernel",
        "vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel:MPLinearKernel",
        f"{_OURS}.schemes.kernel:BackplaneMixedPrecisionKernel",
        ("quantized_linear",),
    ),
    Hook(
        "linear kernel",
        "vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel:Int8ScaledMMLinearKernel",
        f"{_OURS}.schemes.int8:BackplaneInt8Kernel",
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
    _kernel("worker.mamba_utils:batch_memcpy_kernel", "_batch_memcpy"),  # copies bytes; nothing to compute
)


def check(hook: Hook) -> None:
    """Raise BindingError if vLLM no longer has what the hook stands on, or ours no longer fits it."""
    if hook.kind == RUNNER_KERNEL:
        from vllm_backplane.runner import triton_kernels

        triton_kernels.launcher(hook.upstream.replace(":", "."), load(hook.replacement))
        return
    upstream, replacement = load(hook.upstream), load(hook.replacement)
    if hook.kind == IR_OPERATOR:
        from vllm_backplane.binding import ir

        ir.register()
        if ir.PROVIDER not in upstream.impls:
            raise BindingError(f"{hook.upstream} has no implementation by {hook.replacement}")
    elif not issubclass(replacement, upstream):
        raise BindingError(f"{hook.replacement} is not a subclass of {hook.upstream}")


def callers() -> dict[str, tuple[tuple[str, str], ...]]:
    """(kind, layer) of everything that calls an operator, by operator: layers first, then hooks."""
    found: dict[str, tuple[tuple[str, str], ...]] = {}
    for kind, layer, operators in [
        *(("layer", binding.layer, binding.operators) for binding in BINDINGS),
        *((hook.kind, hook.layer, hook.operators) for hook in HOOKS),
        ("worker", "NumericGuard", ("tally_values",)),  # replaces nothing of vLLM: it looks on
    ]:
        for operator in operators:
            found[operator] = (*found.get(operator, ()), (kind, layer))
    return found
