"""A simulated NPU: memory that the host cannot touch, streams, events, graphs, faults, and real arithmetic.

The driver (`csrc/sim/driver`) stands in for a vendor's; the runtime (`csrc/sim/runtime`) makes it a PyTorch device, as
a vendor's runtime would. What is in this folder is what a device of one's own needs in Python.
"""

from vllm_backplane.devices.sim.device import SimDevice

__all__ = ["SimDevice"]
