"""Runs the stages of `BackplanePlatform.check_and_update_config`, which adapt vLLM's configuration to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_backplane.config import chat_template, graphs, refusals, scheduling
from vllm_backplane.errors import BackplaneError
from vllm_backplane.kv_offload import settings as kv_offload
from vllm_backplane.metrics import entry_point, folder
from vllm_backplane.runtime import Runtime
from vllm_backplane.settings.carried_state import state_of
from vllm_backplane.weights import load_formats, missing_weights

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm." + __name__)

WORKER = "vllm_backplane.worker.worker.BackplaneWorker"


def apply(config: VllmConfig, chosen: Runtime) -> None:
    """Runs the stages in order. Backplane's options are already validated; a stage raises for what it cannot fulfil."""
    refusals.refuse_unsupported(config, chosen)
    chat_template.require_bounded_template(config)
    set_worker(config)
    set_metrics(config, chosen)
    graphs.check_compilation(config, chosen)
    scheduling.set_async_scheduling(config, chosen.device)
    scheduling.choose_scheduler(config)
    set_prefix_caching(config)
    set_memory(config, chosen)
    set_loading(config)
    missing_weights.track_loaded_weights(config)
    set_kv_offload(config)


def set_worker(config: VllmConfig) -> None:
    """Selects Backplane's worker class, and records how many workers share this host."""
    state = state_of(config)
    if state.workers_on_host is None:
        state.workers_on_host = refusals.workers_of_all_replicas(config)
    if config.parallel_config.worker_cls == "auto":
        config.parallel_config.worker_cls = WORKER


def set_metrics(config: VllmConfig, chosen: Runtime) -> None:
    """Offers the stat logger to vLLM, and prepares the folder of its values, unless statistics are off.

    vLLM keeps --disable-log-stats outside of its configuration, so it is read from the explicit arguments.
    """
    state = state_of(config)
    is_wanted = chosen.setting("metrics") and state.explicit_arguments.get("disable_log_stats") is False
    if is_wanted and state.metrics_folder is None:
        # Each of several API servers makes a configuration of its own; their parent has made that of the engines.
        rank = folder.rank_of_api_server(config.parallel_config)
        is_child = rank is not None and rank >= 0
        try:
            state.metrics_folder = folder.all_of_parent() if is_child else folder.create()
        except BackplaneError as fault:
            logger.error("/metrics has no metrics of Backplane: %s", fault)
            is_wanted = False
    entry_point.offer(is_wanted)


def set_prefix_caching(config: VllmConfig) -> None:
    """Turns prefix caching off for models with a recurrent state, or raises if the user requested it.

    Backplane keeps one state per sequence. vLLM turns prefix caching on for hybrid models by default, with a copy of
    the state at the end of each block; its kernels make these copies through raw addresses.
    """
    cache, model = config.cache_config, config.model_config
    if refusals.has_recurrent_state(config) and cache.enable_prefix_caching:
        explicit = state_of(config).explicit_arguments.get("enable_prefix_caching")
        is_default = model.is_prefix_caching_supported and not explicit
        if not is_default or cache.mamba_cache_mode == "all":
            raise BackplaneError(
                f"prefix caching is not supported: {', '.join(model.architectures)} carries a recurrent state, and no "
                "copies of it are kept for prefixes; remove --enable-prefix-caching and --mamba-cache-mode"
            )
        cache.enable_prefix_caching = False
        cache.mamba_cache_mode = "none"
        cache.mamba_block_size = model.max_model_len
        logger.warning_once(
            "Prefix caching is off: %s carries a recurrent state, and no copies of it are kept for prefixes.",
            ", ".join(model.architectures),
        )


def set_memory(config: VllmConfig, chosen: Runtime) -> None:
    """Sets the share of the free memory that may be used in `gpu_memory_utilization`, which every worker reads."""
    cache = config.cache_config
    share = chosen.setting("memory_share")
    given, default = cache.gpu_memory_utilization, type(cache)().gpu_memory_utilization
    if share is not None:
        if given not in (default, share):
            raise BackplaneError(f"option memory_share is {share} and --gpu-memory-utilization is {given}; remove one")
        cache.gpu_memory_utilization = share
    elif given == default:
        # vLLM's default is meant for memory that only the accelerator uses.
        cache.gpu_memory_utilization = chosen.device.capabilities.default_memory_share


def set_loading(config: VllmConfig) -> None:
    """Selects the load format `gguf` for a model whose folder describes a GGUF file, and names the served model after
    the file. `gguf/config_folder.py` makes such folders."""
    from vllm_backplane.gguf.hf_config import QUANTIZATION

    model, loading = config.model_config, config.load_config
    if model is None or model.quantization != QUANTIZATION:
        return
    from vllm_backplane.quantization.gguf import registration

    registration.register()
    own = {"auto": QUANTIZATION, load_formats.SHARED: load_formats.SHARED_GGUF}
    loading.load_format = own.get(loading.load_format, loading.load_format)
    if loading.load_format not in own.values():
        raise BackplaneError(
            f"--load-format {loading.load_format} cannot load weights from a GGUF file; remove the option"
        )
    if model.served_model_name == model.model:
        model.served_model_name = str(model.hf_config.quantization_config["file"])


def set_kv_offload(config: VllmConfig) -> None:
    """Makes vLLM recompute KV blocks that the KV connector cannot load. vLLM's default fails the request, and cannot be
    distinguished from an explicit value of the user, so the policy is always set."""
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector == kv_offload.NAME:
        kv_offload.parse(transfer.kv_connector_extra_config)  # raises before engines start
        transfer.kv_load_failure_policy = "recompute"
