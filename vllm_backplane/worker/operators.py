"""The operators of a worker: kernels are loaded, every operator's implementation is chosen, and nothing changes after.

The table is the process's: a second engine in it must want what the first one has.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.logger import init_logger

from vllm_backplane.device import Device
from vllm_backplane.ops import resolution

logger = init_logger("vllm." + __name__)


def freeze_operators(device: Device, references: Sequence[str]) -> None:
    """`references`: operators that are to be computed by their reference although the device has a kernel."""
    if resolution.frozen() is not None:  # by another engine of this process
        resolution.insist_on_references(references)
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
