"""Decides whether models are compiled and whether decode steps are captured and replayed as graphs of the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_backplane.device import Device
from vllm_backplane.errors import BackplaneError
from vllm_backplane.kv_offload import settings as kv_offload
from vllm_backplane.runtime import Runtime
from vllm_backplane.settings.carried_state import state_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm." + __name__)

REPLAYED_SPECULATION = frozenset({"ngram", "suffix", "draft_model", "eagle3", "mtp"})
"""Ways to speculate whose verification steps tests replay."""


def guard_checks_modules(chosen: Runtime) -> bool:
    return bool({"layers", "modules"} & set(chosen.setting("numeric_guard")))


def decoded_at_once(config: VllmConfig) -> int:
    """Tokens that a sequence has in a step that is replayed: one, and with speculation all drafts beside it."""
    drafting = config.speculative_config
    return 1 if drafting is None else 1 + (drafting.num_speculative_tokens or 0)


def largest_graph(config: VllmConfig, chosen: Runtime) -> int:
    """Tokens of the largest step that is replayed: what the user says, or the device."""
    return config.compilation_config.max_cudagraph_capture_size or max(
        chosen.device.capabilities.graph_sizes, default=1
    )


def graphs_fit(config: VllmConfig, chosen: Runtime) -> bool:
    """Whether decode steps may be replayed although nobody asked for it: there are such steps, and nothing has to
    happen in Python between a step's operators."""
    model, parallel = config.model_config, config.parallel_config
    return (
        model is not None
        and not model.enforce_eager
        and model.runner_type == "generate"
        and not model.is_encoder_decoder
        and parallel.world_size_across_dp == 1
        and config.lora_config is None
        and (config.speculative_config is None or config.speculative_config.method in REPLAYED_SPECULATION)
        and decoded_at_once(config) <= largest_graph(config, chosen)
        and (config.kv_transfer_config is None or config.kv_transfer_config.kv_connector == kv_offload.NAME)
        and not guard_checks_modules(chosen)
        and not config.use_v2_model_runner
    )


def set_compilation_defaults(config: VllmConfig, chosen: Runtime) -> None:
    """What the user has not said. What was said and cannot be done is refused later (`set_compilation`)."""
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation, can = config.compilation_config, chosen.device.capabilities
    if compilation.mode is None:
        compilation.mode = CompilationMode.NONE
    if compilation.cudagraph_mode is None:
        if can.graphs and chosen.device.wants_graphs() and graphs_fit(config, chosen):
            compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
            state_of(config).graphs_by_default = True
        else:
            compilation.cudagraph_mode = CUDAGraphMode.NONE
    if compilation.cudagraph_mode != CUDAGraphMode.NONE:
        if not can.graphs:
            raise BackplaneError(
                f"graphs were asked for (-cc.cudagraph_mode), and device {chosen.device.name!r} has none; remove it"
            )
        if compilation.cudagraph_mode != CUDAGraphMode.FULL_DECODE_ONLY:
            raise BackplaneError(
                f"cudagraph_mode {compilation.cudagraph_mode.name} was asked for; decode steps alone are replayed: "
                "use -cc.cudagraph_mode=full_decode_only"
            )
        if compilation.cudagraph_capture_sizes is None and can.graph_sizes:
            each, sequences = decoded_at_once(config), config.scheduler_config.max_num_seqs
            largest = largest_graph(config, chosen)
            if each > largest:
                raise BackplaneError(
                    f"graphs were asked for, with {each - 1} speculative tokens beside each one; device "
                    f"{chosen.device.name!r} replays steps of at most {largest} tokens: lower num_speculative_tokens, "
                    "or remove -cc.cudagraph_mode"
                )
            compilation.cudagraph_capture_sizes = [
                count * each for count in can.graph_sizes if count <= sequences and count * each <= largest
            ]
            # vLLM insists that both agree, and states the largest for some models itself.
            compilation.max_cudagraph_capture_size = max(compilation.cudagraph_capture_sizes, default=0)


def set_compilation(config: VllmConfig, chosen: Runtime) -> None:
    """Models run eagerly: inductor would need a code generator for the device and minutes to start. Decode steps are
    replayed as graphs where the device has them and the user, or the device itself, asks for it."""
    from vllm.config import CompilationMode, CUDAGraphMode

    device, compilation = chosen.device, config.compilation_config
    if compilation.mode != CompilationMode.NONE:
        raise BackplaneError(
            f"compilation mode {compilation.mode} was asked for, and device {device.name!r} runs eagerly; "
            "remove the option, or use -cc.mode=none"
        )
    config.kernel_config.enable_jit_warmup = False  # nothing is compiled at run time
    if device.capabilities.graphs and compilation.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY:
        if config.parallel_config.world_size > 1:  # vLLM begins such a capture for CUDA's and XPU's communicators alone
            raise BackplaneError(
                f"graphs were asked for, and on device {device.name!r} they cannot contain the collectives of several "
                "workers; remove -cc.cudagraph_mode, or the parallel sizes"
            )
        if config.use_v2_model_runner:
            raise BackplaneError(
                "graphs were asked for, and vLLM's second model runner captures those of CUDA alone; remove "
                "-cc.cudagraph_mode, or set VLLM_USE_V2_MODEL_RUNNER=0"
            )
        if guard_checks_modules(chosen):
            raise BackplaneError(
                "numeric_guard looks at modules while Python calls them, and a replayed graph does not call them; "
                "remove -cc.cudagraph_mode, or use numeric_guard=copies"
            )
        return
    _run_eagerly(config)


def _run_eagerly(config: VllmConfig) -> None:
    from vllm.config import CUDAGraphMode

    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    config.compilation_config.cudagraph_capture_sizes = []
    if config.model_config is not None:
        # vLLM captures graphs after warm-up unless the model is eager.
        config.model_config.enforce_eager = True


def settle_graphs(config: VllmConfig, device: Device, unrecordable: list[str]) -> bool:
    """Whether decode steps are to be replayed, once a worker knows what of the loaded model no graph can contain."""
    if not unrecordable:
        return True
    reason = f"{', '.join(unrecordable)} on device {device.name!r} go by what tensors hold, which no graph records"
    if not state_of(config).graphs_by_default:
        raise BackplaneError(
            f"graphs were asked for, and {reason}; remove -cc.cudagraph_mode, or reference_ops where that names them"
        )
    logger.warning("Decode steps run eagerly, which is slower: %s.", reason)
    _run_eagerly(config)
    return False
