"""The stages of `BackplanePlatform.check_and_update_config` that fit vLLM's configuration to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_backplane.config import graphs, refusals, scheduling
from vllm_backplane.errors import BackplaneError
from vllm_backplane.kv_offload import settings as kv_offload
from vllm_backplane.runtime import Runtime
from vllm_backplane.settings.carried_state import state_of
from vllm_backplane.weights import load_formats, missing_weights

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm." + __name__)

WORKER = "vllm_backplane.worker.worker.BackplaneWorker"


def apply(config: VllmConfig, chosen: Runtime) -> None:
    """Runs the stages in order. Options are settled and valid before; a stage raises for what it cannot fulfil."""
    refusals.refuse_unsupported(config, chosen)
    set_worker(config)
    graphs.set_compilation(config, chosen)
    scheduling.settle(config, chosen.device)
    scheduling.choose_scheduler(config)
    set_states(config)
    set_memory(config, chosen)
    set_loading(config)
    missing_weights.track_loaded_weights(config)
    set_kv_offload(config)


def set_worker(config: VllmConfig) -> None:
    state = state_of(config)
    if state.workers_on_host is None:
        state.workers_on_host = refusals.workers_of_all_replicas(config)
    if config.parallel_config.worker_cls == "auto":
        config.parallel_config.worker_cls = WORKER


def set_states(config: VllmConfig) -> None:
    """One state per sequence. vLLM switches prefix caching on for hybrids, unasked, with copies of the state at each
    block's end, which its kernels make by addresses. Unasked it is off, and the log says so; asked for, refused."""
    cache, model = config.cache_config, config.model_config
    if refusals.carries_states(config) and cache.enable_prefix_caching:
        explicit = state_of(config).explicit_arguments.get("enable_prefix_caching")
        unasked = model.is_prefix_caching_supported and not explicit
        if not unasked or cache.mamba_cache_mode == "all":
            raise BackplaneError(
                f"prefix caching was asked for, and {', '.join(model.architectures)} carries a state from token to "
                "token, of which no copies are kept for prefixes; remove --enable-prefix-caching and --mamba-cache-mode"
            )
        cache.enable_prefix_caching = False
        cache.mamba_cache_mode = "none"
        cache.mamba_block_size = model.max_model_len
        logger.warning_once(
            "Prefix caching is off: %s carries a state from token to token, of which no copies are kept for prefixes.",
            ", ".join(model.architectures),
        )


def set_memory(config: VllmConfig, chosen: Runtime) -> None:
    """Settle which share of the free memory may be used, so that every worker reads one number."""
    cache = config.cache_config
    share = chosen.setting("memory_share")
    stated, default = cache.gpu_memory_utilization, type(cache)().gpu_memory_utilization
    if share is not None:
        if stated not in (default, share):
            raise BackplaneError(
                f"option memory_share says {share} and --gpu-memory-utilization says {stated}: remove one"
            )
        cache.gpu_memory_utilization = share
    elif stated == default:
        # vLLM's own default was made for memory that belongs to the accelerator alone.
        cache.gpu_memory_utilization = chosen.device.capabilities.default_memory_share


def set_loading(config: VllmConfig) -> None:
    """A folder that stands for a GGUF file (`gguf/folder.py`) is loaded from that file and served under its path."""
    from vllm_backplane.gguf.configuration import QUANTIZATION

    model, loading = config.model_config, config.load_config
    if model is None or model.quantization != QUANTIZATION:
        return
    from vllm_backplane.quantization.gguf import config as methods
    from vllm_backplane.quantization.gguf import loader

    methods.register()  # raises if another plugin has taken the name since
    loader.register()
    own = {"auto": QUANTIZATION, load_formats.SHARED: load_formats.SHARED_GGUF}
    loading.load_format = own.get(loading.load_format, loading.load_format)
    if loading.load_format not in own.values():
        raise BackplaneError(
            f"--load-format {loading.load_format} was asked for, and the weights are in a GGUF file; remove the option"
        )
    if model.served_model_name == model.model:
        model.served_model_name = str(model.hf_config.quantization_config["file"])


def set_kv_offload(config: VllmConfig) -> None:
    """A block of the second tier that cannot be had is computed. vLLM's default is to fail the request, and does not
    tell itself from what a user said, so it is not left a choice."""
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector == kv_offload.NAME:
        kv_offload.parse(transfer.kv_connector_extra_config)  # what is wrong with it is said before engines start
        transfer.kv_load_failure_policy = "recompute"
