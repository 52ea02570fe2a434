"""Implements the device `cpu`, the host's processor, which is the default and available everywhere."""

from vllm_backplane.devices.cpu.device import CpuDevice

__all__ = ["CpuDevice"]
