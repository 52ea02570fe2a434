"""Implements the device `sim`, a simulated NPU with its own memory, streams, events, graphs and faults.

Its arithmetic is real, and the host cannot access the memory of its cards. The driver (`csrc/sim/driver`) takes the
place of a vendor's driver; the runtime (`csrc/sim/runtime`) makes it a PyTorch device, as a vendor's runtime would.
This folder has the Python part of such a device.
"""

from vllm_backplane.devices.sim.device import SimDevice

__all__ = ["SimDevice"]
