"""Runs vLLM's V2 model runner on a Backplane device. This runner needs Triton for the device."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_backplane.device import Device
from vllm_backplane.guards import guarded


@guarded(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner._dummy_run",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.profile_run",
    why="steps for profiling come from it",
    feature="V2 model runner",
)
class BackplaneModelRunnerV2(GPUModelRunner):
    max_num_tokens: int

    def __init__(self, vllm_config: VllmConfig, torch_device: torch.device, device: Device) -> None:
        self.backplane_device = device  # vLLM's attribute `device` is a torch.device
        super().__init__(vllm_config, torch_device)

    def profile_step(self, tokens: int) -> None:
        """Runs upstream's profiling step with `tokens` tokens."""
        largest, self.max_num_tokens = self.max_num_tokens, tokens
        try:
            self.profile_run()
        finally:
            self.max_num_tokens = largest

    def profile_forward(self, tokens: int) -> None:
        """Runs only the forward pass of a profiling step, with `tokens` tokens."""
        self._dummy_run(tokens, skip_attn=True, is_profile=True)
        self.backplane_device.synchronize()

    def warm_up(self) -> None:
        """Does nothing: graphs with this runner are refused (`config/graphs.py`)."""
