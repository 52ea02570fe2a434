"""The host's own processor as a device: the default, available everywhere."""

from vllm_backplane.devices.cpu.device import CpuDevice

__all__ = ["CpuDevice"]
