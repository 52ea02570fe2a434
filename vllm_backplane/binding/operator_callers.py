"""Lists the callers of Backplane's operators that are no layer classes, so that they can be named and checked.

Nothing is installed here. The list names attention backends, IR operators, the model runner's Triton kernels, the
sampler, the LoRA wrapper and the quantization methods; each is installed by its own module (docs/internals/bindings.md
has the table). `vllm-backplane ops` shows the callers of each operator, and `vllm-backplane doctor` and the tests check
the list against the installed vLLM. Layer classes are in `registry.py`.
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
_REPLACEMENTS = "vllm_backplane.runner.triton_replacements"


def _ir(name: str) -> Hook:
    return Hook(IR_OPERATOR, f"vllm.ir.ops:{name}", f"vllm_backplane.binding.ir:{name}", (name,))


def _kernel(upstream: str, function: str, *operators: str) -> Hook:
    return Hook(RUNNER_KERNEL, f"vllm.v1.{upstream}", f"{_REPLACEMENTS}:{function}", operators)


def _speculation(name: str, function: str) -> Hook:
    return _kernel(f"spec_decode.utils:{name}_kernel", function, name)


def _rejection(name: str, function: str, operator: str) -> Hook:
    return _kernel(f"sample.rejection_sampler:{name}_kernel", function, operator)


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


@dataclass(frozen=True, slots=True)
class OwnCaller:
    """Declares a part of Backplane that calls operators and replaces nothing in vLLM."""

    kind: str
    path: str
    """module:name."""
    operators: tuple[str, ...]


OWN_CALLERS: tuple[OwnCaller, ...] = (
    OwnCaller("worker", "vllm_backplane.worker.numeric_guard:NumericGuard", ("tally_values",)),
    OwnCaller("decode fast path", "vllm_backplane.runner.decode_inputs:DecodeInputs", ("compute_slot_mapping",)),
)


def check(hook: Hook) -> None:
    """Raises BindingError if vLLM no longer has the extension point, or the replacement does not fit it."""
    if hook.kind == RUNNER_KERNEL:
        from vllm_backplane.runner import triton_replacements

        triton_replacements.launcher(hook.upstream.replace(":", "."), load(hook.replacement))
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
    """Returns the callers of each operator as pairs (kind, name): layers first, then hooks, then parts of
    Backplane."""
    found: dict[str, tuple[tuple[str, str], ...]] = {}
    for kind, layer, operators in [
        *(("layer", binding.layer, binding.operators) for binding in BINDINGS),
        *((hook.kind, hook.layer, hook.operators) for hook in HOOKS),
        *((caller.kind, caller.path.partition(":")[2], caller.operators) for caller in OWN_CALLERS),
    ]:
        for operator in operators:
            found[operator] = (*found.get(operator, ()), (kind, layer))
    return found
