"""The stages of `BackplanePlatform.check_and_update_config`. Each takes vLLM's configuration and the device."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_backplane.device import Device
from vllm_backplane.errors import BackplaneError
from vllm_backplane.kv_tier import settings as kv_tier
from vllm_backplane.model_loader import formats, peer_settings
from vllm_backplane.runtime import Runtime
from vllm_backplane.stated_options import stated

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm." + __name__)

WORKER = "vllm_backplane.worker.worker.BackplaneWorker"


def looks_at_modules(chosen: Runtime) -> bool:
    return bool({"layers", "modules"} & set(chosen.setting("numeric_guard")))


def refuse_unsupported(config: VllmConfig, chosen: Runtime) -> None:
    device, can = chosen.device, chosen.device.capabilities
    if config.parallel_config.enable_dbo:
        raise BackplaneError("dual-batch overlap needs two hardware queues per card; remove --enable-dbo")
    if config.parallel_config.enable_eplb:
        raise BackplaneError("experts stay where they were loaded; remove --enable-eplb")
    if config.use_v2_model_runner and not can.triton:
        raise BackplaneError(
            f"vLLM chose its second model runner, which needs Triton, and device {device.name!r} has none; set "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if carries_states(config):
        refuse_unsupported_states(config)
    speculative = config.speculative_config
    if speculative is not None and speculative.method == "ngram" and find_spec("numba") is None:
        raise BackplaneError("vLLM's n-gram speculation needs the package numba; run: pip install numba")
    cards = chosen.selection.probe.count
    wanted = config.parallel_config.local_world_size
    if wanted > cards and not can.host_memory:
        raise BackplaneError(
            f"{wanted} workers were asked for on this host (tensor x pipeline parallel), and device "
            f"{device.name!r} has {cards} card(s); lower --tensor-parallel-size or --pipeline-parallel-size"
        )
    device.refuse_workers(_workers_of_all_replicas(config))
    kv_dtype = config.cache_config.cache_dtype
    if kv_dtype not in can.kv_cache_dtypes:
        raise BackplaneError(
            f"device {device.name!r} cannot store the KV cache as {kv_dtype!r}; choose --kv-cache-dtype among: "
            + ", ".join(can.kv_cache_dtypes)
        )
    refuse_unshareable(config, device)
    refuse_unfetchable(config, chosen)
    refuse_idle_group(config, chosen)
    refuse_adapted_experts(config)


def carries_states(config: VllmConfig) -> bool:
    """Whether the model has layers with a state that goes from token to token: Mamba and its kin."""
    model = config.model_config
    return model is not None and (model.is_hybrid or model.has_inner_state)


def refuse_unsupported_states(config: VllmConfig) -> None:
    """What vLLM's own layers do with such a state and ours do not. Kinds of layers that are not ours are refused when
    they have been made (`layers/mamba.py`)."""
    model = ", ".join(config.model_config.architectures)
    if config.speculative_config is not None:
        raise BackplaneError(
            f"{model} carries a state from token to token, which cannot be taken back here when a guess is rejected; "
            "remove --speculative-config"
        )
    if getattr(config.cache_config, "use_replayssm", False):
        raise BackplaneError("states are kept whole here, not replayed; remove --use-replayssm")


def refuse_unshareable(config: VllmConfig, device: Device) -> None:
    """Weights that workers are to have in memory once, and cannot."""
    if config.load_config.load_format not in formats.ALL_SHARED:
        return
    if not device.capabilities.host_memory:
        raise BackplaneError(
            f"--load-format {formats.SHARED} has workers share the host's memory, and on device {device.name!r} each "
            "has its weights in the memory of its own card; remove the option"
        )
    if not hasattr(os, "memfd_create"):
        raise BackplaneError(f"--load-format {formats.SHARED} needs Linux's memfd; remove the option")
    if config.model_config is not None and config.model_config.enable_sleep_mode:
        raise BackplaneError(
            f"--enable-sleep-mode is to give memory back, and what --load-format {formats.SHARED} shares other workers "
            "may still use; remove one of the two"
        )


def refuse_unfetchable(config: VllmConfig, chosen: Runtime) -> None:
    """Weights that a running server is to offer, or that are to come from one, and cannot."""
    loading, model, offers = config.load_config, config.model_config, chosen.setting("weights_listen") is not None
    if loading.load_format == formats.PEER:
        peer_settings.parse(loading.model_loader_extra_config)
    elif not offers:
        return
    option = "weights_listen" if offers else f"--load-format {formats.PEER}"
    if model is not None and model.quantization is not None:
        raise BackplaneError(
            f"{option} is for weights as checkpoints have them, not for quantized ones ({model.quantization}), whose "
            "layout depends on what they are; remove it"
        )
    if offers and config.lora_config is not None:
        raise BackplaneError("weights_listen offers a model without adapters; remove it, or --enable-lora")
    if offers and config.parallel_config.data_parallel_size > 1:
        raise BackplaneError("weights_listen is for one replica; remove it, or --data-parallel-size")
    if offers and model is not None and model.enable_sleep_mode:
        raise BackplaneError("weights_listen offers weights at any time; remove it, or --enable-sleep-mode")


def refuse_idle_group(config: VllmConfig, chosen: Runtime) -> None:
    """A group size is of use where weights are quantized at loading. vLLM makes a configuration for a draft model too,
    which need not be quantized for that."""
    from vllm_backplane.layers.quantization.formats import ONLINE

    group, drafting = chosen.settings[""]["quantization_group"], config.speculative_config
    models = [config.model_config, drafting.target_model_config if drafting is not None else None]
    given = [model.quantization for model in models if model is not None]
    if group.value is not None and given and not set(given) & set(ONLINE):
        raise BackplaneError(
            f"quantization_group is {group.value} ({group.source}), and nothing is quantized at loading; add "
            f"--quantization {' or '.join(ONLINE)}, or remove it"
        )


_EXPERTS = {"experts", "routed_experts"}
"""What vLLM's releases call the layer that has them."""


def refuse_adapted_experts(config: VllmConfig) -> None:
    """vLLM would have adapters for all layers, and its own for experts are in kernels that are not there."""
    adapted, model = config.lora_config, config.model_config
    if adapted is None or model is None or not model.is_moe:
        return
    if adapted.target_modules is None or any(_EXPERTS & set(name.split(".")) for name in adapted.target_modules):
        raise BackplaneError(
            f"the experts of {', '.join(model.architectures)} take no LoRA adapters here; name the layers that do, as "
            "with --lora-target-modules q_proj k_proj v_proj o_proj, or remove --enable-lora"
        )


_WORKERS_ON_HOST = "backplane_workers_on_host"
_GRAPHS_UNASKED = "backplane_graphs_unasked"


def workers_on_host(config: VllmConfig) -> int:
    """How many workers share this host, all data-parallel replicas counted."""
    recorded = config.additional_config.get(_WORKERS_ON_HOST) if isinstance(config.additional_config, dict) else None
    return int(recorded or config.parallel_config.local_world_size)


def _workers_of_all_replicas(config: VllmConfig) -> int:
    parallel = config.parallel_config
    return parallel.local_world_size * max(parallel.data_parallel_size_local, 1)


def set_worker(config: VllmConfig) -> None:
    if isinstance(config.additional_config, dict):
        # vLLM makes each replica of a dense model forget the others before its workers start.
        config.additional_config.setdefault(_WORKERS_ON_HOST, _workers_of_all_replicas(config))
    if config.parallel_config.worker_cls == "auto":
        config.parallel_config.worker_cls = WORKER


REPLAYED_SPECULATION = frozenset({"ngram", "suffix", "draft_model", "eagle3", "mtp"})
"""Ways to speculate whose verification steps tests replay."""


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
        and (config.kv_transfer_config is None or config.kv_transfer_config.kv_connector == kv_tier.NAME)
        and not looks_at_modules(chosen)
        and not config.use_v2_model_runner
    )


def set_compilation_defaults(config: VllmConfig, chosen: Runtime) -> None:
    """What the user has not said. What was said and cannot be done is refused later (`set_compilation`)."""
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation, can = config.compilation_config, chosen.device.capabilities
    if compilation.mode is None:
        compilation.mode = CompilationMode.NONE
    if compilation.cudagraph_mode is None:
        # Workers are told through this dictionary; vLLM takes other objects in its place.
        told = config.additional_config if isinstance(config.additional_config, dict) else None
        if told is not None and can.graphs and chosen.device.wants_graphs() and graphs_fit(config, chosen):
            compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
            told[_GRAPHS_UNASKED] = True
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
        if looks_at_modules(chosen):
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
    told = config.additional_config
    if not (isinstance(told, dict) and told.get(_GRAPHS_UNASKED)):
        raise BackplaneError(
            f"graphs were asked for, and {reason}; remove -cc.cudagraph_mode, or reference_ops where that names them"
        )
    logger.warning("Decode steps run eagerly, which is slower: %s.", reason)
    _run_eagerly(config)
    return False


def set_states(config: VllmConfig) -> None:
    """One state per sequence. vLLM switches prefix caching on for hybrids, unasked, with copies of the state at each
    block's end, which its kernels make by addresses. Unasked it is off, and the log says so; asked for, refused."""
    cache, model = config.cache_config, config.model_config
    if carries_states(config) and cache.enable_prefix_caching:
        unasked = model.is_prefix_caching_supported and not stated(config.additional_config, "enable_prefix_caching")
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
    from vllm_backplane.layers.gguf import config as methods
    from vllm_backplane.model_loader import gguf as loader

    methods.register()  # raises if another plugin has taken the name since
    loader.register()
    own = {"auto": QUANTIZATION, formats.SHARED: formats.SHARED_GGUF}
    loading.load_format = own.get(loading.load_format, loading.load_format)
    if loading.load_format not in own.values():
        raise BackplaneError(
            f"--load-format {loading.load_format} was asked for, and the weights are in a GGUF file; remove the option"
        )
    if model.served_model_name == model.model:
        model.served_model_name = str(model.hf_config.quantization_config["file"])


def set_kv_tier(config: VllmConfig) -> None:
    """A block of the second tier that cannot be had is computed. vLLM's default is to fail the request, and does not
    tell itself from what a user said, so it is not left a choice."""
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector == kv_tier.NAME:
        kv_tier.parse(transfer.kv_connector_extra_config)  # what is wrong with it is said before engines start
        transfer.kv_load_failure_policy = "recompute"
