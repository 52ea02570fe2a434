"""Async scheduling on a device without streams: off unless a command line asks for it.

vLLM schedules a step while the one before it runs. A device without streams runs nothing beside the host: each token
then reaches the client a step late, and every request computes one token that is thrown away. vLLM turns it on for
everyone who says nothing, and tells the platform only afterwards. The command line is where both can be told apart: its
default becomes `--no-async-scheduling`, so that what arrives as on was asked for, and is done.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_backplane.device import Device

logger = init_logger("vllm." + __name__)

_OPTION = "async_scheduling"
_ASKED_FOR = "backplane_async_scheduling_asked_for"

_stated = False
"""Whether this process reads a command line on which the default has been turned."""


def turn_default(parser: argparse.ArgumentParser, device: Device) -> None:
    global _stated
    if not device.capabilities.streams:
        parser.set_defaults(**{_OPTION: False})
        _stated = True


def settle(config: VllmConfig, device: Device) -> None:
    """Called for every configuration, also for copies that other processes make of one."""
    scheduler, told = config.scheduler_config, config.additional_config
    if device.capabilities.streams or not scheduler.async_scheduling:
        return
    noted = told if isinstance(told, dict) else {}
    if _stated or noted.get(_ASKED_FOR):
        noted[_ASKED_FOR] = True
        logger.warning_once(
            "Scheduling is asynchronous, as asked for: device %s has no streams to overlap with, so tokens come a step "
            "later than without --async-scheduling.",
            device.name,
        )
        return
    scheduler.async_scheduling = False
    logger.info_once("Scheduling is synchronous: device %s has no streams to overlap with.", device.name)
