"""Holds the contract between Backplane and an accelerator, the registry of devices and their selection.

It imports `settings/options` and `errors` of this package, and nothing of vLLM.
"""

from vllm_backplane.device.contract import (
    Capabilities,
    CodeLayout,
    Device,
    MemoryInfo,
    Probe,
    Properties,
)
from vllm_backplane.device.registry import ENTRY_POINT_GROUP, DeviceEntry, discover
from vllm_backplane.device.selection import Selection, select

__all__ = [
    "ENTRY_POINT_GROUP",
    "Capabilities",
    "CodeLayout",
    "Device",
    "DeviceEntry",
    "MemoryInfo",
    "Probe",
    "Properties",
    "Selection",
    "discover",
    "select",
]
