"""Decides whether vLLM schedules asynchronously, and which scheduler class it uses.

With async scheduling, vLLM schedules a step while the step before it runs. A device without streams runs nothing
concurrently with the host: each token then reaches the client one step late, and every request computes one token that
is discarded. Async scheduling is therefore off on such a device, unless the user requests it. vLLM turns it on by
default before the platform sees the configuration, so the user's choice is read from `settings/explicit_arguments.py`.

With LoRA, the scheduler is a subclass of vLLM's that can fail a request whose adapter cannot be loaded
(`lora/scheduler.py`). With metrics, it is one that measures its time (`metrics/scheduler.py`).
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
MEASURED_SCHEDULER, MEASURED_ASYNC_SCHEDULER = (
    f"vllm_backplane.metrics.scheduler.{name}" for name in ("MeasuredScheduler", "MeasuredAsyncScheduler")
)
OWN = (SCHEDULER, ASYNC_SCHEDULER, MEASURED_SCHEDULER, MEASURED_ASYNC_SCHEDULER)


def set_async_scheduling(config: VllmConfig, device: Device) -> None:
    """Turns async scheduling off on a device without streams, unless the user requested it.

    It runs for every configuration, also for copies of one in other processes.
    """
    scheduler = config.scheduler_config
    if device.capabilities.streams or not scheduler.async_scheduling:
        return
    if state_of(config).explicit_arguments.get("async_scheduling"):
        logger.warning_once(
            "Scheduling is asynchronous, as requested: device %s has no streams to overlap with, so tokens arrive one "
            "step later than without --async-scheduling.",
            device.name,
        )
        return
    scheduler.async_scheduling = False
    logger.info_once("Scheduling is synchronous: device %s has no streams to overlap with.", device.name)


def choose_scheduler(config: VllmConfig) -> None:
    """Sets the scheduler class for metrics and for LoRA, after `set_async_scheduling`.

    A class that the user named stays. Pooling models get no class that fails requests, because vLLM's server treats a
    pooling request that was ended with an error as complete, and fails.
    """
    scheduler = config.scheduler_config
    if scheduler.scheduler_cls not in (None, *OWN):
        return
    if getattr(config, "diffusion_config", None) is not None:  # vLLM has schedulers for diffusion models, since 0.32
        return
    is_async = scheduler.async_scheduling
    if _needs_failing_requests(config):
        scheduler.scheduler_cls = ASYNC_SCHEDULER if is_async else SCHEDULER
    elif state_of(config).metrics_folder is not None:
        scheduler.scheduler_cls = MEASURED_ASYNC_SCHEDULER if is_async else MEASURED_SCHEDULER


def _needs_failing_requests(config: VllmConfig) -> bool:
    return (
        config.lora_config is not None
        and config.model_config.runner_type == "generate"
        and not _other_connector(config)
    )


def can_fail_requests(config: VllmConfig) -> bool:
    """Returns whether the scheduler can fail single requests that a worker has marked."""
    return config.scheduler_config.scheduler_cls in (SCHEDULER, ASYNC_SCHEDULER)


def _other_connector(config: VllmConfig) -> bool:
    """Returns whether a KV connector other than Backplane's is configured. It may store KV blocks of a request that is
    about to fail; Backplane's connector stores none of requests with an adapter."""
    transfer = config.kv_transfer_config
    return transfer is not None and transfer.kv_connector not in (None, kv_offload.NAME)
