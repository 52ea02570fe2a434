"""The model runner: vLLM's own, whichever of its two it asks for.

Nothing is copied from vLLM's runners. What they assume of CUDA they reach through `torch.Event`, `torch.cuda.Stream`
and Triton kernels: `host_stand_ins.py` answers for the first two where the device has none, and
`runner/triton_kernels.py` replaces the third.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_backplane.device import Device
from vllm_backplane.process.cuda_shims import host_events


def make_model_runner(vllm_config: VllmConfig, torch_device: torch.device, device: Device) -> Any:
    """The runner for this configuration; the worker does not care which."""
    if device.model_runner is not None:
        cls = resolve_obj_by_qualname(device.model_runner)
    elif vllm_config.use_v2_model_runner:
        from vllm_backplane.runner.v2 import BackplaneModelRunnerV2 as cls
    else:
        from vllm_backplane.runner.v1 import BackplaneModelRunnerV1 as cls
    with host_events(device):
        return cls(vllm_config, torch_device, device)
