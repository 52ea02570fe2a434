"""Raises, before an engine starts, for options that the device or Backplane does not support, and names the remedy."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from vllm_backplane.device import Device
from vllm_backplane.device.triton_features import refuse_features_that_need_triton
from vllm_backplane.errors import BackplaneError
from vllm_backplane.runtime import Runtime
from vllm_backplane.weights import load_formats

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def refuse_unsupported(config: VllmConfig, chosen: Runtime) -> None:
    """Raises a BackplaneError for the first unsupported option."""
    device, can = chosen.device, chosen.device.capabilities
    if config.parallel_config.enable_dbo:
        raise BackplaneError("dual-batch overlap needs two hardware queues per card; remove --enable-dbo")
    if config.parallel_config.enable_eplb:
        raise BackplaneError("expert load balancing is not supported; remove --enable-eplb")
    refuse_features_that_need_triton(config, device)
    if config.use_v2_model_runner and not can.triton:
        raise BackplaneError(
            f"vLLM selected its V2 model runner, which needs Triton, and device {device.name!r} has no Triton; set "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if has_recurrent_state(config):
        refuse_unsupported_states(config)
    speculative = config.speculative_config
    if getattr(speculative, "rejection_sample_method", "") == "fly" and not can.triton:  # since vLLM 0.33
        raise BackplaneError(
            f"lossy acceptance of draft tokens (FLy) needs Triton kernels, and device {device.name!r} has no Triton; "
            "remove 'rejection_sample_method' from --speculative-config, or choose 'standard'"
        )
    if speculative is not None and speculative.method == "ngram" and find_spec("numba") is None:
        raise BackplaneError("vLLM's n-gram speculation needs the package numba; run: pip install numba")
    cards = chosen.selection.probe.count
    wanted = config.parallel_config.local_world_size
    if wanted > cards and not can.host_memory:
        raise BackplaneError(
            f"{wanted} workers were requested on this host (tensor x pipeline parallel), and device "
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
    refuse_unused_group_size(config, chosen)
    refuse_expert_adapters(config)


def workers_of_all_replicas(config: VllmConfig) -> int:
    """Returns the workers of all data-parallel replicas on this host."""
    parallel = config.parallel_config
    return parallel.local_world_size * max(parallel.data_parallel_size_local, 1)


def has_recurrent_state(config: VllmConfig) -> bool:
    """Returns whether layers of the model carry a recurrent state from token to token, as Mamba does."""
    model = config.model_config
    return model is not None and (model.is_hybrid or model.has_inner_state)


def refuse_unsupported_states(config: VllmConfig) -> None:
    """Raises for options that vLLM's own recurrent layers support and Backplane's do not. Recurrent layers without an
    implementation here are refused after the model is built (`layers/mamba.py`)."""
    model = ", ".join(config.model_config.architectures)
    if config.speculative_config is not None:
        raise BackplaneError(
            f"{model} carries a recurrent state, which cannot be rolled back here when a draft token is rejected; "
            "remove --speculative-config"
        )
    if getattr(config.cache_config, "use_replayssm", False):
        raise BackplaneError("replaying recurrent states is not supported; remove --use-replayssm")


def refuse_unshareable(config: VllmConfig, device: Device) -> None:
    """Raises if the load format shares weights between workers, and the device or another option prevents it."""
    if config.load_config.load_format not in load_formats.ALL_SHARED:
        return
    if not device.capabilities.host_memory:
        raise BackplaneError(
            f"--load-format {load_formats.SHARED} shares weights in the host's memory, and on device {device.name!r} "
            "each worker has its weights in the memory of its own card; remove the option"
        )
    if not hasattr(os, "memfd_create"):
        raise BackplaneError(f"--load-format {load_formats.SHARED} needs Linux's memfd; remove the option")
    if config.model_config is not None and config.model_config.enable_sleep_mode:
        raise BackplaneError(
            f"--enable-sleep-mode releases memory, and other workers may still use the weights that --load-format "
            f"{load_formats.SHARED} shares; remove one of the two"
        )


def refuse_unfetchable(config: VllmConfig, chosen: Runtime) -> None:
    """Raises if the server is to offer its weights to peers, or to load them from a peer, and another option prevents
    it."""
    loading, model, offers = config.load_config, config.model_config, chosen.setting("weights_listen") is not None
    if loading.load_format == load_formats.PEER:
        load_formats.parse_peer_settings(loading.model_loader_extra_config)
    elif not offers:
        return
    option = "weights_listen" if offers else f"--load-format {load_formats.PEER}"
    if model is not None and model.quantization is not None:
        raise BackplaneError(
            f"{option} does not support quantized weights ({model.quantization}): their layout in memory differs from "
            "the checkpoint's; remove it"
        )
    if offers and config.lora_config is not None:
        raise BackplaneError("weights_listen does not support LoRA adapters; remove it, or --enable-lora")
    if offers and config.parallel_config.data_parallel_size > 1:
        raise BackplaneError("weights_listen supports one replica only; remove it, or --data-parallel-size")
    if offers and model is not None and model.enable_sleep_mode:
        raise BackplaneError("weights_listen needs weights that never sleep; remove it, or --enable-sleep-mode")


def refuse_unused_group_size(config: VllmConfig, chosen: Runtime) -> None:
    """Raises if quantization_group is set and no weights are quantized at loading. vLLM also makes a configuration for
    the draft model; there it suffices that the target model is quantized."""
    from vllm_backplane.quantization.online.formats import ONLINE

    group, drafting = chosen.settings[""]["quantization_group"], config.speculative_config
    models = [config.model_config, drafting.target_model_config if drafting is not None else None]
    given = [model.quantization for model in models if model is not None]
    if group.value is not None and given and not set(given) & set(ONLINE):
        raise BackplaneError(
            f"quantization_group is {group.value} ({group.source}), and no weights are quantized at loading; add "
            f"--quantization {' or '.join(ONLINE)}, or remove quantization_group"
        )


_EXPERTS = {"experts", "routed_experts"}
"""Names of the layer with the experts in vLLM's releases."""


def refuse_expert_adapters(config: VllmConfig) -> None:
    """Raises if LoRA would apply to experts. vLLM's default is adapters for all layers, and its adapters for experts
    are part of kernels that other platforms lack."""
    adapted, model = config.lora_config, config.model_config
    if adapted is None or model is None or not model.is_moe:
        return
    if adapted.target_modules is None or any(_EXPERTS & set(name.split(".")) for name in adapted.target_modules):
        raise BackplaneError(
            f"the experts of {', '.join(model.architectures)} take no LoRA adapters here; name other layers, as with "
            "--lora-target-modules q_proj k_proj v_proj o_proj, or remove --enable-lora"
        )
