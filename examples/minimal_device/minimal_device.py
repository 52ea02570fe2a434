"""The smallest useful device: vLLM runs on it, on the references alone. A vendor starts here."""

import psutil
import torch

from vllm_backplane.device import Capabilities, Device, MemoryInfo, Probe


class MinimalDevice(Device):
    name = "minimal"
    torch_type = "cpu"  # yours: the torch device type of your tensors
    dispatch_key = "CPU"  # yours: PrivateUse1, or your backend's own key
    capabilities = Capabilities(dtypes=(torch.float32,), host_memory=True, default_memory_share=0.1)

    @classmethod
    def probe(cls) -> Probe:
        # Look for the hardware; never raise. If it is not there, say why and what to do.
        return Probe(available=True, count=1)

    def memory(self, index: int = 0) -> MemoryInfo:
        now = psutil.virtual_memory()
        return MemoryInfo(total=now.total, free=now.available)
