"""Refuses, before an engine starts, what the device or Backplane does not support; each error names the remedy."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from vllm_backplane.device import Device
from vllm_backplane.errors import BackplaneError
from vllm_backplane.runtime import Runtime
from vllm_backplane.weights import load_formats

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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
    device.refuse_workers(workers_of_all_replicas(config))
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


def workers_of_all_replicas(config: VllmConfig) -> int:
    parallel = config.parallel_config
    return parallel.local_world_size * max(parallel.data_parallel_size_local, 1)


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
    if config.load_config.load_format not in load_formats.ALL_SHARED:
        return
    if not device.capabilities.host_memory:
        raise BackplaneError(
            f"--load-format {load_formats.SHARED} has workers share the host's memory, and on device {device.name!r} "
            "each has its weights in the memory of its own card; remove the option"
        )
    if not hasattr(os, "memfd_create"):
        raise BackplaneError(f"--load-format {load_formats.SHARED} needs Linux's memfd; remove the option")
    if config.model_config is not None and config.model_config.enable_sleep_mode:
        raise BackplaneError(
            f"--enable-sleep-mode is to give memory back, and what --load-format {load_formats.SHARED} shares other "
            "workers may still use; remove one of the two"
        )


def refuse_unfetchable(config: VllmConfig, chosen: Runtime) -> None:
    """Weights that a running server is to offer, or that are to come from one, and cannot."""
    loading, model, offers = config.load_config, config.model_config, chosen.setting("weights_listen") is not None
    if loading.load_format == load_formats.PEER:
        load_formats.parse(loading.model_loader_extra_config)
    elif not offers:
        return
    option = "weights_listen" if offers else f"--load-format {load_formats.PEER}"
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
    from vllm_backplane.quantization.online.formats import ONLINE

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
