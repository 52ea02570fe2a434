"""How vLLM schedules: ahead of the device or not, and with which of its schedulers.

Async scheduling on a device without streams is off unless somebody asks for it.

vLLM schedules a step while the one before it runs. A device without streams runs nothing beside the host: each token
then reaches the client a step late, and every request computes one token that is thrown away. vLLM turns it on for
everyone who says nothing, and tells the platform only afterwards; who asked for it is known from `explicit_arguments`.

With LoRA, vLLM's scheduler is one that can end a request whose adapter cannot be loaded (`scheduler.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_backplane.kv_offload import settings as kv_offload
from vllm_backplane.settings.carried_state import state_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_backplane.device import Device

logger = init_logger("vllm." + __name__)

SCHEDULER, ASYNC_SCHEDULER = (
    f"vllm_backplane.lora.scheduler.{name}" for name in ("BackplaneScheduler", "BackplaneAsyncScheduler")
)


def settle(config: VllmConfig, device: Device) -> None:
    """Called for every configuration, also for copies that other processes make of one."""
    scheduler = config.scheduler_config
    if device.capabilities.streams or not scheduler.async_scheduling:
        return
    if state_of(config).explicit_arguments.get("async_scheduling"):
        logger.warning_once(
            "Scheduling is asynchronous, as asked for: device %s has no streams to overlap with, so tokens come a step "
            "later than without --async-scheduling.",
            device.name,
        )
        return
    scheduler.async_scheduling = False
    logger.info_once("Scheduling is synchronous: device %s has no streams to overlap with.", device.name)


def choose_scheduler(config: VllmConfig) -> None:
    """After `settle`. The user's own class stays, and so does vLLM's where the requests are not answered in tokens: its
    server takes such a request for one that has been answered, and fails."""
    scheduler = config.scheduler_config
    if config.lora_config is None or scheduler.scheduler_cls not in (None, SCHEDULER, ASYNC_SCHEDULER):
        return
    if config.model_config.runner_type != "generate" or _other_connector(config):
        return
    if getattr(config, "diffusion_config", None) is not None:  # vLLM has schedulers of its own for those, since 0.32
        return
    scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER


def ends_unserved(config: VllmConfig) -> bool:
    return config.scheduler_config.scheduler_cls in (SCHEDULER, ASYNC_SCHEDULER)


def _other_connector(config: VllmConfig) -> bool:
    """One that may keep KV blocks of a request which is about to end; ours keeps none of requests with an adapter."""
    transfer = config.kv_transfer_config
    return transfer is not None and transfer.kv_connector not in (None, kv_offload.NAME)
