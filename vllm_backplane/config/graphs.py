"""Decides whether models are compiled, and whether decode steps are captured and replayed as graphs of the device."""

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
"""Speculative methods whose verification steps are replayed in tests."""


def decode_query_len(config: VllmConfig) -> int:
    """Returns the tokens of one sequence in a decode step: one, and with speculation all draft tokens as well."""
    speculative = config.speculative_config
    return 1 if speculative is None else 1 + (speculative.num_speculative_tokens or 0)


def largest_graph(config: VllmConfig, chosen: Runtime) -> int:
    """Returns the tokens of the largest captured step, from the user's option or else from the device.

    It is never larger than the largest step that vLLM schedules.
    """
    largest = config.compilation_config.max_cudagraph_capture_size or max(
        chosen.device.capabilities.graph_sizes, default=1
    )
    return min(largest, config.scheduler_config.max_num_batched_tokens)


def obstacle(config: VllmConfig, chosen: Runtime) -> tuple[str, str] | None:
    """Returns why decode steps cannot be captured and what else the user can do, or None if they can be captured.

    They can if the model has decode steps, and no Python code has to run between their operators.
    """
    model, parallel = config.model_config, config.parallel_config
    speculative, transfer = config.speculative_config, config.kv_transfer_config
    if model is not None and model.runner_type == "pooling":
        return "a pooling model has no decode steps", ""
    if model is not None and model.is_encoder_decoder:
        return "the steps of an encoder-decoder model also run its encoder", ""
    if parallel.world_size > 1:  # vLLM captures collectives only with the communicators of CUDA and XPU
        return f"graphs on device {chosen.device.name!r} cannot contain the collectives of several workers", (
            "remove the parallel sizes"
        )
    if parallel.world_size_across_dp > 1:
        return "replicas decide together in every step how it is executed", "remove --data-parallel-size"
    if config.lora_config is not None:
        return "a graph cannot contain the adapters of a batch", "remove --enable-lora"
    if speculative is not None and speculative.method not in REPLAYED_SPECULATION:
        return (
            f"no test replays the steps of the speculative method {speculative.method!r}",
            "remove --speculative-config",
        )
    if transfer is not None and transfer.kv_connector != kv_offload.NAME:
        return f"the KV connector {transfer.kv_connector!r} runs code in every layer", "remove --kv-transfer-config"
    if chosen.guard_checks_modules:
        return "numeric_guard checks modules when Python calls them, and a replayed graph does not call them", (
            "use numeric_guard=copies"
        )
    if config.use_v2_model_runner:
        return "vLLM's V2 model runner captures graphs on CUDA only", "set VLLM_USE_V2_MODEL_RUNNER=0"
    return None


def supports_default_graphs(config: VllmConfig, chosen: Runtime) -> bool:
    """Returns whether decode steps are captured without an option of the user."""
    model = config.model_config
    return (
        model is not None
        and not model.enforce_eager
        and model.runner_type == "generate"
        and decode_query_len(config) <= largest_graph(config, chosen)
        and obstacle(config, chosen) is None
    )


def set_compilation_defaults(config: VllmConfig, chosen: Runtime) -> None:
    """Sets the compilation options that the user left open, before vLLM fills in its defaults.

    Raises for graph options that the device cannot fulfil; `check_compilation` refuses the remaining combinations.
    """
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation, can = config.compilation_config, chosen.device.capabilities
    if compilation.mode is None:
        compilation.mode = CompilationMode.NONE
    if compilation.cudagraph_mode is None:
        if can.graphs and chosen.device.wants_graphs() and supports_default_graphs(config, chosen):
            compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
            state_of(config).graphs_by_default = True
        else:
            compilation.cudagraph_mode = CUDAGraphMode.NONE
    if compilation.cudagraph_mode != CUDAGraphMode.NONE:
        if not can.graphs:
            raise BackplaneError(f"device {chosen.device.name!r} does not support graphs; remove -cc.cudagraph_mode")
        if compilation.cudagraph_mode != CUDAGraphMode.FULL_DECODE_ONLY:
            raise BackplaneError(
                f"cudagraph_mode {compilation.cudagraph_mode.name} is not supported, because only decode steps are "
                "captured; use -cc.cudagraph_mode=full_decode_only"
            )
        if compilation.cudagraph_capture_sizes is None and can.graph_sizes:
            each, sequences = decode_query_len(config), config.scheduler_config.max_num_seqs
            largest = largest_graph(config, chosen)
            if each > largest:
                raise BackplaneError(
                    f"a decode step with {each - 1} speculative tokens has {each} tokens per sequence, and device "
                    f"{chosen.device.name!r} captures steps of at most {largest} tokens; lower num_speculative_tokens, "
                    "raise --max-num-batched-tokens if it is lower, or remove -cc.cudagraph_mode"
                )
            compilation.cudagraph_capture_sizes = [
                count * each for count in can.graph_sizes if count <= sequences and count * each <= largest
            ]
            # vLLM requires that both options agree, and sets the largest size itself for some models.
            compilation.max_cudagraph_capture_size = max(compilation.cudagraph_capture_sizes, default=0)


def check_compilation(config: VllmConfig, chosen: Runtime) -> None:
    """Raises if the user requests compilation, or graphs in a combination that is not supported.

    Models run eagerly, because inductor would need a code generator for the device and minutes to start. Without graphs
    of decode steps, the options by which vLLM would capture them are cleared.
    """
    from vllm.config import CompilationMode, CUDAGraphMode

    device, compilation = chosen.device, config.compilation_config
    if compilation.mode != CompilationMode.NONE:
        raise BackplaneError(
            f"compilation mode {compilation.mode} is not supported: device {device.name!r} runs models eagerly; remove "
            "the option, or use -cc.mode=none"
        )
    config.kernel_config.enable_jit_warmup = False  # nothing is compiled at run time
    if device.capabilities.graphs and compilation.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY:
        if (found := obstacle(config, chosen)) is not None:
            reason, remedy = found
            raise BackplaneError(f"{reason}; remove -cc.cudagraph_mode{', or ' + remedy if remedy else ''}")
        return
    _run_eagerly(config)


def _run_eagerly(config: VllmConfig) -> None:
    from vllm.config import CUDAGraphMode

    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    config.compilation_config.cudagraph_capture_sizes = []
    if config.model_config is not None:
        # vLLM captures graphs after warm-up unless the model is eager.
        config.model_config.enforce_eager = True


def finalize_graphs(config: VllmConfig, device: Device, uncapturable: list[str]) -> bool:
    """Returns whether decode steps of the loaded model are captured. `uncapturable` names what no graph can contain.

    Raises if the user requested graphs of such a model. Where graphs are only the device's default, logs the reason and
    turns them off.
    """
    if not uncapturable:
        return True
    names = ", ".join(uncapturable)
    reason = f"{names} on device {device.name!r} read tensor values on the host, which a graph cannot capture"
    if not state_of(config).graphs_by_default:
        raise BackplaneError(
            f"{reason}; remove -cc.cudagraph_mode, or take these operators out of reference_ops if it names them"
        )
    logger.warning("Decode steps run eagerly, which is slower: %s.", reason)
    _run_eagerly(config)
    return False
