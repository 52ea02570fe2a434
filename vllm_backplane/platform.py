"""Implements vLLM's platform interface with the properties and classes of the chosen device.

Importing this module chooses the device, and raises if the device cannot be used. vLLM imports the module outside of
any try block, so the error reaches the user; vLLM does not fall back to another platform.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.platforms.interface import Platform, PlatformEnum

from vllm_backplane.device.triton_features import refuse_features_that_need_triton
from vllm_backplane.errors import BackplaneError
from vllm_backplane.guards import guarded, set_drift
from vllm_backplane.patches import application
from vllm_backplane.process.engine_exit import shut_engines_down_at_exit
from vllm_backplane.process.forked_sockets import release_sockets_in_engines
from vllm_backplane.process.orphan_watchdog import watch_in_engines
from vllm_backplane.process.start_signals import end_start_on_signals
from vllm_backplane.process.vllm_torch import bind_torch_of_vllm
from vllm_backplane.runtime import configured, runtime
from vllm_backplane.start_display.left_out import install_filters
from vllm_patchbay.patch import Process

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from torch.distributed import PrefixStore, ProcessGroup
    from vllm.config import VllmConfig
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
    from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger("vllm." + __name__)  # vLLM configures handlers for its own logger tree only

install_filters()
# Early: if the server is killed while its engine starts, a spawned engine would wait for it for minutes.
watch_in_engines()
shut_engines_down_at_exit()
_device = runtime().device
bind_torch_of_vllm(_device, 0)
if _device.capabilities.fork:
    # vLLM's command line sets spawn unless the variable is set; it checks that after importing this module.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    release_sockets_in_engines()
if not _device.capabilities.triton:
    # If Triton finds a GPU, vLLM would select its V2 model runner, which needs Triton for Backplane's device as well.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
set_drift(runtime().setting("patch_drift"))
application.apply_patches(runtime().setting("patch_drift"), Process.PLATFORM, Process.ENGINE)


MIDDLEWARES = (
    "vllm_backplane.lora.http_errors.AdapterErrors",
    "vllm_backplane.http.message_text.MessageText",
    "vllm_backplane.http.sleep_gate.SleepGate",
)
"""The ASGI middlewares that Backplane adds to vLLM's HTTP server, which imports them by name."""


def add_middlewares(parser: ArgumentParser) -> None:
    """Appends the middlewares to the default of ``--middleware``. A parser without that option is not a server's."""
    given = parser.get_default("middleware")
    # vLLM imports them when the engine runs. Imported here, their guards are verified before.
    import vllm_backplane.http.sleep_gate  # noqa: F401

    # 'vllm snapshot create' defines the option only to reject it.
    if given is not None and "snapshot" not in parser.prog:
        parser.set_defaults(middleware=[*given, *(name for name in MIDDLEWARES if name not in given)])


@guarded("vllm.platforms.interface:Platform.is_out_of_tree", why="it reads the kind of the platform, which is set here")
class BackplanePlatform(Platform):
    """Implements vLLM's platform for the chosen device."""

    is_backplane = True

    _enum = PlatformEnum.OOT
    device_name = _device.torch_type  # vLLM builds torch.device(f"{device_name}:{index}") from it
    device_type = _device.torch_type
    dispatch_key = _device.dispatch_key
    dist_backend = _device.collective_backend
    device_control_env_var = _device.visible_cards_variable
    ray_device_key = _device.ray_resource
    simple_compile_backend = "eager"  # for small helper functions, whose compilation delays start-up for no gain

    # --- identity and properties ------------------------------------------------------------------------------

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return list(_device.capabilities.dtypes)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return _device.properties(device_id).name

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        return _device.properties(device_id).uuid

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return _device.properties(device_id).compute_units

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        total = _device.memory(device_id).total
        # vLLM uses this as a measure of speed, and chooses larger batches from 70 GiB on. The size of a host's memory
        # does not indicate speed, so it is capped.
        return min(total, 64 << 30) if _device.capabilities.host_memory else total

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        index = torch.device(device).index if device is not None else None
        return float(_device.own_memory(index or 0))

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        if dtype not in _device.capabilities.dtypes:
            supported = ", ".join(str(d).removeprefix("torch.") for d in _device.capabilities.dtypes)
            raise BackplaneError(
                f"device {_device.name!r} cannot compute in {dtype}; choose --dtype among: {supported}"
            )

    # --- control ----------------------------------------------------------------------------------------------

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        _device.set_current(device.index or 0)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        _device.seed(seed)

    @classmethod
    def inference_mode(cls) -> Any:
        return torch.inference_mode(mode=True)

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return _device.capabilities.pinned_memory

    @classmethod
    def is_sleep_mode_available(cls) -> bool:  # an instance method upstream
        return _device.capabilities.sleep

    def get_global_graph_pool(self) -> None:
        """Returns no pool. Upstream returns CUDA's memory pool for graphs; here each graph has its own memory
        (`vllm_backplane.device.graph`)."""

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return _device.capabilities.graphs

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """Accepts encoder-decoder models: the attention here addresses each layer's own cache. Upstream raises."""

    @classmethod
    def opaque_attention_op(cls) -> bool:
        return True

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        """Raises for a quantization method without kernels here. Upstream accepts all methods if its list is empty."""
        from vllm_backplane.gguf.hf_config import QUANTIZATION
        from vllm_backplane.quantization.checkpoint import registration
        from vllm_backplane.quantization.online import formats

        if quant not in formats.ONLINE and quant != QUANTIZATION and quant not in registration.NAMES:
            raise registration.unsupported(f"quantization {quant} (of the checkpoint, or of --quantization)")

    # --- kernels and classes that vLLM loads ------------------------------------------------------------------

    @classmethod
    def import_kernels(cls) -> None:
        """Does nothing: vLLM's compiled kernels are not used."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        from vllm_backplane.binding import ir

        ir.register()

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: VllmConfig) -> IrOpPriorityConfig:
        from vllm_backplane.binding import ir

        return ir.priority()

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        from vllm.triton_utils import HAS_TRITON

        from vllm_backplane.runner import triton_replacements

        if not (HAS_TRITON and _device.capabilities.triton):
            triton_replacements.register()

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum | None,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        from vllm_backplane.attention.selection import backend_path

        return backend_path(selected_backend, attn_selector_config, _device)

    @classmethod
    def get_mla_prefill_backend_cls(cls, mla_selector_config: MLAPrefillSelectorConfig) -> type[MLAPrefillBackend]:
        from vllm_backplane.attention.mla import UnusedMLAPrefillBackend

        return UnusedMLAPrefillBackend

    @classmethod
    def get_punica_wrapper(cls) -> str:
        return "vllm_backplane.lora.punica.BackplanePunicaWrapper"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return _device.communicator or "vllm_backplane.distributed.communicator.BackplaneCommunicator"

    @classmethod
    def stateless_init_device_torch_dist_pg(
        cls, backend: str, prefix_store: PrefixStore, group_rank: int, group_size: int, timeout: timedelta
    ) -> ProcessGroup:
        """Raises: vLLM builds gloo groups itself, and no device has another backend."""
        raise BackplaneError(
            f"device {_device.name!r} has no stateless process group over {backend!r}; set "
            "Device.collective_backend to 'gloo' for data parallelism"
        )

    # --- configuration ----------------------------------------------------------------------------------------

    @classmethod
    def pre_register_and_update(cls, parser: ArgumentParser | None = None) -> None:
        """Adds Backplane's middlewares to the server's parser. vLLM calls this before it parses a command line."""
        if parser is not None:
            add_middlewares(parser)

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        """Turns compilation off, and graphs on where the user or the device wants them, before vLLM fills in its
        defaults."""
        from vllm_backplane.config import graphs

        chosen = configured(vllm_config.additional_config)
        refuse_features_that_need_triton(vllm_config, chosen.device)
        graphs.set_compilation_defaults(vllm_config, chosen)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Adapts vLLM's configuration to the device, or raises for options that the device cannot fulfil."""
        from vllm_backplane.config import stages, start_report

        end_start_on_signals()
        chosen = configured(vllm_config.additional_config)
        stages.apply(vllm_config, chosen)
        start_report.report_model(vllm_config, chosen)
        logger.info_once("Backplane runs on device %s: %s", chosen.device.name, chosen.selection.reason)
        if patched := application.status_line():
            logger.info_once("%s", patched)
