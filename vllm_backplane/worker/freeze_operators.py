"""Loads the device's kernels and freezes which implementation each operator uses.

The choice belongs to the process: a second engine in the same process must request the same references.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.logger import init_logger

from vllm_backplane.device import Device
from vllm_backplane.ops import resolution

logger = init_logger("vllm." + __name__)


def freeze_operators(device: Device, references: Sequence[str]) -> None:
    """Resolves and freezes the operators. `references` names operators that use their reference even if the device has
    a kernel."""
    if resolution.frozen() is not None:  # by another engine of this process
        resolution.require_same_references(references)
        return
    device.load_kernels()
    table = resolution.resolve(device.dispatch_key, device.kernel_provider(), references)
    resolution.freeze(table, device.dispatch_key)
    kernels = sum(line.implementation == "kernel" for line in table)
    logger.info(
        "Operators on device %s: %d by kernel, %d by reference; 'vllm-backplane ops' lists them.",
        device.name,
        kernels,
        len(table) - kernels,
    )
    for problem, remedy in device.problems():
        logger.warning("%s. Remedy: %s.", problem, remedy)
