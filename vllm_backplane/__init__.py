"""Backplane: the hardware side of vLLM, into which any accelerator plugs as a device.

vLLM imports this module in every process to call the entry-point functions below, so nothing here costs
time, and nothing here may raise: vLLM logs an exception of a platform plugin at DEBUG level only and carries
on with another platform. Faults surface when vLLM imports the platform class, where they are fatal.
"""

from __future__ import annotations


def register_platform() -> str:
    """Entry point of the group ``vllm.platform_plugins``."""
    return "vllm_backplane.platform.BackplanePlatform"


def register_general() -> None:
    """Entry point of the group ``vllm.general_plugins``: runs in every vLLM process, may run twice."""
    from vllm_backplane.plugin import activate

    activate()
