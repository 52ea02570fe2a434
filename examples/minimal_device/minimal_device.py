"""Implements the smallest useful device: every operator runs its PyTorch reference. Vendors can start from here."""

import psutil
import torch

from vllm_backplane.device import Capabilities, Device, MemoryInfo, Probe


class MinimalDevice(Device):
    name = "minimal"
    torch_type = "cpu"  # replace: the torch device type of your tensors
    dispatch_key = "CPU"  # replace: PrivateUse1, or your backend's own key
    capabilities = Capabilities(dtypes=(torch.float32,), host_memory=True, default_memory_share=0.1)

    @classmethod
    def probe(cls) -> Probe:
        # Detect the hardware without raising. If it is missing, return the reason and a remedy.
        return Probe(available=True, count=1)

    def memory(self, index: int = 0) -> MemoryInfo:
        now = psutil.virtual_memory()
        return MemoryInfo(total=now.total, free=now.available)
