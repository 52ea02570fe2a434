"""The contract between Backplane and an accelerator. Knows nothing of vLLM."""

from vllm_backplane.device.contract import (
    Capabilities,
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
    "Device",
    "DeviceEntry",
    "MemoryInfo",
    "Probe",
    "Properties",
    "Selection",
    "discover",
    "select",
]
