"""Creates the model runner of a worker: a subclass of one of vLLM's two runners, or the device's own class.

Nothing is copied from vLLM's runners. They depend on CUDA through `torch.Event`, `torch.cuda.Stream` and Triton
kernels. `process/vllm_torch.py` replaces the first two on a device that has none, and `runner/triton_replacements.py`
replaces the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_backplane.device import Device


def make_model_runner(vllm_config: VllmConfig, torch_device: torch.device, device: Device) -> Any:
    """Returns the runner for this configuration. The worker uses all runners through the same methods."""
    if device.model_runner is not None:
        cls = resolve_obj_by_qualname(device.model_runner)
    elif vllm_config.use_v2_model_runner:
        from vllm_backplane.runner.v2 import BackplaneModelRunnerV2 as cls
    else:
        from vllm_backplane.runner.v1 import BackplaneModelRunnerV1 as cls
    return cls(vllm_config, torch_device, device)
