"""Async scheduling on a device without streams: off unless somebody asks for it.

vLLM schedules a step while the one before it runs. A device without streams runs nothing beside the host: each token
then reaches the client a step late, and every request computes one token that is thrown away. vLLM turns it on for
everyone who says nothing, and tells the platform only afterwards; who asked for it is known from `stated_options`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_backplane.stated_options import stated

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_backplane.device import Device

logger = init_logger("vllm." + __name__)


def settle(config: VllmConfig, device: Device) -> None:
    """Called for every configuration, also for copies that other processes make of one."""
    scheduler = config.scheduler_config
    if device.capabilities.streams or not scheduler.async_scheduling:
        return
    if stated(config.additional_config, "async_scheduling"):
        logger.warning_once(
            "Scheduling is asynchronous, as asked for: device %s has no streams to overlap with, so tokens come a step "
            "later than without --async-scheduling.",
            device.name,
        )
        return
    scheduler.async_scheduling = False
    logger.info_once("Scheduling is synchronous: device %s has no streams to overlap with.", device.name)
